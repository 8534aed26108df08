"""The rows of a plan against a straightforward computation: one forward a length, in float32."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from longitude.core.store import Store
from longitude.eval import perplexity as reading
from longitude.eval.records import CONTEXT, LOSS, PASSKEY
from longitude.extension.measure import Bench
from longitude.extension.plan import Task
from longitude.extension.run import beyond, do, local, measured, missing
from longitude.hf import patched


@pytest.fixture(scope="module")
def store(small):
    with Store(":memory:") as store:
        local(small.bench)(small.plan, missing(small.plan, store), store, lambda news: None)
        yield store


@torch.no_grad()
def straightforward(model, method, ids, length):
    """Losses of a text from one forward with all its logits."""
    told = length if method.by_length else None
    patch = patched(model, method.patch, length=told, check=False) if method.patch else None
    with patch or nullcontext():
        logits = model(ids[None, :-1]).logits[0]
    return F.cross_entropy(logits.float(), ids[1:], reduction="none").double()


def test_losses_at_every_length_are_those_of_a_forward_at_that_length(small, store):
    rows = [r for r in measured(small.plan, store) if r.key.measure == LOSS]
    methods = {m.scheme: m for m in small.plan.methods}
    documents = {d.text: d for d in small.bench.documents}
    assert len(rows) == 2 * 2 + 2 * 2  # two read once, one at each of two lengths
    seen = set()
    for row in rows:
        method, document = methods[row.key.scheme], documents[row.key.text]
        for n, mean in row.value["means"]:
            want = straightforward(small.bench.model, method, document.ids[: n + 1], n)
            assert math.isclose(mean, float(want.mean()), abs_tol=1e-4), (method.label, n)
            seen.add((method.label, document.text, n))
        first, past, loss = row.value["bins"][-1]
        assert past == row.key.length and math.isclose(
            loss, float(want[first:past].mean()), abs_tol=1e-4
        )
    assert len(seen) == 3 * 2 * 2


def test_the_last_tokens_are_scored_with_more_and_more_before_them(small, store):
    rows = [r for r in measured(small.plan, store) if r.key.measure == CONTEXT]
    methods = {m.scheme: m for m in small.plan.methods}
    documents = {d.text: d for d in small.bench.documents}
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        n, tail = row.key.length, small.plan.protocol.tail
        ids = documents[row.key.text].ids[-(n + 1) :]
        want = straightforward(small.bench.model, methods[row.key.scheme], ids, n)
        assert math.isclose(row.value["loss"], float(want[-tail:].mean()), abs_tol=1e-4)


def test_nothing_is_missing_and_nothing_computed_twice(small, store, monkeypatch):
    assert missing(small.plan, store) == []
    monkeypatch.setattr(reading, "losses", None)  # would raise if it were called
    local(small.bench)(small.plan, missing(small.plan, store), store, lambda news: None)


def test_a_method_that_told_none_is_not_asked_further(small):
    plan, method = small.plan, small.plan.methods[0]
    near, far = plan.questions(method, PASSKEY)
    with Store(":memory:") as store:
        assert beyond(plan, far, store) is None  # not known yet
        for asked in plan.asked(near):
            store.put(asked.to_json(), {"right": [False]})
        assert beyond(plan, far, store) == f"none of 5 told at {near.length}."
        do(small.bench, far, store)
        rows = [store.get(asked.to_json()) for asked in plan.asked(far)]
        assert all(row and row["right"] == [False] and row["assumed"] for row in rows)
        store.put(plan.asked(near)[0].to_json(), {"right": [True]})
        assert beyond(plan, far, store) is None
        assert beyond(plan, near, store) is None


def test_out_of_memory_is_recorded_and_the_rest_goes_on(small, monkeypatch):
    real = reading.losses

    def short_of_memory(model, ids, **more):
        if len(ids) > 257:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, ids, **more)

    monkeypatch.setattr(reading, "losses", short_of_memory)
    static = next(m for m in small.plan.methods if not m.by_length)
    plan = replace(small.plan, methods=(static,))
    bench = Bench(plan, small.bench.model, small.bench.tokenizer, small.bench.documents)
    with Store(":memory:") as store:
        do(bench, Task(static, LOSS, document=0), store)
        rows = [r for r in measured(plan, store) if r.key.measure == LOSS]
    by_length = {r.key.length: r for r in rows}
    assert by_length[512].refused == "out of memory at 512 tokens."
    assert [n for n, _ in by_length[256].value["means"]] == [256]


def test_other_errors_are_not_swallowed(small, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(reading, "losses", broken)
    with Store(":memory:") as store, pytest.raises(RuntimeError, match="illegal"):
        do(small.bench, Task(small.plan.methods[0], LOSS, document=0), store)


def test_the_model_is_as_it_was_afterwards(small, store):
    ids = small.bench.documents[0].ids[None, :40]
    with torch.no_grad():
        before = small.bench.model(ids).logits
        with Store(":memory:") as other:
            do(small.bench, Task(small.plan.methods[1], LOSS, document=0), other)
        assert torch.equal(before, small.bench.model(ids).logits)
