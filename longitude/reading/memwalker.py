"""MemWalker: questions about a text of any length, answered by a walk through a summary tree.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading",
arXiv:2310.05029. Each segment of about 1,000 tokens is summarised, up to 8 summaries are compressed
into one, and so on up to a single root; the tree depends on text and model only and serves every
question. A walk begins at the root: at a node the model reads its children's summaries, reasons,
and descends into one child; at a leaf it reads the segment itself and answers or goes back. A node
it went back from is not offered again. Its memory is the summaries of the nodes it visited, the
oldest dropped first. A walk ends without an answer after three replies that can't be parsed, or if
no node is left. Any model that follows instructions will do, local or behind a server (llm.py).

Segments end at sentence ends; joined, they equal the text. A longer sentence is cut between words,
a longer word anywhere. A summary is stored at once, under the prompt with its text, the model and
the length limit: a kill loses what is in flight, a local change of the text recomputes one branch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from longitude.core.client import gather
from longitude.core.progress import Event, Progress, silent
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.reading.llm import LLM

# the space after a full stop and its closing quotes, or an empty line; CJK needs no space. It
# uses a lookbehind for the full stop: a million dots in a row must not be scanned a million times.
SENTENCE_END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])[”’」』）]*\s*|\n\s*\n\s*""")
SLOT = re.compile(r"\{(\w+)\}")
KIND, STORE = "memwalker", "summaries.sqlite"
SEGMENT, SUMMARY, FANOUT = 1000, 256, 8  # the paper's, for a window of 4,096
REPLY = 1024  # tokens of reasoning and an answer
MIN_SUMMARY = 32  # tokens
QUESTION = 128  # tokens reserved for a question
ATTEMPTS = 3
MAX_STEPS = 64  # of one walk
NO_ANSWER = "no answer"
NOTHING_LEFT = "no unvisited child left"
ONLY_ONE_LEFT = "the only child left"
ANSWER, REVERT = -2, -1  # actions other than a child's number
# **Action:** 1 or Action: (1) or Action = −1: models write it in many ways
ACTION = re.compile(r"\baction\b[\s*_`]*[:=][\s*_`(\[]*([-−–]?\d{1,9})(?!\d)", re.IGNORECASE)
REASONING = re.compile(r"\A.*?\breasoning\b[\s*_`]*[:=][\s*_]*", re.IGNORECASE | re.DOTALL)
ANSWER_TEXT = re.compile(r"\banswer\b[\s*_`]*[:=][\s*_]*(.*)", re.IGNORECASE | re.DOTALL)
Place = tuple[int, ...]  # the children to take from the root to a node
Size = Callable[[str], int]  # how many tokens a text has


@functools.cache
def templates() -> dict[str, str]:
    """Return the prompts of prompts.toml by name."""
    text = Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def prompt(name: str, **values: str) -> str:
    """Return a prompt with its slots filled; slots inside of values stay text."""
    return SLOT.sub(lambda slot: values.get(slot[1], ""), templates()[name])


def numbered(summaries: Sequence[str]) -> str:
    """Join summaries, with the numbers by which the model chooses one."""
    return "\n\n".join(f"Summary {number}: {text}" for number, text in enumerate(summaries))


# segments


def sentences(text: str) -> list[str]:
    """Split a text into sentences, each with the space after it."""
    ends = sorted({0, len(text), *(end.end() for end in SENTENCE_END.finditer(text))})
    return [text[a:b] for a, b in pairwise(ends)]


def segments(text: str, most: int, size: Size) -> list[str]:
    """Split a text at sentences into segments of at most `most` tokens (or one character)."""
    result: list[str] = []
    used, pending = 0, sentences(text)[::-1]
    while pending:
        sentence = pending.pop()
        tokens = size(sentence)
        if tokens > most and len(sentence) > 1:  # halved, at the last space before the middle
            half = (len(sentence) + 1) // 2
            cut = sentence.rfind(" ", 1, half) + 1 or half
            pending += [sentence[cut:], sentence[:cut]]
        elif result and used + tokens <= most:
            result[-1] += sentence
            used += tokens
        else:
            result.append(sentence)
            used = tokens
    return result


def truncate(text: str, most: int, size: Size) -> str:
    """Return the start of a text, at most `most` tokens, up to a sentence's end if possible."""
    return (segments(text, most, size) or [""])[0].strip() if most > 0 else ""


# the tree


@dataclass(frozen=True)
class Shape:
    """The sizes of a tree in tokens; `fanout` is the most children of a node."""

    segment: int
    summary: int
    reply: int
    fanout: int = FANOUT


