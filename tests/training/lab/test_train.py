"""Training: it learns, a kill loses nothing, and the batch is the batch however it is shared."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longitude.core.validate import UserError
from longitude.training.checkpoint import HISTORY, MODEL, STATE, Folder
from longitude.training.distributed import World, generator
from longitude.training.lab.batch import Batches, counts
from longitude.training.lab.model import Decoder
from longitude.training.lab.pipeline import load, trained
from longitude.training.lab.run import Run, read, shares
from longitude.training.lab.tasks import task
from longitude.training.lab.text import windows
from longitude.training.loop import Manner, Stopped, take_step, train
from tests.training.lab.conftest import CPU, small

POLICIES = ["randomized(64) + rope()", "pose(64) + rope()", "equal_mean(32) + rope()"]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / MODEL)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns(corpus, tmp_path):
    run = small(corpus, steps=60, batch=8)
    _, losses, _ = train(run, windows(corpus, 32), Folder(tmp_path), CPU)
    assert losses[0] > 5 and losses[-10:].mean() < 3.5


def test_steps_are_those_of_adamw_written_out(corpus, tmp_path):
    """Weighted mean loss, gradients clipped to 1, decay of matrices alone, the rate of the step."""
    run = small(corpus, "t5()", steps=3, batch=6, tasks=(("text", 1.0), ("copy", 1.0)))
    model, losses, _ = train(run, windows(corpus, 32), Folder(tmp_path), CPU)
    ours, stream = Decoder(run.shape, run.seed), windows(corpus, 32)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in _named(ours)}
    for step in range(3):
        text = stream.batch(0, step, 3, 32)
        rows = task("copy", 32).rows(generator(0, step, "copy"), 3, 32, vary=True)
        tokens = torch.cat([text, rows.tokens])
        weights = torch.cat([torch.ones(3, 32), rows.weights])
        each = torch.nn.functional.cross_entropy(
            ours(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        loss = (each * weights).sum() / weights.sum()
        torch.testing.assert_close(losses[step], loss.detach())
        ours.zero_grad()
        loss.backward()
        norm = sum(p.grad.pow(2).sum() for _, p in _named(ours)).sqrt()
        for name, p in _named(ours):
            grad = p.grad / max(1.0, float(norm))
            first, second = moments[name]
            first.lerp_(grad, 0.1)
            second.lerp_(grad**2, 0.05)
            tall = first / (1 - 0.9 ** (step + 1))
            wide = (second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            decays = p.dim() == 2 and ".at." not in name
            rate = run.rate_at(step)
            p.data = p.data * (1 - rate * (0.1 if decays else 0.0)) - rate * tall / wide
    for (name, p), (_, q) in zip(_named(model), _named(ours), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _named(model: Decoder) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.named_parameters())


@pytest.mark.parametrize("scheme", ["rope()", "t5()", *POLICIES])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(corpus, tmp_path, scheme):
    run = small(corpus, scheme, steps=6, tasks=(("text", 1.0), ("copy", 1.0)))
    trained(run, corpus, Folder(tmp_path / "straight"), CPU)
    stopped = Folder(tmp_path / "stopped")

    def stop_at_three(progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    import longitude.training.loop as module

    rare, module.NEWS = module.NEWS, 0.0
    try:
        with pytest.raises(Stopped, match="3"):
            trained(run, corpus, stopped, CPU, Manner(every=1e9, watch=stop_at_three))
    finally:
        module.NEWS = rare
    assert (stopped.path / STATE).is_file() and not stopped.done
    trained(run, corpus, stopped, CPU)
    assert same(weights_of(tmp_path / "straight"), weights_of(stopped.path))
    straight, gone_on = (
        json.loads((p / HISTORY).read_text())["losses"]
        for p in (tmp_path / "straight", stopped.path)
    )
    assert straight == gone_on


def test_a_kill_at_any_moment_leaves_what_can_be_gone_on_with(folder, tmp_path):
    """SIGKILL while it writes a state after every step, again and again; then to the end."""
    command = [
        sys.executable, "-m", "longitude", "train", "--scheme", "rope()", "--length", "32",
        "--size", "nano", "--steps", "12", "--batch", "2", "--text", str(folder),
        "--every", "0", "--resume", "--out",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = tmp_path / "killed"
    for wait in (0.0, 0.05):
        child = subprocess.Popen([*command, str(killed)], env=env, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while (
            not (killed / STATE).exists() and time.monotonic() < deadline and child.poll() is None
        ):
            time.sleep(0.002)
        time.sleep(wait)
        child.kill()
        child.wait()
        assert Folder(killed).done or (killed / STATE).is_file()
    for path in (killed, tmp_path / "straight"):
        subprocess.run([*command, str(path)], env=env, check=True, stderr=subprocess.DEVNULL)
    assert same(weights_of(killed), weights_of(tmp_path / "straight"))


def test_same_seed_same_weights_and_another_seed_others(corpus, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained(small(corpus, steps=2, seed=seed), corpus, Folder(tmp_path / name), CPU)
    a, b, c = (weights_of(tmp_path / name) for name in "abc")
    assert same(a, b) and not same(a, c)


def test_a_finished_run_is_read_with_the_scheme_for_tests_or_any_other(corpus, tmp_path):
    run = small(corpus, "rope(remap=inverse_leaky(8, 4))", steps=2)
    trained(run, corpus, Folder(tmp_path), CPU)
    assert load(tmp_path).shape.scheme == "rope()"
    other = load(tmp_path, "rope(remap=leaky_rerope(16, 4))")
    assert other(torch.zeros(1, 64, dtype=torch.int64)).shape == (1, 64, 256)
    assert not (tmp_path / STATE).exists()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scheme", ["rope()", *POLICIES])
def test_processes_make_the_rows_of_one_batch(corpus, size, scheme):
    run = small(corpus, scheme, batch=12, tasks=(("text", 2.0), ("passkey", 1.0)))
    run = replace(run, shape=replace(run.shape, length=128, scheme=scheme.replace("64", "256")))
    stream = windows(corpus, 128)
    whole = Batches(run, stream).at(5)
    parts = [Batches(run, stream, rank, size).at(5) for rank in range(size)]
    for rank, part in enumerate(parts):
        assert torch.equal(part.tokens, whole.tokens[rank::size])
        assert torch.equal(part.weights, whole.weights[rank::size])
        assert part.total == whole.total
        assert torch.equal(torch.as_tensor(part.pos), torch.as_tensor(whole.pos))


def test_a_batch_follows_from_seed_and_step_alone(corpus):
    run, stream = small(corpus, "randomized(64) + rope()"), windows(corpus, 32)
    one, again, later = (Batches(run, stream).at(s) for s in (3, 3, 4))
    assert torch.equal(one.tokens, again.tokens) and torch.equal(one.pos, again.pos)
    assert not torch.equal(one.tokens, later.tokens) and not torch.equal(one.pos, later.pos)
    assert torch.equal(one.tokens[:, 1:], one.targets[:, :-1])


def test_shares_of_a_batch():
    assert counts(256, shares("text:3, passkey")) == {"text": 192, "passkey": 64}
    assert counts(10, shares("a,b,c")) == {"a": 4, "b": 3, "c": 3}
    with pytest.raises(UserError, match="leaves none for passkey"):
        counts(2, shares("text:9,passkey"))
    for bad in ("text:x", "text:-1", "text:0", "", ":3", "text:inf"):
        with pytest.raises(UserError):
            shares(bad)


def test_a_run_survives_json(corpus):
    run = small(corpus, tasks=(("text", 3.0), ("passkey", 1.0)))
    assert read(json.loads(json.dumps(run.plain()))) == run


def test_the_rate_climbs_and_falls(corpus):
    run = small(corpus, steps=1000)
    rates = [run.rate_at(step) for step in range(1000)]
    assert max(rates) == pytest.approx(run.rate) and rates.index(max(rates)) == run.warmup
    assert rates[0] < 0.02 * run.rate and rates[-1] == pytest.approx(run.rate / 10, rel=1e-3)
    middle = run.warmup + (1000 - run.warmup) // 2
    assert rates[middle] == pytest.approx(0.55 * run.rate, rel=1e-3)
    falls = itertools.pairwise(rates[run.warmup :])
    assert all(math.isclose(a, b, rel_tol=0.02) and a > b for a, b in falls)


def test_a_loss_that_is_no_number_stops_with_a_sentence(corpus, tmp_path):
    run = small(corpus, rate=1e30, steps=40)
    with pytest.raises(UserError, match="lower --rate"):
        train(run, windows(corpus, 32), Folder(tmp_path), CPU)


class TestFolders:
    """Who may write where."""

    def test_another_run_is_never_overwritten(self, corpus, tmp_path):
        run = small(corpus, steps=1)
        trained(run, corpus, Folder(tmp_path / "run"), CPU)
        folder = Folder(tmp_path / "run")
        with pytest.raises(UserError, match="its seed is 0, not 7"):
            folder.claim(replace(run, seed=7), resume=True)
        with pytest.raises(UserError, match="this very run, which is done"):
            folder.claim(run, resume=False)
        folder.claim(run, resume=True)

    def test_other_files_are_left_alone(self, corpus, tmp_path):
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(UserError, match="holds other files"):
            Folder(tmp_path).claim(small(corpus), resume=True)
        with pytest.raises(UserError, match="is a file"):
            Folder(tmp_path / "thesis.txt").claim(small(corpus), resume=True)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(UserError, match="no run of longitude"):
            Folder(tmp_path).claim(small(corpus), resume=True)

    def test_a_write_that_fails_leaves_the_file_before(self, tmp_path):
        from longitude.training.checkpoint import replaced, write_json

        write_json(tmp_path / "x.json", {"a": 1})

        def half(path: Path) -> None:
            path.write_text("half")
            raise OSError("disk full")

        with pytest.raises(OSError):
            replaced(tmp_path / "x.json", half)
        assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_runs_differ_where_they_differ(corpus):
    run = small(corpus)
    for other in (replace(run, dtype="bfloat16"), replace(run, steps=9)):
        assert isinstance(other, Run) and other != run
    for wrong in ({"steps": 0}, {"batch": -1}, {"rate": 0.0}, {"dtype": "float16"}):
        with pytest.raises(UserError):
            replace(run, **wrong)


def test_the_gradients_of_processes_average_to_that_of_the_batch(corpus, monkeypatch):
    """As DDP and FSDP average them; Adam alone would hide a wrong factor."""
    monkeypatch.setattr("longitude.training.loop.CLIP", float("inf"))
    monkeypatch.setattr(World, "total", lambda self, loss: loss)
    run = small(corpus, batch=6, tasks=(("text", 1.0), ("copy", 1.0)))

    class Catches(torch.optim.Optimizer):
        """An optimizer that only remembers."""

        def __init__(self, model: Decoder) -> None:
            super().__init__(model.parameters(), {"lr": 1.0})
            self.model = model

        def step(self, closure=None) -> None:
            self.found = [p.grad.clone() for p in self.model.parameters()]

    def gradients(rank: int, size: int) -> list[torch.Tensor]:
        model = Decoder(run.shape, run.seed)
        catches = Catches(model)
        batch = Batches(run, windows(corpus, 32), rank, size).at(0)
        take_step(model, catches, batch, run, 0, World(torch.device("cpu"), rank, size))
        return catches.found

    whole, parts = gradients(0, 1), [gradients(rank, 3) for rank in range(3)]
    for one, *each in zip(whole, *parts, strict=True):
        torch.testing.assert_close(one, sum(each) / 3)
