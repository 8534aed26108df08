"""A text as a tree of summaries: segments at the leaves, summaries of summaries above them.

Chen et al. 2023, "Walking Down the Memory Maze: Beyond Context Limit through Interactive Reading"
(MemWalker, arXiv:2310.05029): each segment of about 1,000 tokens is summarised, up to 8 summaries
are compressed into one, and so on until one is left. The tree depends on text and model only and
serves every question.

Segments end at sentence ends; joined, they are the text. A longer sentence is cut between words, a
longer word anywhere. A summary is stored as soon as it is there, under the prompt with its text,
the model and the length limit: a kill costs what was in flight, a change in one place one branch.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.reading.llm import LLM, replies

# the space after a full stop and its closing quotes, or an empty line; CJK needs no space. It
# looks back for the full stop: a run of a million dots must not be read a million times.
SENTENCE_END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])[”’」』）]*\s*|\n\s*\n\s*""")
SLOT = re.compile(r"\{(\w+)\}")
KIND = "memwalker"
SEGMENT, SUMMARY, FANOUT = 1000, 256, 8  # the paper's, for a window of 4,096
REPLY = 1024  # tokens of reasoning and an answer
MIN_SUMMARY = 32  # tokens
QUESTION = 128  # tokens reserved for a question
Size = Callable[[str], int]  # how many tokens a text has


@functools.cache
def templates() -> dict[str, str]:
    """The prompts of prompts.toml by name."""
    text = Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def prompt(name: str, **values: str) -> str:
    """A prompt with its slots filled; a slot inside a value stays text."""
    return SLOT.sub(lambda slot: values.get(slot[1], ""), templates()[name])


def numbered(summaries: Sequence[str]) -> str:
    """Summaries with the numbers by which they are chosen."""
    return "\n\n".join(f"Summary {number}: {text}" for number, text in enumerate(summaries))


# segments


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, each with the space after it."""
    start = 0
    for end in SENTENCE_END.finditer(text):
        yield text[start : end.end()]
        start = end.end()
    if start < len(text):
        yield text[start:]


def segments(text: str, most: int, size: Size) -> list[str]:
    """The text in segments of at most `most` tokens (at least one character), cut at sentences."""
    found: list[str] = []
    parts: list[str] = []
    filled, waiting = 0, list(sentences(text))[::-1]
    while waiting:
        sentence = waiting.pop()
        tokens = size(sentence)
        if tokens > most and len(sentence) > 1:  # halved, at the last space before the middle
            half = (len(sentence) + 1) // 2
            at = sentence.rfind(" ", 1, half) + 1 or half
            waiting += [sentence[at:], sentence[:at]]
            continue
        if parts and filled + tokens > most:
            found.append("".join(parts))
            parts, filled = [], 0
        parts.append(sentence)
        filled += tokens
    return [*found, "".join(parts)] if parts else found


def truncate(text: str, most: int, size: Size) -> str:
    """The beginning of a text, of at most `most` tokens, up to a sentence's end if possible."""
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

    def plain(self) -> dict[str, Any]:
        """For JSON, with all nodes below."""
        below = {"children": [child.plain() for child in self.children]} if self.children else {}
        return {"start": self.start, "stop": self.stop, "summary": self.summary, **below}


@dataclass(frozen=True)
class Built:
    """How many summaries of a tree are done, how many of these were cached, and how many it has."""

    done: int
    cached: int
    total: int


def shape_for(llm: LLM, fanout: int = FANOUT) -> Shape:
    """The paper's sizes, or what fits the window: of what the prompts leave, a sixth is for the
    reply, and a third of the rest for memory."""
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


def build(
    text: str,
    llm: LLM,
    shape: Shape,
    store: Store,
    tell: Callable[[Built], None] = lambda built: None,
) -> Node:
    """The tree of a text; summaries in the store are not made again."""
    nodes, at = [], 0
    for segment in segments(text, shape.segment, llm.size):
        nodes.append(Node(at, at + len(segment), ""))
        at += len(segment)
    if not nodes:
        raise UserError("the text is empty: give one to read.")
    if len(nodes) == 1:  # read in full: nothing is chosen by its summary
        return nodes[0]
    total = count = len(nodes)
    while count > 1:
        count = -(-count // shape.fanout)
        total += count
    done = cached = 0

    def report(more: int, stored: int = 0) -> None:
        nonlocal done, cached
        done, cached = done + more, cached + stored
        tell(Built(done, cached, total))

    made = _summaries(
        "summarize", [text[n.start : n.stop] for n in nodes], llm, shape, store, report
    )
    nodes = [Node(n.start, n.stop, summary) for n, summary in zip(nodes, made, strict=True)]
    while len(nodes) > 1:
        count = -(-len(nodes) // shape.fanout)  # groups of neighbours, sizes differing by one
        edges = [len(nodes) * group // count for group in range(count + 1)]
        groups = [nodes[a:b] for a, b in pairwise(edges)]
        listed = [numbered([node.summary for node in group]) for group in groups]
        made = _summaries("compress", listed, llm, shape, store, report)
        nodes = [
            Node(group[0].start, group[-1].stop, summary, tuple(group))
            for group, summary in zip(groups, made, strict=True)
        ]
    return nodes[0]


def _summaries(
    name: str,
    texts: Sequence[str],
    llm: LLM,
    shape: Shape,
    store: Store,
    report: Callable[..., None],
) -> list[str]:
    """The summary of each text by a prompt, from the store or the model; equal texts share one."""
    times, new = Counter(texts), shape.summary
    prompts = {text: prompt(name, text=text) for text in times}
    keys, found = {}, {}
    for text, filled in prompts.items():
        digest = hashlib.sha256(filled.encode(errors="surrogatepass")).hexdigest()
        keys[text] = {"kind": KIND, "model": llm.fingerprint, "new": new, "asked": digest}
        stored = (store.get(keys[text]) or {}).get("summary")
        if isinstance(stored, str) and stored.strip():
            found[text] = stored
    cached = sum(times[text] for text in found)
    report(cached, cached)
    missing = [text for text in times if text not in found]
    for n, reply in replies(llm, [prompts[text] for text in missing], new):
        text = missing[n]
        # an empty reply leaves the beginning of the text to choose by
        summary = truncate(reply, new, llm.size) or truncate(text, new, llm.size) or "(nothing)"
        found[text] = summary
        store.put(keys[text], {"summary": summary})
        report(times[text])
    return [found[text] for text in texts]
