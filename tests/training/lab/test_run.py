"""A run of the lab: a value that survives JSON, batches by their shares, a model that loads."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from longitude.core.validate import UserError
from longitude.training.checkpoint import STATE
from longitude.training.data import join
from longitude.training.lab.run import (
    Run,
    lab_folder,
    load,
    make_batch,
    read_run,
    row_counts,
    shares,
    train_run,
)
from tests.training.conftest import CPU, small


def test_a_finished_run_is_read_with_the_scheme_for_tests_or_any_other(corpus, tmp_path):
    run = small(corpus, "rope(remap=inverse_leaky(8, 4))", steps=2)
    train_run(run, corpus, lab_folder(tmp_path), CPU)
    assert load(tmp_path).config.scheme == "rope()"
    other = load(tmp_path, "rope(remap=leaky_rerope(16, 4))")
    assert other(torch.zeros(1, 64, dtype=torch.int64)).shape == (1, 64, 256)
    assert not (tmp_path / STATE).exists()


def test_a_batch_follows_from_seed_and_step_alone(corpus):
    run, text = small(corpus, "randomized(64) + rope()"), join(corpus.train)
    one, again, later = (make_batch(run, text, step) for step in (3, 3, 4))
    assert torch.equal(one.tokens, again.tokens) and torch.equal(one.pos, again.pos)
    assert not torch.equal(one.tokens, later.tokens) and not torch.equal(one.pos, later.pos)
    assert torch.equal(one.tokens[:, 1:], one.targets[:, :-1])


def test_shares_of_a_batch():
    assert row_counts(256, shares("text:3, passkey")) == {"text": 192, "passkey": 64}
    assert row_counts(10, shares("a,b,c")) == {"a": 4, "b": 3, "c": 3}
    with pytest.raises(UserError, match="leaves none for passkey"):
        row_counts(2, shares("text:9,passkey"))
    for bad in ("text:x", "text:-1", "text:0", "", ":3", "text:inf"):
        with pytest.raises(UserError):
            shares(bad)


def test_a_run_survives_json(corpus):
    run = small(corpus, tasks=(("text", 3.0), ("passkey", 1.0)))
    assert read_run(json.loads(json.dumps(run.to_json()))) == run
    keys = ["shape", "text", "steps", "batch", "rate", "seed", "tasks", "dtype"]
    assert [*run.to_json()] == keys, "what stands in config.json and in the keys of rows"


def test_the_rate_rises_and_falls(corpus):
    run, warmup = small(corpus, steps=1000), 100
    rates = [run.rate_at(step) for step in range(1000)]
    assert max(rates) == pytest.approx(run.rate) and rates.index(max(rates)) == warmup
    assert rates[0] < 0.02 * run.rate and rates[-1] == pytest.approx(run.rate / 10, rel=1e-3)
    middle = warmup + (1000 - warmup) // 2
    assert rates[middle] == pytest.approx(0.55 * run.rate, rel=1e-3)
    falls = itertools.pairwise(rates[warmup:])
    assert all(math.isclose(a, b, rel_tol=0.02) and a > b for a, b in falls)


def test_runs_differ_where_they_differ(corpus):
    run = small(corpus)
    for other in (replace(run, dtype="bfloat16"), replace(run, steps=9)):
        assert isinstance(other, Run) and other != run
    for wrong in ({"steps": 0}, {"batch": -1}, {"rate": 0.0}):
        with pytest.raises(UserError):
            replace(run, **wrong)
