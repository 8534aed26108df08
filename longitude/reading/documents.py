"""The text of files (plain text, Markdown, HTML, PDF or standard input), cut into windows.

A file's type is detected from its first bytes, then from its name. Nothing is fetched. UTF-8 is the
default; a byte order mark means UTF-16 or UTF-32, and an HTML page that is not UTF-8 may name its
charset. Anything else is refused: a wrong guess would pass for the text. A window ends at a
paragraph, a line, a sentence, or at least a word, if there is such an end in its last part; joined,
the windows equal the text. BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance
Framework") ranks windows by a question's words:
Σ idf · f · (k + 1) / (f + k · (1 - b + b · n / mean n)) with f the frequency of a word in a window
of n words, idf = ln(1 + (N - m + 1/2) / (m + 1/2)), and m of N windows containing the word.
"""

from __future__ import annotations

import html
import io
import logging
import math
import re
import stat
import sys
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from longitude.core.store import marked_encoding
from longitude.core.validate import UserError, short, shown

STDIN = "-"
MAX_BYTES = 2**30  # of a file: a longer one is no document, or an endless stream
URL = re.compile(r"\w[\w+.-]*://|www\.", re.ASCII)
OPEN_PIPE = re.compile(r"/dev/fd/\d+|/dev/stdin|/proc/self/fd/\d+")  # the shell's <(…)
Count = Callable[[str], int]  # how many tokens a text has
ENDS = (  # where a window may end, and the share of it that may be cut off for such an end
    (re.compile(r"\n\s*\n"), 0.25),
    (re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n"), 0.5),
    (re.compile(r"\s+"), 0.5),
)
CHARACTERS = 4.0  # per token, before any are counted
BM25_K, BM25_B = 1.2, 0.75
SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: each character is a word
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
HEAD = 1024  # leading bytes, from which a file's type is detected
PAGE_BREAK = "\n\n"
CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
HTML = re.compile(r"<(!doctype\s+html|html)\b", re.IGNORECASE)
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
# comments, declarations and scripts; an unterminated one reaches to the end of the page
NOT_SHOWN = re.compile(
    r"<!--.*?(?:-->|\Z)|<(script|style)\b.*?(?:</\1[^>]*>|\Z)|<[!?].*?(?:>|\Z)",
    re.IGNORECASE | re.DOTALL,
)
TAG = re.compile(r"<(/?)([a-z][^\s/>]*)((?:\"[^\"]*\"|'[^']*'|[^'\">]){0,2000})>", re.IGNORECASE)
HIDDEN = frozenset("template noscript svg".split())
BLOCKS = frozenset(
    "address article aside blockquote body br caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section "
    "summary table tbody tfoot thead title tr ul".split()
)


@dataclass(frozen=True)
class Document:
    """A text with its name; `pages` are the offsets of a PDF's pages."""

    name: str
    text: str
    pages: tuple[int, ...] = ()

    def place(self, start: int, stop: int) -> str:
        """Describe where these characters are, for a reader who wants to look them up."""
        unit, suffix = "page", ""
        if self.pages:
            ends = (start, max(start, stop - 1))
            first, last = (max(1, bisect_right(self.pages, at)) for at in ends)
        else:
            unit, first = "line", 1 + self.text.count("\n", 0, start)
            last = first + self.text[start:stop].rstrip("\n").count("\n")
            column = start - self.text.rfind("\n", 0, start)  # from 1
            suffix = f" from character {column:,}" if column > 1 and first == last else ""
        return (f"{unit} {first:,}" if first == last else f"{unit}s {first:,}–{last:,}") + suffix


def documents(names: Sequence[str], stdin: BinaryIO | None = None) -> list[Document]:
    """Read the documents of these files; `-` is standard input."""
    if not names:
        raise UserError("there is nothing to read: give files, or - for standard input.")
    if names.count(STDIN) > 1:
        raise UserError("standard input can be read once, but - was given twice: give it once.")
    return [document(name, stdin) for name in names]


def document(name: str, stdin: BinaryIO | None = None) -> Document:
    """Read the text of one file."""
    label = "standard input" if name == STDIN else f"file {shown(name)}"
    if name == STDIN and stdin is None and sys.stdin is None:
        raise UserError("standard input is closed: pipe a text in, or give a file.")
    data = (stdin or sys.stdin.buffer).read(MAX_BYTES + 1) if name == STDIN else _read(name, label)
    if len(data) > MAX_BYTES:
        raise UserError(f"{label} is longer than {MAX_BYTES / 2**30:.0f} GiB: give a part of it.")
    pages, suffix = (), Path(name).suffix.lower()
    try:
        if not data:
            raise NoText("is empty: give one with text in it")
        if b"%PDF-" in data[:HEAD]:  # some PDFs have a few bytes before it
            text, pages = from_pdf(data)
        elif suffix == ".pdf":
            raise NoText("has the suffix .pdf but is not a PDF: rename it, or give the PDF")
        else:
            text = decode(data)
            head = text[: 4 * HEAD].lstrip()
            marked = head.startswith("<") and HTML.search(head)
            text = from_html(text) if marked or suffix in HTML_SUFFIXES else text
        if not text.strip():
            raise NoText("holds nothing but white space: give one with text in it")
    except NoText as error:
        raise UserError(f"{label} {error}.") from error
    return Document("standard input" if name == STDIN else name, text, pages)


def _read(name: str, label: str) -> bytes:
    """Read the bytes of a file. Raises for what can't be read to its end: folders, devices, and
    pipes, except those that a shell opened."""
    try:
        mode = Path(name).stat().st_mode if name else 0
        if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and OPEN_PIPE.fullmatch(name)):
            with Path(name).open("rb") as file:
                return file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{shown(name)} is a URL, and nothing is fetched: download it and give the file, "
            "or pipe it into `longitude read -`."
            if URL.match(name)
            else f"there is no file {shown(name)}: give a path that exists, or - for a pipe."
        ) from None
    except (OSError, ValueError) as error:  # no permission, a name too long or with a NUL
        why = short(getattr(error, "strerror", None) or str(error), 120)
        raise UserError(f"{label} can't be read ({why}): give one that you may read.") from None
    if not name:
        raise UserError("a file's name is empty: give a path, or - for standard input.")
    if stat.S_ISDIR(mode):
        folder = shown(name + "/")
        raise UserError(f"{shown(name)} is a folder: give the files in it, as in {folder}*.")
    raise UserError(f"{label} is a pipe or a device: give a file, or pipe it in and give -.")


