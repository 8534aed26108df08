"""The rows of a plan against a straightforward computation: one forward a length, in float32."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from longitude.core.store import Store
from longitude.eval import perplexity as reading
from longitude.eval import prefill
from longitude.eval.records import CONTEXT, COST, LOSS
from longitude.eval.tasks import cost as cost_task
from longitude.eval.tasks.cost import cost
from longitude.extension.measure import Evaluator, measurements, missing, run_tasks
from longitude.extension.plan import ExtendOptions, Task, prepare
from longitude.hf import patched
from longitude.hf.patch import own_scheme, scheme_of


@pytest.fixture(scope="module")
def store(small, evaluator):
    with Store(":memory:") as store:
        run_tasks(evaluator, small.plan.tasks(), store)
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
    rows = [r for r in measurements(small.plan, store) if r.key.measure == LOSS]
    methods = {m.scheme: m for m in small.plan.methods}
    documents = {d.text: d for d in small.documents}
    assert len(rows) == 2 * 2 + 2 * 2  # two read once, one at each of two lengths
    seen = set()
    for row in rows:
        method, document = methods[row.key.scheme], documents[row.key.text]
        for n, mean in row.value["means"]:
            want = straightforward(small.target.model, method, document.ids[: n + 1], n)
            assert math.isclose(mean, float(want.mean()), abs_tol=1e-4), (method.label, n)
            seen.add((method.label, document.text, n))
        first, past, loss = row.value["bins"][-1]
        assert past == row.key.length and math.isclose(
            loss, float(want[first:past].mean()), abs_tol=1e-4
        )
    assert len(seen) == 3 * 2 * 2


def test_the_last_tokens_are_scored_with_more_and_more_before_them(small, store):
    rows = [r for r in measurements(small.plan, store) if r.key.measure == CONTEXT]
    methods = {m.scheme: m for m in small.plan.methods}
    documents = {d.text: d for d in small.documents}
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        n, tail = row.key.length, small.plan.protocol.scored_tokens
        ids = documents[row.key.text].ids[-(n + 1) :]
        want = straightforward(small.target.model, methods[row.key.scheme], ids, n)
        assert math.isclose(row.value["loss"], float(want[-tail:].mean()), abs_tol=1e-4)


def test_nothing_is_missing_and_nothing_computed_twice(small, store):
    assert missing(small.plan, small.plan.tasks(), store) == []


def test_costs_of_a_method_alternate_with_the_baseline(small, evaluator, monkeypatch):
    """Two methods on the same kernels have one speed, however cold the first sample was."""
    method = next(m for m in small.plan.methods if m.patch)
    plan = replace(small.plan, protocol=replace(small.plan.protocol, cost=True))
    ran, own = [], own_scheme(small.target.model)
    real = prefill.prefill

    def watched(model, ids, **more):
        ran.append(("patched" if scheme_of(model) != own else "own", ids.shape[1]))
        return real(model, ids, **more)

    monkeypatch.setattr(prefill, "prefill", watched)
    costs = Evaluator(plan, small.target, small.documents)
    with Store(":memory:") as store:
        run_tasks(costs, [Task(method, COST, length=256)], store)
        (row,) = [store.get(k.to_json()) for k in plan.keys(Task(method, COST, length=256))]
    timed = [state for state, n in ran if n == 240]
    assert timed[:5] == ["patched", "own", "patched", "own", "patched"] and len(timed) <= 7
    warm = [state for state, n in ran if n == 64]
    assert warm[:5] == timed[:5]  # each after a warm-up in the same state
    median, low, high = row["speed"]
    assert low <= median <= high and row["rounds"] == len(timed) // 2


@pytest.fixture
def clock(target, monkeypatch):
    """A clock that runs by the tokens of each forward, and by the seconds that a test adds."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def tick(module, given):
        clock.now += 1e-3 * given[0].shape[1]

    monkeypatch.setattr(cost_task, "time", clock)
    hook = target.model.get_input_embeddings().register_forward_pre_hook(tick)
    yield clock
    hook.remove()


def test_one_cold_sample_of_the_baseline_does_not_count(target, clock):
    """As where YaRN had "3.66 of the speed" of the very same kernels."""
    seconds = iter([0.2, 0.0, 0.0, 0.0])  # the baseline's first run is a cold one
    prefills = []

    def wait(module, given):
        if given[0].shape[1] > 64 and prefills:
            clock.now += prefills.pop()

    @contextmanager
    def baseline():
        prefills[:] = [next(seconds)]
        yield

    hook = target.model.get_input_embeddings().register_forward_pre_hook(wait)
    found = cost(target.model, 100, new=2, baseline=baseline)
    hook.remove()
    assert found["speed"][0] == pytest.approx(1.0) and found["rounds"] == 3


