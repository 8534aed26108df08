"""A walk from the root of a tree to where a question is answered, with what was read on the way.

Chen et al. 2023 (MemWalker): at a node the model reads the summaries below it, reasons, and goes to
one of them; at a leaf it reads the segment itself, and answers or goes back. A part it went back
from is not offered again. What it remembers are the summaries of the nodes it came through, the
oldest forgotten first. Three replies that can't be read, or nothing left to look at, and there is
no answer.

MemWalker: a question about a text of any length, by a walk through a tree of its summaries.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading",
arXiv:2310.05029. Building the tree (tree.py) reads the whole text once, segment by segment, and is
kept for the next question; a walk (navigate.py) reads a few nodes of it. Any model will do that
follows instructions, on this machine (`Local`) or behind a server (`Server`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.reading.llm import Speaker
from longitude.reading.replies import ANSWER, ATTEMPTS, REVERT, Reply, numbered, prompt, read_reply
from longitude.reading.tree import FANOUT, Built, Node, Shape, cut, grow, shape_for

NO_ANSWER = "no answer"
LEFT = "no part of it is left"
ONLY = "the only part of it that is left"
Action = Literal["down", "answer", "revert", "invalid"]
Place = tuple[int, ...]  # the children to take from the root to a node


@dataclass(frozen=True)
class Visit:
    """One step: where it was taken, what was decided there, and why.

    `start` and `stop` are the letters of the text below the node; `invalid` are replies that could
    not be read. A step without a reply was taken without asking: nothing was left to choose.
    """

    place: Place
    start: int
    stop: int
    action: Action
    to: int | None = None  # the child, if it went down
    reasoning: str = ""
    answer: str = ""
    invalid: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "place": [*self.place], "invalid": [*self.invalid]}


Tell = Callable[[Visit], None]


@dataclass
class Walker:
    """Someone on the way through a tree with a question."""

    root: Node
    text: str
    question: str
    speaker: Speaker
    shape: Shape
    seen: dict[Place, str] = field(default_factory=dict)  # summaries by the nodes they are of
    rejected: set[Place] = field(default_factory=set)

    def walk(self, most: int, tell: Tell) -> tuple[Visit, ...]:
        """The steps up to an answer, or until there is none to be found."""
        path, visits = [self.root], []
        place: Place = ()
        while path and len(visits) < most:
            visit = self._at(path[-1], place)
            visits.append(visit)
            tell(visit)
            if visit.action == "down" and visit.to is not None:
                path.append(path[-1].children[visit.to])
                place = (*place, visit.to)
            elif visit.action == "revert":
                self.rejected.add(place)
                path.pop()
                place = place[:-1]
            else:
                break
        return tuple(visits)

    def _at(self, node: Node, place: Place) -> Visit:
        visit = self._triage(node, place) if node.children else self._leaf(node, place)
        if node.summary:  # remembered from now on: here it stood before the model in more words
            self.seen.setdefault(place, node.summary)
        return visit

    def _triage(self, node: Node, place: Place) -> Visit:
        """Where to go from a node with others below it."""
        left = [n for n in range(len(node.children)) if (*place, n) not in self.rejected]
        if not left:
            return self._visit(node, place, Reply(LEFT, REVERT), (), left)
        if len(left) == 1:
            return self._visit(node, place, Reply(ONLY, 0), (), left)
        actions = [*range(len(left)), *([REVERT] if place else [])]
        slots = {
            "summaries": numbered([node.children[n].summary for n in left]),
            "revert": prompt("revert") if place else "",
        }
        return self._visit(node, place, *self._asked("triage", slots, actions), left)

    def _leaf(self, node: Node, place: Place) -> Visit:
        """What a segment itself says."""
        slots = {"text": self.text[node.start : node.stop]}
        return self._visit(node, place, *self._asked("leaf", slots, [ANSWER, REVERT]))

    def _asked(
        self, name: str, slots: dict[str, str], actions: Sequence[int]
    ) -> tuple[Reply | None, tuple[str, ...]]:
        """A reply that can be read, if one comes, and those that can't."""
        invalid: list[str] = []
        slots = slots | {"question": self.question, "actions": " / ".join(map(str, actions))}
        while len(invalid) < ATTEMPTS:
            count = {"attempt": str(len(invalid) + 1), "attempts": str(ATTEMPTS)}
            again = prompt("again", **slots, **count) if invalid else ""
            asked = self._with_memory(name, slots | {"again": again})
            said = self.speaker.say(asked, self.shape.reply)
            if reply := read_reply(said, actions):
                return reply, tuple(invalid)
            invalid.append(said)
        return None, tuple(invalid)

    def _with_memory(self, name: str, slots: dict[str, str]) -> str:
        """A prompt with as much of what was read before as there is room for."""
        size = self.speaker.size
        room = self.speaker.window - self.shape.reply - size(prompt(name, **slots))
        if room < 0:
            raise UserError(
                f"the question does not fit the model's window of {self.speaker.window} tokens "
                f"beside what is read: ask a shorter one."
            )
        kept = self._remembered(room - size(prompt("memory")))
        memory = prompt("memory", text="\n".join(kept)) if kept else ""
        return prompt(name, **slots, memory=memory).strip()

    def _remembered(self, room: int) -> list[str]:
        """The summaries of nodes that were visited, the youngest that so many tokens hold."""
        kept: list[str] = []
        for summary in reversed(self.seen.values()):
            held = cut(summary, room, self.speaker.size)
            if not held:
                break
            kept.insert(0, held)
            room -= self.speaker.size(held) + 1  # and a line's end
        return kept

    def _visit(
        self,
        node: Node,
        place: Place,
        reply: Reply | None,
        invalid: tuple[str, ...],
        left: Sequence[int] = (),
    ) -> Visit:
        """What a reply comes to."""
        if reply is None:
            return Visit(place, node.start, node.stop, "invalid", invalid=invalid)
        kinds: dict[int, Action] = {ANSWER: "answer", REVERT: "revert"}
        return Visit(
            place,
            node.start,
            node.stop,
            kinds.get(reply.action, "down"),
            None if reply.action in kinds else left[reply.action],
            reply.reasoning,
            reply.answer,
            invalid,
        )


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
        raise UserError("the question is empty: ask one.")
    if not text.strip():
        raise UserError("the text is empty: give one to read.")
    told = tell or (lambda news: None)
    shape = shape_for(speaker, fanout)
    with Store(":memory:" if folder is None else Path(folder) / STORE) as store:
        tree = grow(text, speaker, shape, store, told)
    path = Walker(tree, text, question.strip(), speaker, shape).walk(most, told)
    last = path[-1] if path else None
    if last and last.action == "answer":
        return Walk(last.answer, True, path, tree)
    return Walk(NO_ANSWER, False, path, tree)
