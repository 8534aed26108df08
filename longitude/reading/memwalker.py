"""MemWalker: a question about a text of any length, by a walk through a tree of its summaries.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading",
arXiv:2310.05029. Building the tree (tree.py) reads the text once and serves every later question. A
walk begins at the root: at a node the model reads the summaries below it, reasons, and descends
into one; at a leaf it reads the segment itself and answers or goes back. A part it went back from
is not offered again. Its memory is the summaries of the nodes on its way, the oldest dropped first.
Three replies that can't be parsed, or no part left, and there is no answer. Any model that follows
instructions will do, local or behind a server (llm.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.reading.llm import LLM
from longitude.reading.tree import (
    FANOUT,
    Built,
    Node,
    Shape,
    build,
    numbered,
    prompt,
    shape_for,
    truncate,
)

ATTEMPTS = 3
MAX_STEPS = 64  # of one walk
STORE = "summaries.sqlite"
NO_ANSWER = "no answer"
NOTHING_LEFT = "no part of it is left"
ONLY_ONE_LEFT = "the only part of it that is left"
ANSWER, REVERT = -2, -1  # actions that are no child's number
# **Action:** 1 or Action: (1) or Action = −1: models write it in many ways
ACTION = re.compile(r"\baction\b[\s*_`]*[:=][\s*_`(\[]*([-−–]?\d{1,9})(?!\d)", re.IGNORECASE)
REASONING = re.compile(r"\A.*?\breasoning\b[\s*_`]*[:=][\s*_]*", re.IGNORECASE | re.DOTALL)
ANSWER_TEXT = re.compile(r"\banswer\b[\s*_`]*[:=][\s*_]*(.*)", re.IGNORECASE | re.DOTALL)
Place = tuple[int, ...]  # the children to take from the root to a node


@dataclass(frozen=True)
class Reply:
    """A reply that could be parsed; `answer` is empty unless the action is to answer."""

    reasoning: str
    action: int
    answer: str = ""


def parse_reply(text: str, actions: Sequence[int]) -> Reply | None:
    """The last action that a reply names, if it is one of these; answering needs an answer."""
    named = [*ACTION.finditer(text)]
    if not named:
        return None
    last = named[-1]
    action = int(re.sub("[−–]", "-", last[1]))
    match = ANSWER_TEXT.search(text, last.end()) if action == ANSWER else None
    answer = match[1].strip() if match else ""
    if action not in actions or (action == ANSWER and not answer):
        return None
    return Reply(REASONING.sub("", text[: last.start()]).strip(" \n*_#`"), action, answer)


@dataclass(frozen=True)
class Visit:
    """One step of a walk: where it was taken, what was decided there, and why.

    `start` and `stop` delimit the node's characters; `invalid` are replies that could not be
    parsed. A step without a reply was taken without asking: nothing was left to choose.
    """

    place: Place
    start: int
    stop: int
    action: Literal["down", "answer", "revert", "invalid"]
    to: int | None = None  # the child, if it went down
    reasoning: str = ""
    answer: str = ""
    invalid: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "place": [*self.place], "invalid": [*self.invalid]}


@dataclass(frozen=True)
class Walk:
    """An answer and the path to it; `text` is "no answer" if `found` is False."""

    text: str
    found: bool
    path: tuple[Visit, ...]
    tree: Node
    by: str = "memwalker"

    @property
    def source(self) -> tuple[int, int] | None:
        """The characters of the text that the answer was read from."""
        return (self.path[-1].start, self.path[-1].stop) if self.found else None

    def plain(self) -> dict[str, Any]:
        """For JSON, without the tree, which has a `plain` of its own."""
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
    llm: LLM,
    *,
    folder: str | os.PathLike[str] | None = None,
    tell: Callable[[Built | Visit], None] | None = None,
    fanout: int = FANOUT,
    most: int = MAX_STEPS,
) -> Walk:
    """Answer a question about a text, and give the path to the answer.

    Args:
        llm: the model that summarises, chooses and answers.
        folder: where summaries are stored for the next question; by default they are not.
        tell: called with the progress of the tree, and then with each step, as they come.
        fanout: children of a node of the tree.
        most: steps of the walk.
    """
    if not question.strip():
        raise UserError("the question is empty: ask one.")
    if not text.strip():
        raise UserError("the text is empty: give one to read.")
    tell = tell or (lambda event: None)
    shape = shape_for(llm, fanout)
    with Store(":memory:" if folder is None else Path(folder) / STORE) as store:
        tree = build(text, llm, shape, store, tell)
    walker = _Walker(text, question.strip(), llm, shape)
    nodes, path = [tree], []
    place: Place = ()
    while nodes and len(path) < most:
        visit = walker.visit(nodes[-1], place)
        path.append(visit)
        tell(visit)
        if visit.action == "answer":
            return Walk(visit.answer, True, tuple(path), tree)
        if visit.action == "down" and visit.to is not None:
            nodes.append(nodes[-1].children[visit.to])
            place = (*place, visit.to)
        elif visit.action == "revert":
            walker.rejected.add(place)
            nodes.pop()
            place = place[:-1]
        else:
            break
    return Walk(NO_ANSWER, False, tuple(path), tree)


@dataclass
class _Walker:
    """What a walk knows: the question, the summaries it has read, and the parts it rejected."""

    text: str
    question: str
    llm: LLM
    shape: Shape
    memory: dict[Place, str] = field(default_factory=dict)  # summaries of visited nodes
    rejected: set[Place] = field(default_factory=set)

    def visit(self, node: Node, place: Place) -> Visit:
        """Decide where to go from a node."""
        left = [n for n in range(len(node.children)) if (*place, n) not in self.rejected]
        invalid: tuple[str, ...] = ()
        reply: Reply | None
        if not node.children:
            slots = {"text": self.text[node.start : node.stop]}
            reply, invalid = self._ask("leaf", slots, [ANSWER, REVERT])
        elif not left:
            reply = Reply(NOTHING_LEFT, REVERT)
        elif len(left) == 1:
            reply = Reply(ONLY_ONE_LEFT, 0)
        else:
            slots = {"summaries": numbered([node.children[n].summary for n in left])}
            slots |= {"revert": prompt("revert") if place else ""}
            actions = [*range(len(left)), *([REVERT] if place else [])]
            reply, invalid = self._ask("triage", slots, actions)
        if node.summary:  # from now on: here the model saw more than the summary
            self.memory.setdefault(place, node.summary)
        if reply is None:
            return Visit(place, node.start, node.stop, "invalid", invalid=invalid)
        down = reply.action >= 0
        action = "down" if down else "answer" if reply.action == ANSWER else "revert"
        to = left[reply.action] if down else None
        result = (action, to, reply.reasoning, reply.answer, invalid)
        return Visit(place, node.start, node.stop, *result)

    def _ask(
        self, name: str, slots: dict[str, str], actions: Sequence[int]
    ) -> tuple[Reply | None, tuple[str, ...]]:
        """A reply that can be parsed, if one comes, and those that can't."""
        invalid: list[str] = []
        slots = slots | {"question": self.question, "actions": " / ".join(map(str, actions))}
        while len(invalid) < ATTEMPTS:
            count = {"attempt": str(len(invalid) + 1), "attempts": str(ATTEMPTS)}
            again = prompt("again", **slots, **count) if invalid else ""
            text = self.llm.say(self._with_memory(name, slots | {"again": again}), self.shape.reply)
            if reply := parse_reply(text, actions):
                return reply, tuple(invalid)
            invalid.append(text)
        return None, tuple(invalid)

    def _with_memory(self, name: str, slots: dict[str, str]) -> str:
        """A prompt with as many of the latest summaries as there is room for."""
        size = self.llm.size
        room = self.llm.window - self.shape.reply - size(prompt(name, **slots))
        if room < 0:
            raise UserError(
                f"the question does not fit the model's window of {self.llm.window} tokens "
                f"beside what is read: ask a shorter one."
            )
        room -= size(prompt("memory"))
        recalled: list[str] = []
        for summary in reversed(self.memory.values()):
            summary = truncate(summary, room, size)
            if not summary:
                break
            recalled.insert(0, summary)
            room -= size(summary) + 1  # and a line break
        memory = prompt("memory", text="\n".join(recalled)) if recalled else ""
        return prompt(name, **slots, memory=memory).strip()