def test_methods_that_take_as_long_as_the_baseline_have_its_speed(target, clock):
    methods = ("rope(frequencies=yarn(2, original=256))", "rope(frequencies=linear(2))")
    options = ExtendOptions(methods="; ".join(methods), docs=1, tasks=())
    prepared = prepare(target, "2x", options)
    evaluator = Evaluator(prepared.plan, target, prepared.documents)
    tasks = [task for task in prepared.plan.all_tasks() if task.measure == COST]
    assert len(tasks) == 3 * 2
    with Store(":memory:") as store:
        run_tasks(evaluator, tasks, store)
        rows = [row.value for row in measurements(prepared.plan, store)]
    assert len(rows) == len(tasks)
    for row in rows:
        assert (*row["speed"], *row["decode_speed"]) == pytest.approx((1.0,) * 6)
        assert (row["prefill"], row["decode"]) == pytest.approx((1000.0, 1.0))


def test_out_of_memory_is_recorded_and_the_rest_goes_on(small, monkeypatch):
    real = reading.losses

    def short_of_memory(model, ids, **more):
        if len(ids) > 257:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, ids, **more)

    monkeypatch.setattr(reading, "losses", short_of_memory)
    static = next(m for m in small.plan.methods if not m.by_length)
    plan = replace(small.plan, methods=(static,))
    less = Evaluator(plan, small.target, small.documents)
    with Store(":memory:") as store:
        run_tasks(less, [Task(static, LOSS, document=0)], store)
        rows = [r for r in measurements(plan, store) if r.key.measure == LOSS]
    by_length = {r.key.length: r for r in rows}
    assert by_length[512].refused == "out of memory at 512 tokens."
    assert [n for n, _ in by_length[256].value["means"]] == [256]


def test_other_errors_are_not_swallowed(small, evaluator, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(reading, "losses", broken)
    with Store(":memory:") as store, pytest.raises(RuntimeError, match="illegal"):
        run_tasks(evaluator, [Task(small.plan.methods[0], LOSS, document=0)], store)


def test_the_model_is_as_it_was_afterwards(small, evaluator):
    ids = small.documents[0].ids[None, :40]
    with torch.no_grad():
        before = small.target.model(ids).logits
        with Store(":memory:") as other:
            run_tasks(evaluator, [Task(small.plan.methods[1], LOSS, document=0)], other)
        assert torch.equal(before, small.target.model(ids).logits)


@pytest.fixture
def two_cores(small):
    """An evaluator with a worker for each of two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Evaluator(small.plan, small.target, small.documents)
    torch.set_num_threads(threads)


def test_workers_side_by_side_measure_what_one_does(small, store, two_cores):
    first, second = two_cores.workers
    weights = [[p.data_ptr() for p in one.target.model.parameters()] for one in (first, second)]
    assert weights[0] == weights[1] and first.target.model is not second.target.model
    with Store(":memory:") as other:
        run_tasks(two_cores, small.plan.tasks(), other)
        rows = {str(r.key): r.value for r in measurements(small.plan, other)}
    alone = {str(r.key): r.value for r in measurements(small.plan, store)}
    assert rows.keys() == alone.keys() and torch.get_num_threads() == 2
    for key, value in rows.items():
        for name in ("means", "loss", "gains", "losses"):
            if name in value:
                got, want = torch.tensor(value[name]), torch.tensor(alone[key][name])
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_costs_are_measured_one_at_a_time(small, two_cores, monkeypatch):
    ran = []
    monkeypatch.setattr(Evaluator, "run", lambda self, task, record: ran.append(self))
    with Store(":memory:") as other:
        run_tasks(two_cores, [Task(m, COST, length=256) for m in small.plan.methods], other)
        assert ran == [two_cores] * 3
        run_tasks(two_cores, [Task(m, LOSS, document=0) for m in small.plan.methods], other)
        assert {*ran[3:]} == {*two_cores.workers}


def test_an_error_of_a_worker_is_raised(small, two_cores, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(reading, "losses", broken)
    tasks = [Task(method, LOSS, document=0) for method in small.plan.methods]
    with Store(":memory:") as other, pytest.raises(RuntimeError, match="illegal"):
        run_tasks(two_cores, tasks, other)


def test_ctrl_c_waits_for_no_worker(small, two_cores, monkeypatch):
    finished = []

    def forwards(self, task, record):
        until = time.monotonic() + 5
        while time.monotonic() < until:
            torch.nn.Identity()(0)
        finished.append(task)

    def progress(event):
        if event.stage.startswith(small.plan.methods[1].label):
            raise KeyboardInterrupt

    monkeypatch.setattr(Evaluator, "run", forwards)
    tasks = [Task(method, LOSS, document=0) for method in small.plan.methods[:2]]
    with Store(":memory:") as other, pytest.raises(KeyboardInterrupt):
        run_tasks(two_cores, tasks, other, progress)
    assert not finished and torch.nn.Identity()(0) == 0  # what runs later is not ended