# bytes as text


class NoText(Exception):
    """Raised for a file without text; the message says why and what to do, after its name."""


def decode(data: bytes) -> str:
    """Decode bytes as text; raises if they are not text."""
    bom_encoding = marked_encoding(data)
    charset = None if bom_encoding else CHARSET.search(data[:HEAD])
    encodings = [bom_encoding or "utf-8", *([charset[1].decode("ascii")] if charset else [])]
    text, first = "\0", 0
    for encoding in encodings:
        try:
            text = data.decode(encoding)
            break
        except (UnicodeError, LookupError) as error:
            first = getattr(error, "start", 0)
    else:
        if encodings != ["utf-8"]:
            raise NoText(f"declares {encodings[-1]}, which can't decode it: save it as UTF-8")
        if b"\0" not in data:
            raise NoText(f"is not UTF-8 (see byte {first:,}), or no text at all: save it as UTF-8")
    if "\0" in text:
        raise NoText("is binary, no text: give text, Markdown, HTML or PDF")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def from_html(page: str) -> str:
    """Return the visible text of a page, one line per block."""
    page = NOT_SHOWN.sub("", page)
    parts: list[str] = []
    hidden: list[str] = []  # open elements that are not shown, outermost first
    position = preformatted = 0
    # only up to the last ">": unterminated tags, maybe a million, would each scan to the end
    tags = [*TAG.finditer(page, 0, page.rfind(">") + 1), None]
    for tag in tags:
        text = html.unescape(page[position : tag.start() if tag else None])
        if not preformatted:
            text = re.sub(r"\s+", " ", text)
            text = text.lstrip() if not parts or parts[-1][-1].isspace() else text
        parts += [text] if text and not hidden else []
        if tag is None:
            break
        position, closes, name = tag.end(), bool(tag[1]), tag[2].lower()
        if name in HIDDEN and closes:
            hidden = hidden[: hidden.index(name)] if name in hidden else hidden
        elif name in HIDDEN:
            hidden += [] if tag[3].endswith("/") else [name]
        elif name in ("td", "th"):
            parts += [] if closes else ["\t"]
        elif name in BLOCKS:
            parts.append("\n\n" if name == "p" or re.fullmatch("h[1-6]", name) else "\n")
        preformatted += (name == "pre") * (-1 if closes and preformatted else not closes)
    lines = (line.rstrip() for line in "".join(parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def from_pdf(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Return a PDF's text, and the offset of each page in it."""
    try:
        import pypdf
    except ImportError:
        why = "is a PDF, which needs the package pypdf: pip install longitude[read]"
        raise NoText(why) from None
    log = logging.getLogger("pypdf")  # it warns of every small fault that it repairs
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise NoText("is a PDF that is locked with a password: unlock it first")
            pages = [page.extract_text() for page in reader.pages]
    except NoText:
        raise
    except Exception as error:  # pypdf raises errors of any kind where a PDF is damaged
        why = short(str(error), 80).rstrip(".") or type(error).__name__
        why = f"is a PDF that can't be read ({why}): repair it, or save it anew"
        if type(error).__name__ == "DependencyError":
            why = "is a PDF that is locked: unlock it, or pip install cryptography"
        raise NoText(why) from error
    finally:
        log.setLevel(level)
    # a PDF can contain code points that UTF-8 can't encode
    pages = [p.encode("utf-8", "replace").decode("utf-8").replace("\0", "") for p in pages]
    if not "".join(pages).strip():
        raise NoText("is a PDF without text, pictures alone: recognise its letters (OCR) first")
    starts = [sum(len(p) + len(PAGE_BREAK) for p in pages[:n]) for n in range(len(pages))]
    return PAGE_BREAK.join(pages), tuple(starts)


# windows


@dataclass(frozen=True)
class Piece:
    """Characters `start` to `stop` of a document."""

    document: Document
    start: int
    stop: int

    @property
    def text(self) -> str:
        return self.document.text[self.start : self.stop]

    @property
    def place(self) -> str:
        """Where it is in its document, for a reader who wants to look it up."""
        return self.document.place(self.start, self.stop)


def pieces(documents: Iterable[Document], most: int, count: Count) -> Iterator[Piece]:
    """Yield the documents in pieces of at most `most` tokens; none spans two documents."""
    if most < 1:
        raise UserError(f"a piece of text has 1 token or more, but got {shown(most)}: give more.")
    for document in documents:
        start, rate = 0, CHARACTERS
        while start < len(document.text):
            size, rate = _fitting_size(document.text, start, most, rate, count)
            text = document.text[start : start + size]
            if start + size < len(document.text):
                for pattern, share in ENDS:
                    ends = [m.end() for m in pattern.finditer(text, int(size * (1 - share)))]
                    if ends:
                        size = ends[-1]
                        break
            yield Piece(document, start, start + size)
            start += size


def _fitting_size(text: str, at: int, most: int, rate: float, count: Count) -> tuple[int, float]:
    """Return how many characters from `at` on fit `most` tokens, and the characters per token."""
    left, size = len(text) - at, max(1, int(most * rate))
    grown = False
    while True:
        size = min(size, left)
        tokens = max(1, count(text[at : at + size]))
        rate = size / tokens
        if tokens > most and size > 1:
            size = max(1, min(size - 1, int(most * rate * 0.98)))
        elif size < left and tokens < 0.9 * most and not grown:
            size, grown = int(most * rate * 0.98) + 1, True  # only once, since it may not fit
        else:
            return size, rate


# BM25


def most_relevant(texts: Sequence[str], question: str, most: int) -> list[int]:
    """Return the ascending indices of the `most` texts with the highest BM25, first among ties."""
    scores = bm25(texts, question)
    return sorted(sorted(range(len(texts)), key=lambda n: (-scores[n], n))[:most])


def bm25(texts: Sequence[str], question: str) -> list[float]:
    """Return each text's BM25 score for the question."""
    query_words = {*words(question)}
    counts, lengths = [], []
    for text in texts:
        count = Counter(words(text))
        counts.append({w: count[w] for w in query_words & count.keys()})
        lengths.append(count.total())
    mean_length = max(1.0, sum(lengths) / max(1, len(lengths)))
    frequencies = {word: sum(word in count for count in counts) for word in query_words}
    idf = {w: math.log(1 + (len(texts) - m + 0.5) / (m + 0.5)) for w, m in frequencies.items()}
    norms = [BM25_K * (1 - BM25_B + BM25_B * n / mean_length) for n in lengths]
    return [
        sum(idf[w] * f * (BM25_K + 1) / (f + k) for w, f in count.items())
        for count, k in zip(counts, norms, strict=True)
    ]


def excerpt(text: str, wanted: str, most: int = 200) -> str:
    """Return the sentence of a text with most of the wanted words, and the text after it, up to
    `most` characters in all."""
    sought = {*words(wanted)}
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    sentences = [text[a:b] for a, b in pairwise([*starts, len(text)])]
    best = max(range(len(sentences)), key=lambda n: (len(sought & {*words(sentences[n])}), -n))
    return text[starts[best] : starts[best] + most].strip()


def words(text: str) -> list[str]:
    return WORD.findall(text.casefold())
