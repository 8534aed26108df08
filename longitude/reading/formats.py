"""Bytes as text: encodings, HTML by the standard library's parser, PDF by pypdf.

UTF-8 is the rule; a byte order mark says UTF-16 or UTF-32, and a page of HTML that is not UTF-8 may
name its own. Anything else is refused: a wrong guess would be read as if it stood there.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any

from longitude.core.validate import short

HEAD = 1024  # bytes in which a file says what it is
PAGES = "\n\n"  # between two of them
MARKS = (  # UTF-32's little-endian one begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
HTML = re.compile(r"<(!doctype\s+html|html)\b", re.IGNORECASE)
OPENS = re.compile(r"<!--|<[!?]|<(script|style)\b", re.IGNORECASE)
REMARK, DECLARATION = re.compile("-->"), re.compile(">")
SCRIPT, STYLE = (re.compile(rf"</{tag}[^>]*>", re.IGNORECASE) for tag in ("script", "style"))
UNSEEN = frozenset("template noscript svg".split())
APART = frozenset(
    "address article aside blockquote body br caption dd details dialog div dl dt fieldset "
    "figcaption figure footer form h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section "
    "summary table tbody tfoot thead title tr ul".split()
)


class NoText(Exception):
    """Why there is no text in a file, and what to do: the end of a sentence about it."""


def decoded(data: bytes) -> str:
    """Bytes as text; raises for what is none."""
    marked = next((name for mark, name in MARKS if data.startswith(mark)), None)
    try:
        text = data.decode(marked or "utf-8")
    except UnicodeError as error:
        text = _as_named(data, marked, error)
    if "\0" in text:
        raise NoText("is binary, no text: give text, Markdown, HTML or PDF")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _as_named(data: bytes, marked: str | None, error: UnicodeError) -> str:
    """What is not UTF-8, read as it says of itself, if it does."""
    found = None if marked else CHARSET.search(data[:HEAD])
    name = found[1].decode("ascii") if found else marked
    if name is None:
        if b"\0" in data:
            raise NoText("is binary, no text: give text, Markdown, HTML or PDF")
        at = getattr(error, "start", 0)
        raise NoText(f"is not UTF-8 (see byte {at:,}), or no text at all: save it as UTF-8")
    try:
        if found:
            return data.decode(name)
    except (UnicodeError, LookupError):
        pass
    raise NoText(f"says that it is {name}, but can't be read so: save it as UTF-8")


def is_html(text: str, suffix: str) -> bool:
    """Whether a text is a page of HTML."""
    return suffix in (".html", ".htm", ".xhtml") or _begins_as_html(text[: 4 * HEAD])


def _begins_as_html(head: str) -> bool:
    return head.lstrip().startswith("<") and bool(HTML.search(head))


def from_html(text: str) -> str:
    """What a reader sees of a page, a line for each block."""
    page = _Page()
    try:
        page.feed(_tags_alone(text))
        page.close()
    except (AssertionError, ValueError) as error:  # marked sections of older Pythons
        raise NoText("is HTML that can't be parsed: save it as text") from error
    return page.text()


def _tags_alone(text: str) -> str:
    """A page without remarks, declarations and scripts, and without a tag that never ends: the
    parser would read on to the end of the page for each of them, and a page may have a million."""
    parts, at = [], 0
    while found := OPENS.search(text, at):
        parts.append(text[at : found.start()])
        closed = _closing(found).search(text, found.end())
        at = closed.end() if closed else len(text)
    head, end, tail = "".join([*parts, text[at:]]).rpartition(">")
    return head + end + tail.replace("<", "&lt;")


def _closing(opened: re.Match[str]) -> re.Pattern[str]:
    """What ends that which was opened."""
    if opened[1]:
        return SCRIPT if opened[1].lower() == "script" else STYLE
    return REMARK if opened[0] == "<!--" else DECLARATION


class _Page(HTMLParser):
    """Gathers text; what no reader sees is left out, and blocks stand apart."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.unseen: list[str] = []  # the elements that are open and not shown, outermost first
        self.kept = 0  # elements that are open and keep their white space

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in UNSEEN:
            self.unseen.append(tag)
        elif tag in ("td", "th"):
            self.parts.append("\t")
        elif tag in APART:
            self._apart(tag)
        self.kept += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        if tag in APART:
            self._apart(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.unseen:
            del self.unseen[self.unseen.index(tag) :]
        elif tag in APART:
            self._apart(tag)
        self.kept = max(0, self.kept - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if self.unseen:
            return
        if not self.kept:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._after_space() else data
        if data:
            self.parts.append(data)

    def _after_space(self) -> bool:
        return not self.parts or self.parts[-1][-1].isspace()

    def _apart(self, tag: str) -> None:
        self.parts.append("\n\n" if tag == "p" or re.fullmatch("h[1-6]", tag) else "\n")

    def text(self) -> str:
        """All of it, with no more empty lines than a page shows."""
        lines = (line.rstrip() for line in "".join(self.parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_pdf(data: bytes) -> bool:
    """Whether these bytes are a PDF; some have a few others before them."""
    return b"%PDF-" in data[:HEAD]


def from_pdf(data: bytes) -> tuple[str, tuple[int, ...]]:
    """A PDF's text, and where in it each page begins."""
    try:
        import pypdf
    except ImportError:
        raise NoText(
            "is a PDF, which needs the package pypdf: pip install longitude[read]"
        ) from None
    with _silent(), _told():
        pages = [*_pages(pypdf.PdfReader(io.BytesIO(data)))]
    if not "".join(pages).strip():
        raise NoText("is a PDF without text, pictures alone: recognise its letters (OCR) first")
    starts, at = [], 0
    for page in pages:
        starts.append(at)
        at += len(page) + len(PAGES)
    return PAGES.join(pages), tuple(starts)


def _pages(reader: Any) -> Iterator[str]:
    if reader.is_encrypted and not reader.decrypt(""):
        raise NoText("is a PDF that is locked with a password: unlock it first")
    for page in reader.pages:
        # a letter outside of Unicode's planes can be written in a PDF, but in no other text
        yield page.extract_text().encode("utf-8", "replace").decode("utf-8").replace("\0", "")


@contextmanager
def _told() -> Iterator[None]:
    """pypdf's errors, of any kind where a PDF is damaged, as one sentence."""
    try:
        yield
    except NoText:
        raise
    except Exception as error:
        if type(error).__name__ == "DependencyError":
            raise NoText(
                "is a PDF that is locked: unlock it, or pip install cryptography"
            ) from error
        said = short(str(error), 80).rstrip(".") or type(error).__name__
        raise NoText(f"is a PDF that can't be read ({said}): mend it, or save it anew") from error


@contextmanager
def _silent() -> Iterator[None]:
    """pypdf tells the log of every small fault that it passes over; nobody asked."""
    log = logging.getLogger("pypdf")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