@dataclass(frozen=True)
class Node:
    """Characters `start` to `stop` of the text, and their summary."""

    start: int
    stop: int
    summary: str
    children: tuple[Node, ...] = ()


def shape_for(llm: LLM, fanout: int = FANOUT) -> Shape:
    """Return the paper's sizes, or smaller ones that fit the window: of the tokens that prompts
    leave, a sixth is for the reply, and a third of the rest for memory."""
    if fanout < 2:
        raise UserError(f"a node of the tree has 2 children or more, but got {fanout}: use 8.")
    fixed = max(llm.size(templates()[name]) for name in ("triage", "leaf"))
    fixed += llm.size(templates()["again"]) + QUESTION
    free = max(0, llm.window - fixed)
    reply = min(REPLY, free // 6)
    text = (free - reply) * 2 // 3
    if text // fanout < MIN_SUMMARY:
        raise UserError(
            f"a window of {llm.window} tokens is too short to walk a tree, whose prompts take "
            f"{fixed} of them: use a model with a longer one, or nbce."
        )
    return Shape(min(SEGMENT, text), min(SUMMARY, text // fanout), reply, fanout)


def build(text: str, llm: LLM, shape: Shape, store: Store, progress: Progress = silent) -> Node:
    """Build the tree of a text; summaries in the store are not computed again."""
    parts = segments(text, shape.segment, llm.size)
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + len(part))
    nodes = [Node(a, b, "") for a, b in pairwise(edges)]
    if not nodes:
        raise UserError("the text is empty: give one to read.")
    if len(nodes) == 1:  # a single segment is read in full: it needs no summary
        return nodes[0]
    total = count = len(nodes)
    while count > 1:
        count = -(-count // shape.fanout)
        total += count
    done = cached = 0

    def report(more: int, stored: int = 0) -> None:
        nonlocal done, cached
        done, cached = done + more, cached + stored
        figures = {"cached": f"{cached:,}"} if cached else {}
        progress(Event("summaries", done, total, "read", figures))

    summaries = _summaries("summarize", parts, llm, shape.summary, store, report)
    nodes = [Node(n.start, n.stop, summary) for n, summary in zip(nodes, summaries, strict=True)]
    while len(nodes) > 1:
        count = -(-len(nodes) // shape.fanout)  # groups of neighbours, sizes differing by one
        edges = [len(nodes) * group // count for group in range(count + 1)]
        groups = [nodes[a:b] for a, b in pairwise(edges)]
        listed = [numbered([node.summary for node in group]) for group in groups]
        summaries = _summaries("compress", listed, llm, shape.summary, store, report)
        nodes = [
            Node(group[0].start, group[-1].stop, summary, tuple(group))
            for group, summary in zip(groups, summaries, strict=True)
        ]
    return nodes[0]


def _summaries(
    name: str, texts: Sequence[str], llm: LLM, new: int, store: Store, report: Callable[..., None]
) -> list[str]:
    """Return each text's summary by a prompt, from store or model; equal texts share one."""
    counts = Counter(texts)
    prompts = {text: prompt(name, text=text) for text in counts}
    keys, summaries = {}, {}
    for text, filled in prompts.items():
        digest = hashlib.sha256(filled.encode(errors="surrogatepass")).hexdigest()
        keys[text] = {"kind": KIND, "model": llm.fingerprint, "new": new, "asked": digest}
        stored = (store.get(keys[text]) or {}).get("summary")
        if isinstance(stored, str) and stored.strip():
            summaries[text] = stored
    cached = sum(counts[text] for text in summaries)
    report(cached, cached)
    missing = [text for text in counts if text not in summaries]
    for n, reply in gather(lambda text: llm.say(prompts[text], new), missing, llm.at_once):
        text = missing[n]
        # the beginning of the text replaces an empty reply
        summary = truncate(reply, new, llm.size) or truncate(text, new, llm.size) or "(nothing)"
        summaries[text] = summary
        store.put(keys[text], {"summary": summary})
        report(counts[text])
    return [summaries[text] for text in texts]


# the walk


def parse_reply(text: str, actions: Sequence[int]) -> tuple[int, str, str] | None:
    """Return the last action that a reply names, its reasoning and its answer; None if the action
    is not one of `actions`, or is to answer but no answer follows."""
    last = next(reversed([*ACTION.finditer(text)]), None)
    action = int(re.sub("[−–]", "-", last[1])) if last else None
    if last is None or action is None or action not in actions:
        return None
    match = ANSWER_TEXT.search(text, last.end()) if action == ANSWER else None
    answer = match[1].strip() if match else ""
    reasoning = REASONING.sub("", text[: last.start()]).strip(" \n*_#`")
    return None if action == ANSWER and not answer else (action, reasoning, answer)


@dataclass(frozen=True)
class Visit:
    """One step of a walk: where it was taken, what was decided there, and why. `start` and `stop`
    delimit the node's characters; `invalid` are replies that could not be parsed. Steps
    without an alternative are taken without prompting the model."""

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
        """For JSON, without the tree."""
        data = {"answer": self.text, "by": self.by, "found": self.found}
        source = list(self.source) if self.source else None
        return data | {"source": source, "path": [visit.plain() for visit in self.path]}


def read(
    text: str,
    question: str,
    llm: LLM,
    *,
    folder: str | os.PathLike[str] | None = None,
    tell: Callable[[Visit], None] = lambda visit: None,
    progress: Progress = silent,
    fanout: int = FANOUT,
    most: int = MAX_STEPS,
) -> Walk:
    """Answer a question about a text, and give the path to the answer.

    Summaries are stored in `folder`, if given, for later questions. `tell` is called with each step
    of the walk, of which there are at most `most`. Nodes have up to `fanout` children.
    """
    if not question.strip():
        raise UserError("the question is empty: ask one.")
    if not text.strip():
        raise UserError("the text is empty: give one to read.")
    shape = shape_for(llm, fanout)
    with Store(":memory:" if folder is None else Path(folder) / STORE) as store:
        tree = build(text, llm, shape, store, progress)
    walker = _Walker(text, question.strip(), llm, shape.reply)
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
    """A walk's state: the question, the summaries it has read, and the nodes it rejected."""

    text: str
    question: str
    llm: LLM
    reply: int  # tokens
    memory: dict[Place, str] = field(default_factory=dict)  # summaries of visited nodes
    rejected: set[Place] = field(default_factory=set)

    def visit(self, node: Node, place: Place) -> Visit:
        """Decide where to go from a node."""
        remaining = [n for n in range(len(node.children)) if (*place, n) not in self.rejected]
        invalid: tuple[str, ...] = ()
        if not node.children:
            slots = {"text": self.text[node.start : node.stop]}
            reply, invalid = self._ask("leaf", slots, [ANSWER, REVERT])
        elif len(remaining) < 2:
            reply = (0, ONLY_ONE_LEFT, "") if remaining else (REVERT, NOTHING_LEFT, "")
        else:
            slots = {"summaries": numbered([node.children[n].summary for n in remaining])}
            slots |= {"revert": prompt("revert") if place else ""}
            actions = [*range(len(remaining)), *([REVERT] if place else [])]
            reply, invalid = self._ask("triage", slots, actions)
        if node.summary:  # for later steps: in this one, the model read more than the summary
            self.memory.setdefault(place, node.summary)
        if reply is None:
            return Visit(place, node.start, node.stop, "invalid", invalid=invalid)
        number, reasoning, answer = reply
        action = "down" if number >= 0 else "answer" if number == ANSWER else "revert"
        to = remaining[number] if number >= 0 else None
        return Visit(place, node.start, node.stop, action, to, reasoning, answer, invalid)

    def _ask(
        self, name: str, slots: dict[str, str], actions: Sequence[int]
    ) -> tuple[tuple[int, str, str] | None, tuple[str, ...]]:
        """Prompt until a reply can be parsed, or ATTEMPTS times; return it and the invalid ones."""
        invalid: list[str] = []
        size = self.llm.size
        slots = slots | {"question": self.question, "actions": " / ".join(map(str, actions))}
        while len(invalid) < ATTEMPTS:
            count = {"attempt": str(len(invalid) + 1), "attempts": str(ATTEMPTS)}
            again = prompt("again", **slots, **count) if invalid else ""
            room = self.llm.window - self.reply - size(prompt(name, **slots, again=again))
            if room < 0:
                raise UserError(
                    f"the question does not fit the model's window of {self.llm.window} tokens "
                    f"beside what is read: ask a shorter one."
                )
            room -= size(prompt("memory"))
            recalled: list[str] = []  # as many of the latest summaries as fit
            for summary in reversed(self.memory.values()):
                summary = truncate(summary, room, size)
                if not summary:
                    break
                recalled.insert(0, summary)
                room -= size(summary) + 1  # and a line break
            memory = prompt("memory", text="\n".join(recalled)) if recalled else ""
            full_prompt = prompt(name, **slots, again=again, memory=memory).strip()
            text = self.llm.say(full_prompt, self.reply)
            if reply := parse_reply(text, actions):
                return reply, tuple(invalid)
            invalid.append(text)
        return None, tuple(invalid)
