"""The text of files (plain text, Markdown, HTML, PDF or standard input), cut into windows.

A file's type is seen from its first bytes, then from its name. Nothing is fetched. A window ends at
a paragraph, a line, a sentence, or at least a word, if there is one in its last part; joined, the
windows are the text. BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework")
ranks windows by a question's words: Σ idf · f · (k + 1) / (f + k · (1 - b + b · n / mean n)) with
f the frequency of a word in a window of n words, idf = ln(1 + (N - m + 1/2) / (m + 1/2)), m of N
windows having the word.
"""

from __future__ import annotations

import math
import re
import stat
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from longitude.core.validate import UserError, short, shown
from longitude.reading.formats import HEAD, NoText, decode, from_html, from_pdf, is_html

STDIN = "-"
MAX_BYTES = 2**30  # of a file: a longer one is no document, or never ends
URL = re.compile(r"\w[\w+.-]*://|www\.", re.ASCII)
OPEN_PIPE = re.compile(r"/dev/fd/\d+|/dev/stdin|/proc/self/fd/\d+")  # the shell's <(…)
Count = Callable[[str], int]  # how many tokens a text has
ENDS = (  # where a window may end, and how much of its last part may be given up for it
    (re.compile(r"\n\s*\n"), 0.25),
    (re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n"), 0.5),
    (re.compile(r"\s+"), 0.5),
)
CHARACTERS = 4.0  # per token, before any was counted
BM25_K, BM25_B = 1.2, 0.75
SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: each character is a word
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")


@dataclass(frozen=True)
class Document:
    """A text with its name; `pages` are the offsets of a PDF's pages."""

    name: str
    text: str
    pages: tuple[int, ...] = ()

    def place(self, start: int, stop: int) -> str:
        """Where these characters are, for a reader who wants to look them up."""
        what, within = "page", ""
        if self.pages:
            ends = (start, max(start, stop - 1))
            first, last = (max(1, bisect_right(self.pages, at)) for at in ends)
        else:
            what, first = "line", 1 + self.text.count("\n", 0, start)
            last = first + self.text[start:stop].rstrip("\n").count("\n")
            column = start - self.text.rfind("\n", 0, start)  # from 1
            within = f" from character {column:,}" if column > 1 and first == last else ""
        return (f"{what} {first:,}" if first == last else f"{what}s {first:,}–{last:,}") + within


def documents(names: Sequence[str], stdin: BinaryIO | None = None) -> list[Document]:
    """The documents of these files; `-` is standard input."""
    if not names:
        raise UserError("there is nothing to read: give files, or - for standard input.")
    if names.count(STDIN) > 1:
        raise UserError("standard input can be read once, but - was given twice: give it once.")
    return [document(name, stdin) for name in names]


def document(name: str, stdin: BinaryIO | None = None) -> Document:
    """The text of one file."""
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
        if b"%PDF-" in data[:HEAD]:  # some have a few bytes before it
            text, pages = from_pdf(data)
        elif suffix == ".pdf":
            raise NoText("is called .pdf but is none: rename it, or give the PDF")
        else:
            text = decode(data)
            text = from_html(text) if is_html(text, suffix) else text
        if not text.strip():
            raise NoText("holds nothing but white space: give one with text in it")
    except NoText as error:
        raise UserError(f"{label} {error}.") from error
    return Document("standard input" if name == STDIN else name, text, pages)


def _read(name: str, label: str) -> bytes:
    """The bytes of a file; raise for what can't be read to its end: folders, devices, and pipes but
    those that a shell is filling."""
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
    except (OSError, ValueError) as error:  # a closed folder, a name too long, a NUL in it
        why = short(getattr(error, "strerror", None) or str(error), 120)
        raise UserError(f"{label} can't be read ({why}): give one that you may read.") from None
    if not name:
        raise UserError("a file's name is empty: give a path, or - for standard input.")
    if stat.S_ISDIR(mode):
        folder = shown(name + "/")
        raise UserError(f"{shown(name)} is a folder: give the files in it, as in {folder}*.")
    raise UserError(f"{label} is a pipe or a device: give a file, or pipe it in and give -.")


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
        """Where it is, for a reader who wants to look it up."""
        return self.document.place(self.start, self.stop)


def pieces(documents: Iterable[Document], most: int, count: Count) -> Iterator[Piece]:
    """The documents in pieces of at most `most` tokens, one by one; none spans two documents."""
    if most < 1:
        raise UserError(f"a piece of text has 1 token or more, but got {shown(most)}: give more.")
    for document in documents:
        at, rate = 0, CHARACTERS
        while at < len(document.text):
            size, rate = _fitting_size(document.text, at, most, rate, count)
            text = document.text[at : at + size]
            if at + size < len(document.text):
                for end, share in ENDS:
                    ends = [m.end() for m in end.finditer(text, int(size * (1 - share)))]
                    if ends:
                        size = ends[-1]
                        break
            yield Piece(document, at, at + size)
            at += size


def _fitting_size(text: str, at: int, most: int, rate: float, count: Count) -> tuple[int, float]:
    """How many characters from here on have at most `most` tokens, and how many a token has."""
    left, size = len(text) - at, max(1, int(most * rate))
    grown = False
    while True:
        size = min(size, left)
        tokens = max(1, count(text[at : at + size]))
        rate = size / tokens
        if tokens > most and size > 1:
            size = max(1, min(size - 1, int(most * rate * 0.98)))
        elif size < left and tokens < 0.9 * most and not grown:
            size, grown = int(most * rate * 0.98) + 1, True  # once: it may not fit again
        else:
            return size, rate


# BM25


def most_relevant(texts: Sequence[str], question: str, most: int) -> list[int]:
    """The indices of the `most` texts with the highest BM25, in ascending order; ties go to the
    first."""
    scores = bm25(texts, question)
    return sorted(sorted(range(len(texts)), key=lambda n: (-scores[n], n))[:most])


def bm25(texts: Sequence[str], question: str) -> list[float]:
    """Each text's BM25 for the question."""
    wanted = {*words(question)}
    counts, sizes = [], []
    for text in texts:
        count = Counter(words(text))
        counts.append({w: count[w] for w in wanted & count.keys()})
        sizes.append(count.total())
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    having = {word: sum(word in count for count in counts) for word in wanted}
    idf = {w: math.log(1 + (len(texts) - m + 0.5) / (m + 0.5)) for w, m in having.items()}
    length = [BM25_K * (1 - BM25_B + BM25_B * n / mean) for n in sizes]
    return [
        sum(idf[w] * f * (BM25_K + 1) / (f + k) for w, f in count.items())
        for count, k in zip(counts, length, strict=True)
    ]


def excerpt(text: str, wanted: str, most: int = 200) -> str:
    """The sentence of a text with most of the wanted words, and what follows, up to `most`
    characters."""
    sought = {*words(wanted)}
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    sentences = [text[a:b] for a, b in pairwise([*starts, len(text)])]
    best = max(range(len(sentences)), key=lambda n: (len(sought & {*words(sentences[n])}), -n))
    return text[starts[best] : starts[best] + most].strip()


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.casefold())
