"""The tree: its shape, what it asks for, and what is kept of it."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.progress import Event
from longitude.core.store import Store, StoreError
from longitude.core.validate import UserError
from longitude.reading.llm import LLM, Server
from longitude.reading.memwalker import STORE, Node, Shape, build, read, shape_for

from .scripted import Scripted

SHAPE = Shape(segment=100, summary=50, reply=50, fanout=3)


class Echo:
    """Says something else to every prompt, and the same to the same; a token is a letter."""

    window, at_once, fingerprint = 4096, 1, "echo"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def size(self, text: str) -> int:
        return len(text)

    def say(self, prompt: str, new: int) -> str:
        self.asked.append(prompt)
        return f"Part {hashlib.sha256(prompt.encode()).hexdigest()[:12]}."


def text_of(count: int) -> str:
    """So many sentences of 50 letters: two to a segment."""
    return "".join(
        f"{f'Sentence number {n} says that it is number {n}':<48}. " for n in range(count)
    )


def grown(text: str, speaker: LLM, path: str | Path = ":memory:") -> Node:
    with Store(path) as store:
        return build(text, speaker, SHAPE, store)


def nodes(tree: Node) -> Iterator[Node]:
    yield tree
    for child in tree.children:
        yield from nodes(child)


@settings(deadline=None, max_examples=12)
@given(st.integers(2, 100))
def test_every_node_covers_its_children_and_leaves_cover_the_text(count: int) -> None:
    text, speaker = text_of(count), Echo()
    told: list[Event] = []
    with Store(":memory:") as store:
        tree = build(text, speaker, SHAPE, store, told.append)
    leaves = [node for node in nodes(tree) if not node.children]
    assert "".join(text[leaf.start : leaf.stop] for leaf in leaves) == text
    for node in nodes(tree):
        assert len(node.children) != 1 and len(node.children) <= SHAPE.fanout
        if node.children:
            below = node.children
            assert (node.start, node.stop) == (below[0].start, below[-1].stop)
            assert all(a.stop == b.start for a, b in pairwise(below))
    depths = set(_depths(tree))
    assert len(depths) == 1, "every leaf is as deep as another"
    made = len([*nodes(tree)]) if len(leaves) > 1 else 0
    assert len(speaker.asked) == made
    if made:
        assert (told[0].done, told[-1]) == (0, Event("summaries", made, made, "read"))


def _depths(node: Node, depth: int = 0) -> Iterator[int]:
    if not node.children:
        yield depth
    for child in node.children:
        yield from _depths(child, depth + 1)


def test_leaves_are_asked_for_with_their_text_and_nodes_with_the_summaries_below() -> None:
    text, speaker = text_of(8), Echo()
    tree = grown(text, speaker)
    leaves = [node for node in nodes(tree) if not node.children]
    for leaf, asked in zip(leaves, speaker.asked, strict=False):
        assert text[leaf.start : leaf.stop].strip() in asked
        assert "Summarize the above text" in asked
    for node in (node for node in nodes(tree) if node.children):
        listed = [f"Summary {n}: {child.summary}" for n, child in enumerate(node.children)]
        (asked,) = [a for a in speaker.asked if all(line in a for line in listed)]
        assert "Compress each summary" in asked


def test_a_text_of_one_segment_is_a_leaf_without_a_summary() -> None:
    speaker = Echo()
    assert grown("Short.", speaker) == Node(0, 6, "") and not speaker.asked
    with pytest.raises(UserError, match="the text is empty"):
        grown("", speaker)


def test_the_same_segment_is_asked_for_once() -> None:
    speaker = Echo()
    tree = grown("The same fifty letters stand here again and again. " * 12, speaker)
    assert len([n for n in nodes(tree) if not n.children]) == 12
    assert max(Counter(speaker.asked).values()) == 1


def test_it_is_kept_for_the_next_time_and_one_change_costs_one_branch(tmp_path: Path) -> None:
    text, first, again, changed = text_of(54), Echo(), Echo(), Echo()
    path = tmp_path / STORE
    assert grown(text, first, path) == grown(text, again, path)
    assert len(first.asked) == 27 + 9 + 3 + 1 and not again.asked
    assert grown(text.replace("number 20 ", "number XX "), changed, path)
    assert len(changed.asked) == 4, "a leaf, and those above it"
    other = Echo()
    other.fingerprint = "another model"
    grown(text, other, path)
    assert other.asked == first.asked


def test_a_model_that_says_nothing_or_too_much() -> None:
    class Odd(Echo):
        def say(self, prompt: str, new: int) -> str:
            super().say(prompt, new)
            return "" if len(self.asked) % 2 else "Many words. " * 100

    tree = grown(text_of(12), Odd())
    for node in nodes(tree):
        assert 0 < len(node.summary) <= SHAPE.summary
    assert tree.children[0].children[0].summary.startswith("Sentence number 0")


def test_what_is_no_summary_is_made_again_and_no_store_is_told(tmp_path: Path) -> None:
    path, speaker = tmp_path / STORE, Echo()
    tree = grown(text_of(4), speaker, path)
    with Store(path) as store:
        key = next(store.rows()).key
        store.put(key, {"summary": 7})
    again = Echo()
    assert grown(text_of(4), again, path) == tree
    assert len(again.asked) == 1
    path.write_bytes(b"no database at all, but long enough to be one" * 100)
    with pytest.raises(StoreError, match="can't be used"):
        grown(text_of(4), again, path)


def test_shapes_fit_their_windows() -> None:
    speaker = Echo()
    with pytest.raises(UserError, match="too short to walk a tree"):
        shape_for(speaker_with(speaker, 900))
    small, large = shape_for(speaker_with(speaker, 2200)), shape_for(speaker_with(speaker, 10**6))
    assert (large.segment, large.summary, large.reply, large.fanout) == (1000, 256, 1024, 8)
    assert small.segment < 1000 and small.summary * 8 + small.reply < 2200
    with pytest.raises(UserError, match="2 children or more"):
        shape_for(speaker, 1)


def speaker_with(speaker: Echo, window: int) -> Echo:
    speaker.window = window
    return speaker


def _summary(prompt: str) -> str:
    return "About " + " ".join(prompt.split()[1:5]) + "."


def test_a_server_is_asked_no_more_at_once_than_agreed() -> None:
    gate = threading.Barrier(3, timeout=10)

    def script(prompt: str) -> str:
        if "Summarize" in prompt:
            gate.wait()  # passes only where three are under way
        return _summary(prompt)

    # five sentences to a segment by the server's measure, which is three letters a token
    with Scripted(script) as server:
        speaker = Server(server.url, at_once=3)
        tree = grown(text_of(75), speaker)
        assert len([n for n in nodes(tree) if not n.children]) == 15
        assert server.most == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only asks a server
def test_a_kill_in_the_middle_costs_only_what_was_under_way(tmp_path: Path) -> None:
    text = "".join(f"Line {n} of a long text that is read by someone else. " for n in range(600))
    over = threading.Event()

    def script(prompt: str) -> str:
        if server.prompts.index(prompt) >= 6:
            over.wait(60)
        return _summary(prompt)

    with Scripted(script) as server:

        def reading() -> None:
            read(text, "What?", Server(server.url, at_once=2), folder=tmp_path)

        reader = multiprocessing.get_context("fork").Process(target=reading)
        reader.start()
        while reader.is_alive() and _kept(tmp_path) < 6:
            time.sleep(0.05)
        reader.kill()
        reader.join()
        over.set()
        before, server.prompts = server.prompts[:6], []
        speaker = Server(server.url, at_once=2)
        with Store(tmp_path / STORE) as store:
            tree = build(text, speaker, shape_for(speaker), store)
        assert len(server.prompts) == len([*nodes(tree)]) - 6
        assert not {*before} & {*server.prompts}


def _kept(folder: Path) -> int:
    if not (folder / STORE).exists():
        return 0
    with Store(folder / STORE) as store:
        return len([*store.rows()])
