"""A text in segments that end where sentences do, none longer than so many tokens.

Joined, the segments are the text to the letter. A sentence that is too long alone is cut between
words, and a word that is too long anywhere: base64, or a script that writes no spaces.

A text as a tree of summaries: its segments below, summaries of summaries above them.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading"
(MemWalker, arXiv:2310.05029): each segment of some 1,000 tokens is summarised, up to 8 summaries
at a time are compressed into one, and so on until one is left. No question is asked yet, so the
tree is made once for a text and a model, and serves every question.

A summary is kept as soon as it is there, under what it was made from: the prompt with its text, the
model, and how long it may be. So a kill costs what was under way, and a text that changed in one
place one branch. Nothing in a text or a summary becomes a name of a file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.reading.llm import Speaker, said_to
from longitude.reading.replies import numbered, prompt, templates

# the space behind a full stop and its closing quotes, or an empty line; CJK needs no space. It
# looks back for the full stop, because a run of a million dots must not be read a million times.
END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])[”’」』）]*\s*|\n\s*\n\s*""")
Size = Callable[[str], int]  # how many tokens a text has


def segments(text: str, most: int, size: Size) -> list[str]:
    """The text in pieces of `most` tokens or fewer (one letter at least), cut at sentence ends."""
    found: list[str] = []
    parts: list[str] = []
    held = 0
    for sentence, tokens in _fitting(text, most, size):
        if parts and held + tokens > most:
            found.append("".join(parts))
            parts, held = [], 0
        parts.append(sentence)
        held += tokens
    return [*found, "".join(parts)] if parts else found


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, each with the space behind it."""
    begun = 0
    for end in END.finditer(text):
        yield text[begun : end.end()]
        begun = end.end()
    if begun < len(text):
        yield text[begun:]


def cut(text: str, most: int, size: Size) -> str:
    """The beginning of a text, of `most` tokens or fewer, up to a sentence's end if it can be."""
    return (segments(text, most, size) or [""])[0].strip() if most > 0 else ""


def _fitting(text: str, most: int, size: Size) -> Iterator[tuple[str, int]]:
    """Sentences with their sizes, those halved that are too long."""
    waiting = list(sentences(text))[::-1]
    while waiting:
        part = waiting.pop()
        tokens = size(part)
        if tokens > most and len(part) > 1:
            at = _middle(part)
            waiting += [part[at:], part[:at]]
        else:
            yield part, tokens


def _middle(part: str) -> int:
    """Where to cut: behind the space nearest before the middle, or in the middle."""
    half = (len(part) + 1) // 2
    return part.rfind(" ", 1, half) + 1 or half


KIND = "memwalker"
SEGMENT, SUMMARY, FANOUT = 1000, 256, 8  # the paper's, for a window of 4,096
REPLY = 1024  # tokens of reasoning and an answer: a model that reasons shortly ends before
LEAST = 32  # tokens of a summary that says something
QUESTION = 128  # tokens that a question may take before it leaves no room to remember


@dataclass(frozen=True)
class Shape:
    """The sizes of a tree, in tokens; `fanout` is how many children a node has at most."""

    segment: int
    summary: int
    reply: int
    fanout: int = FANOUT


