"""MemWalker: a question about a text of any length, by a walk through a tree of its summaries.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading",
arXiv:2310.05029. Building the tree (tree.py) reads the whole text once, segment by segment, and is
kept for the next question; a walk (navigate.py) reads a few nodes of it. Any model will do that
follows instructions, on this machine (`Local`) or behind a server (`Server`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.fields import Mistake
from longitude.read.navigate import NO_ANSWER, Visit, Walker
from longitude.read.speaker import Speaker
from longitude.read.tree import FANOUT, Built, Node, grow, shape_for
from longitude.record import Store

BY = "memwalker"
STORE = "summaries.sqlite"
MOST = 64  # steps of one walk


@dataclass(frozen=True)
class Walk:
    """What was answered, and the way there; where `found` is False, `text` says "no answer"."""

    text: str
    found: bool
    path: tuple[Visit, ...]
    tree: Node
    by: str = BY

    @property
    def source(self) -> tuple[int, int] | None:
        """The letters of the text that the answer was read from."""
        return (self.path[-1].start, self.path[-1].stop) if self.found else None

    def plain(self) -> dict[str, Any]:
        """As JSON has it, but for the tree, which has a `plain` of its own."""
        return {
            "answer": self.text,
            "by": self.by,
            "found": self.found,
            "source": list(self.source) if self.source else None,
            "path": [visit.plain() for visit in self.path],
        }


def read(
    text: str,
    question: str,
    speaker: Speaker,
    *,
    folder: str | os.PathLike[str] | None = None,
    tell: Callable[[Built | Visit], None] | None = None,
    fanout: int = FANOUT,
    most: int = MOST,
) -> Walk:
    """The answer to a question about a text, and the way it was found.

    Args:
        folder: where summaries are kept for the next question; without it they are not.
        tell: called with how far the tree is, and then with each step, as they come.
        fanout: children of a node of the tree.
        most: steps of the walk.
    """
    if not question.strip():
        raise Mistake("the question is empty: ask one.")
    if not text.strip():
        raise Mistake("the text is empty: give one to read.")
    told = tell or (lambda news: None)
    shape = shape_for(speaker, fanout)
    with Store(":memory:" if folder is None else Path(folder) / STORE) as store:
        tree = grow(text, speaker, shape, store, told)
    path = Walker(tree, text, question.strip(), speaker, shape).walk(most, told)
    last = path[-1] if path else None
    if last and last.action == "answer":
        return Walk(last.answer, True, path, tree)
    return Walk(NO_ANSWER, False, path, tree)
