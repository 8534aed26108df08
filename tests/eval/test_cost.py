"""Costs: what was run, what the clock said, what memory was taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude import UserError
from longitude.eval.tasks import cost as room
from longitude.eval.tasks.cost import cost
from tests.eval.test_perplexity import model


def test_it_reads_and_writes_the_length() -> None:
    m, shapes = model("tiny-rope"), []
    hook = m.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape))
    )
    found = cost(m, 200, new=5)
    hook.remove()
    assert shapes[-8:] == [(1, 195), (1, 1), (1, 195), *[(1, 1)] * 5]
    assert found["prefill"] > 0 and found["decode"] > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(room, "time", clock)
    return clock


def test_the_clock_is_read_around_a_prompt_and_every_token(clock: SimpleNamespace) -> None:
    """A model that takes 0.3 s for a prompt and 20 ms for a token, and once 0.3 s."""
    m, calls = model("tiny-rope"), []

    def wait(module: Any, given: Any) -> None:
        calls.append(given[0].shape[1])
        slow = 0.3 if len(calls) == 10 else 0.02
        clock.now += 0.3 if given[0].shape[1] > room.WARM_UP else slow

    hook = m.get_input_embeddings().register_forward_pre_hook(wait)
    found = cost(m, 100, new=7)
    hook.remove()
    assert calls == [room.WARM_UP, 1, 1, 93, 1, 93, *[1] * room.ROUND_STEPS]
    assert found["prefill"] == pytest.approx(93 / 0.3)
    assert found["decode"] == pytest.approx(20), "a single slow token does not count"


def test_the_first_prefill_of_a_length_is_cold_and_does_not_count(clock: SimpleNamespace) -> None:
    m, calls = model("tiny-rope"), []

    def wait(module: Any, given: Any) -> None:
        calls.append(given[0].shape[1])
        clock.now += 0.5 if calls.count(93) == 1 and calls[-1] == 93 else 0.1

    hook = m.get_input_embeddings().register_forward_pre_hook(wait)
    found = cost(m, 100, new=7)
    hook.remove()
    assert found["prefill"] == pytest.approx(93 / 0.1)


def test_decoding_is_compared_in_rounds_with_the_baseline(clock: SimpleNamespace) -> None:
    """A baseline whose tokens take three times as long, while the machine grows slower."""
    m, slower, calls = model("tiny-rope"), [], []

    @contextmanager
    def baseline() -> Iterator[None]:
        slower.append(True)
        yield
        slower.pop()

    def wait(module: Any, given: Any) -> None:
        calls.append((bool(slower), given[0].shape[1]))
        clock.now += (3 if slower and given[0].shape[1] == 1 else 1) * 1.002 ** len(calls)

    hook = m.get_input_embeddings().register_forward_pre_hook(wait)
    found = cost(m, 100, new=4, baseline=baseline)
    hook.remove()
    each = [*[(True, 1)] * 4, (False, room.WARM_UP), (False, 96)]
    assert str(each)[1:-1] in str(calls), "the baseline's tokens, then a run of the method"
    assert found["decode_speed"] == pytest.approx((3.0,) * 3, rel=0.05)
    assert found["speed"] == pytest.approx((1.0,) * 3, rel=0.05)


def test_memory_that_was_taken_is_seen() -> None:
    m = model("tiny-rope")
    weights = sum(p.numel() * 4 for p in m.parameters())

    def take(module: Any, given: Any) -> None:
        if given[0].shape[1] > room.WARM_UP:
            held = torch.ones(50 * 2**20 // 4)
            time.sleep(0.05)
            del held

    hook = m.get_input_embeddings().register_forward_pre_hook(take)
    found = cost(m, 100, new=2)
    hook.remove()
    assert 48 * 2**20 < found["peak"] - weights < 90 * 2**20
    assert cost(m, 100, new=2)["peak"] - weights < 30 * 2**20


def test_a_patch_is_measured_too() -> None:
    m = model("tiny-rope")
    with lh.patched(m, "rope(remap=rerope(128))"):
        assert cost(m, 300, new=2)["rounds"] == 1


def test_a_table_that_is_just_long_enough_is_enough() -> None:
    assert cost(model("tiny-learned"), 256, new=3)["prefill"] > 0


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(UserError, match="got 16 of 16"):
        cost(model("tiny-rope"), 16)