@dataclass(frozen=True)
class Node:
    """A part of the text, by the places of its letters, and what it is about."""

    start: int
    stop: int
    summary: str
    children: tuple[Node, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON has it, with all that is below."""
        below = {"children": [child.plain() for child in self.children]} if self.children else {}
        return {"start": self.start, "stop": self.stop, "summary": self.summary, **below}


@dataclass(frozen=True)
class Built:
    """How far a tree has grown: its summaries that are there, those among them that were kept from
    an earlier time, and all that it takes."""

    done: int
    kept: int
    of: int


Tell = Callable[[Built], None]


def shape_for(speaker: Speaker, fanout: int = FANOUT) -> Shape:
    """The paper's sizes, or as much of them as fit a window: of what the prompts leave, a sixth is
    for the reply, and a third of the rest for what is remembered."""
    if fanout < 2:
        raise UserError(f"a node of the tree has 2 children or more, but got {fanout}: use 8.")
    words = max(speaker.size(templates()[name]) for name in ("triage", "leaf"))
    words += speaker.size(templates()["again"]) + QUESTION
    free = max(0, speaker.window - words)
    reply = min(REPLY, free // 6)
    text = (free - reply) * 2 // 3
    if text // fanout < LEAST:
        raise UserError(
            f"a window of {speaker.window} tokens is too short to walk a tree, whose prompts take "
            f"{words} of them: use a model with a longer one, or nbce."
        )
    return Shape(min(SEGMENT, text), min(SUMMARY, text // fanout), reply, fanout)


def grow(
    text: str,
    speaker: Speaker,
    shape: Shape,
    store: Store,
    tell: Tell = lambda built: None,
) -> Node:
    """The tree of a text; what the store has of it is not made again."""
    nodes = [*_leaves(segments(text, shape.segment, speaker.size))]
    if not nodes:
        raise UserError("the text is empty: give one to read.")
    if len(nodes) == 1:  # it is read as a whole: nothing is chosen by its summary
        return nodes[0]
    maker = _Maker(speaker, shape, store, _summaries(len(nodes), shape.fanout), tell)
    made = maker.all("summarize", [text[n.start : n.stop] for n in nodes])
    nodes = [Node(n.start, n.stop, summary) for n, summary in zip(nodes, made, strict=True)]
    while len(nodes) > 1:
        groups = [*_groups(nodes, shape.fanout)]
        listed = [numbered([node.summary for node in group]) for group in groups]
        made = maker.all("compress", listed)
        nodes = [
            Node(group[0].start, group[-1].stop, summary, tuple(group))
            for group, summary in zip(groups, made, strict=True)
        ]
    return nodes[0]


def _leaves(parts: Sequence[str]) -> Iterator[Node]:
    start = 0
    for part in parts:
        yield Node(start, start := start + len(part), "")


def _groups(nodes: Sequence[Node], fanout: int) -> Iterator[Sequence[Node]]:
    """Neighbours, in as few groups as hold them, none larger than another by more than one."""
    count = -(-len(nodes) // fanout)
    edges = [len(nodes) * group // count for group in range(count + 1)]
    return (nodes[a:b] for a, b in pairwise(edges))


def _summaries(leaves: int, fanout: int) -> int:
    """How many summaries a tree has."""
    return leaves if leaves == 1 else leaves + _summaries(-(-leaves // fanout), fanout)


class _Maker:
    """Makes summaries, or finds them in the store, and tells how far it is."""

    def __init__(self, speaker: Speaker, shape: Shape, store: Store, of: int, tell: Tell) -> None:
        self.speaker, self.new, self.store = speaker, shape.summary, store
        self.done, self.kept, self.of, self.tell = 0, 0, of, tell

    def all(self, asked: str, texts: Sequence[str]) -> list[str]:
        """The summary of each text by the prompt that is asked; the same text is asked for once."""
        times = Counter(texts)
        keys = {text: self._key(prompt(asked, text=text)) for text in times}
        found = {text: kept for text in times if (kept := self._kept(keys[text]))}
        self._tell(kept := sum(times[text] for text in found), kept)
        missing = [text for text in times if text not in found]
        prompts = [prompt(asked, text=text) for text in missing]
        for place, reply in said_to(self.speaker, prompts, self.new):
            text = missing[place]
            # a model that says nothing leaves the beginning of the text to choose by
            found[text] = cut(reply, self.new, self.speaker.size) or self._beginning(text)
            self.store.put(keys[text], {"summary": found[text]})
            self._tell(times[text])
        return [found[text] for text in texts]

    def _key(self, asked: str) -> dict[str, Any]:
        digest = hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()
        return {"kind": KIND, "model": self.speaker.fingerprint, "new": self.new, "asked": digest}

    def _kept(self, key: dict[str, Any]) -> str | None:
        """A summary of an earlier time; what is none is made again."""
        kept = (self.store.get(key) or {}).get("summary")
        return kept if isinstance(kept, str) and kept.strip() else None

    def _beginning(self, text: str) -> str:
        return cut(text, self.new, self.speaker.size) or "(nothing)"

    def _tell(self, done: int, kept: int = 0) -> None:
        self.done, self.kept = self.done + done, self.kept + kept
        self.tell(Built(self.done, self.kept, self.of))
