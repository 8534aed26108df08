"""The text of files, whatever they are: plain text, Markdown, HTML, PDF, or standard input.

What a file is, is seen from its first bytes, and only then from its name. A file that holds no text
is told in a sentence; nothing is fetched, and nothing but a file's text is ever taken from it.
"""

from __future__ import annotations

import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from longitude.core.validate import UserError, short, shown
from longitude.reading.formats import NoText, decoded, from_html, from_pdf, is_html, is_pdf

STDIN = "-"
MOST = 2**30  # bytes of a file: what is longer is no document, or never ends
ADDRESS = re.compile(r"\w[\w+.-]*://|www\.", re.ASCII)
OPEN_ALREADY = re.compile(r"/dev/fd/\d+|/dev/stdin|/proc/self/fd/\d+")  # the shell's <(…)


@runtime_checkable
class Readable(Protocol):
    """A file that is open, or what stands for one."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Document:
    """A text with its name; `pages` are the places where a PDF's pages begin."""

    name: str
    text: str
    pages: tuple[int, ...] = ()

    def place(self, first: int, past: int) -> str:
        """Where these characters stand, for a reader who wants to look them up."""
        if self.pages:
            return _between("page", self._page(first), self._page(max(first, past - 1)))
        begin = 1 + self.text.count("\n", 0, first)
        inside = self.text[first:past].rstrip("\n").count("\n")
        column = first - self.text.rfind("\n", 0, first)  # from 1
        within = f" from character {column:,}" if column > 1 and not inside else ""
        return _between("line", begin, begin + inside) + within

    def _page(self, at: int) -> int:
        return max(1, bisect_right(self.pages, at))


def documents(names: Sequence[str], stdin: Readable | None = None) -> list[Document]:
    """The documents of these files, each one's text whole; `-` is standard input."""
    if not names:
        raise UserError("there is nothing to read: give files, or - for standard input.")
    if names.count(STDIN) > 1:
        raise UserError("standard input can be read once, but - was given twice: give it once.")
    return [document(name, stdin) for name in names]


def document(name: str, stdin: Readable | None = None) -> Document:
    """The text of one file."""
    told = "standard input" if name == STDIN else f"file {shown(name)}"
    if name == STDIN and stdin is None and sys.stdin is None:
        raise UserError("standard input is closed: pipe a text in, or give a file.")
    data = _limited(stdin or sys.stdin.buffer, told) if name == STDIN else _read(name, told)
    try:
        if not data:
            raise NoText("is empty: give one with text in it")
        text, pages = _text(data, Path(name).suffix.lower())
        if not text.strip():
            raise NoText("holds nothing but white space: give one with text in it")
    except NoText as fault:
        raise UserError(f"{told} {fault}.") from fault
    return Document("standard input" if name == STDIN else name, text, pages)


def _text(data: bytes, suffix: str) -> tuple[str, tuple[int, ...]]:
    """A file's text, and where its pages begin if it has any."""
    if is_pdf(data):
        return from_pdf(data)
    if suffix == ".pdf":
        raise NoText("is called .pdf but is none: rename it, or give the PDF")
    text = decoded(data)
    return (from_html(text) if is_html(text, suffix) else text), ()


def _read(name: str, told: str) -> bytes:
    try:
        kind = Path(name).stat().st_mode if name else 0
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(name) from None
    except (OSError, ValueError) as error:  # a closed folder, a name too long, a NUL in it
        raise _unreadable(told, error) from None
    _check_kind(name, kind, told)
    try:
        with Path(name).open("rb") as file:
            return _limited(file, told)
    except OSError as error:
        raise _unreadable(told, error) from None


def _limited(file: Readable, told: str) -> bytes:
    data = file.read(MOST + 1)
    if len(data) > MOST:
        raise UserError(f"{told} is longer than {MOST / 2**30:.0f} GiB: give a part of it.")
    return data


def _missing(name: str) -> UserError:
    if ADDRESS.match(name):
        return UserError(
            f"{shown(name)} is an address, and nothing is fetched: download it and give the file, "
            "or pipe it into `longitude read -`."
        )
    return UserError(f"there is no file {shown(name)}: give a path that exists, or - for a pipe.")


def _check_kind(name: str, mode: int, told: str) -> None:
    """Raise for what can't be read to its end: folders, devices, pipes that nobody may ever fill.
    What a shell put into /dev/fd is a pipe that is being filled."""
    if stat.S_ISDIR(mode):
        raise UserError(
            f"{shown(name)} is a folder: give the files in it, as in {shown(name + '/')}*."
        )
    if stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and OPEN_ALREADY.fullmatch(name)):
        return
    if not name:
        raise UserError("a file's name is empty: give a path, or - for standard input.")
    raise UserError(f"{told} is a pipe or a device: give a file, or pipe it in and give -.")


def _unreadable(told: str, error: Exception) -> UserError:
    said = getattr(error, "strerror", None) or str(error)
    return UserError(f"{told} can't be read ({short(said, 120)}): give one that you may read.")


def _between(what: str, first: int, last: int) -> str:
    return f"{what} {first:,}" if first == last else f"{what}s {first:,}–{last:,}"
