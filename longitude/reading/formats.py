"""Bytes as text: encodings, HTML, and PDF by pypdf.

UTF-8 is the default; a byte order mark means UTF-16 or UTF-32, and an HTML page that is not UTF-8
may name its charset. Anything else is refused: a wrong guess would read as if it were the text.
"""

from __future__ import annotations

import codecs
import html
import io
import logging
import re
import warnings

from longitude.core.validate import short

HEAD = 1024  # bytes in which a file says what it is
PAGE_BREAK = "\n\n"
BYTE_ORDER_MARKS = (  # UTF-32's little-endian one begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
HTML = re.compile(r"<(!doctype\s+html|html)\b", re.IGNORECASE)
# comments, declarations and scripts; one that never ends reaches to the end of the page
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


class NoText(Exception):
    """Why there is no text in a file, and what to do: the end of a sentence about it."""


def decode(data: bytes) -> str:
    """Bytes as text; raises for what is none."""
    marked = next((name for mark, name in BYTE_ORDER_MARKS if data.startswith(mark)), None)
    charset = None if marked else CHARSET.search(data[:HEAD])
    encodings = [marked or "utf-8", *([charset[1].decode("ascii")] if charset else [])]
    text, at = "\0", 0
    for encoding in encodings:
        try:
            text = data.decode(encoding)
            break
        except (UnicodeError, LookupError) as error:
            at = getattr(error, "start", 0)
    else:
        if encodings != ["utf-8"]:
            raise NoText(f"says that it is {encodings[-1]}, but can't be read so: save it as UTF-8")
        if b"\0" not in data:
            raise NoText(f"is not UTF-8 (see byte {at:,}), or no text at all: save it as UTF-8")
    if "\0" in text:
        raise NoText("is binary, no text: give text, Markdown, HTML or PDF")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def is_html(text: str, suffix: str) -> bool:
    """Whether a text is an HTML page."""
    head = text[: 4 * HEAD]
    begins = head.lstrip().startswith("<") and bool(HTML.search(head))
    return begins or suffix in (".html", ".htm", ".xhtml")


def from_html(page: str) -> str:
    """What a reader sees of a page, a line per block."""
    page = NOT_SHOWN.sub("", page)
    parts: list[str] = []
    hidden: list[str] = []  # open elements that are not shown, outermost first
    at = preformatted = 0
    # a tag that never ends would be searched to the end of the page, and there may be a million
    tags = [*TAG.finditer(page, 0, page.rfind(">") + 1), None]
    for tag in tags:
        text = html.unescape(page[at : tag.start() if tag else None])
        if not preformatted:
            text = re.sub(r"\s+", " ", text)
            text = text.lstrip() if not parts or parts[-1][-1].isspace() else text
        parts += [text] if text and not hidden else []
        if tag is None:
            break
        at, closes, name = tag.end(), bool(tag[1]), tag[2].lower()
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
    """A PDF's text, and the offset of each page in it."""
    try:
        import pypdf
    except ImportError:
        why = "is a PDF, which needs the package pypdf: pip install longitude[read]"
        raise NoText(why) from None
    log = logging.getLogger("pypdf")  # warns of every small fault that it repairs
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
    # a PDF can hold code points that UTF-8 can't
    pages = [p.encode("utf-8", "replace").decode("utf-8").replace("\0", "") for p in pages]
    if not "".join(pages).strip():
        raise NoText("is a PDF without text, pictures alone: recognise its letters (OCR) first")
    starts = [sum(len(p) + len(PAGE_BREAK) for p in pages[:n]) for n in range(len(pages))]
    return PAGE_BREAK.join(pages), tuple(starts)
