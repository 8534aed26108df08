"""A text cut into pieces that fit a window, one by one as they are asked for.

A piece ends where a reader would pause: at a paragraph, a line, a sentence, or at least a word, if
there is such an end in its last part. Joined, the pieces are the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from longitude.core.validate import UserError, shown
from longitude.reading.documents import Document

Count = Callable[[str], int]  # how many tokens a text has
ENDS = (  # how a piece may end, and how much of its last part may be given up for it
    (re.compile(r"\n\s*\n"), 0.25),
    (re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n"), 0.5),
    (re.compile(r"\s+"), 0.5),
)
FEW = 4.0  # characters a token, before any was counted


@dataclass(frozen=True)
class Piece:
    """Characters `first` to `past` of a document."""

    document: Document
    first: int
    past: int

    @property
    def text(self) -> str:
        return self.document.text[self.first : self.past]

    @property
    def place(self) -> str:
        """Where it stands, as a reader would look it up."""
        return self.document.place(self.first, self.past)


def pieces(documents: Iterable[Document], most: int, count: Count) -> Iterator[Piece]:
    """The documents in pieces of at most `most` tokens; none spans two documents."""
    if most < 1:
        raise UserError(f"a piece of text has 1 token or more, but got {shown(most)}: give more.")
    for document in documents:
        at, rate = 0, FEW
        while at < len(document.text):
            size, rate = _fitting(document.text, at, most, rate, count)
            past = at + size
            if past < len(document.text):
                past = at + _end(document.text[at:past])
            yield Piece(document, at, past)
            at = past


def _fitting(text: str, at: int, most: int, rate: float, count: Count) -> tuple[int, float]:
    """How many characters from here on have at most so many tokens, and how many a token has."""
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


def _end(text: str) -> int:
    """Where to end a piece at the latest end of the best kind."""
    for kind, share in ENDS:
        begin = int(len(text) * (1 - share))
        found = [match.end() for match in kind.finditer(text, begin)]
        if found:
            return found[-1]
    return len(text)
