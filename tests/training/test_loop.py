"""The training loop: its steps are AdamW's, and a stop or a kill loses nothing."""

from __future__ import annotations

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
from longitude.training import loop
from longitude.training.checkpoint import STATE
from longitude.training.data import join
from longitude.training.distributed import World, generator
from longitude.training.lab.model import Decoder
from longitude.training.lab.run import MODEL, lab_folder, make_batch, make_job, train_run
from longitude.training.lab.tasks import task
from longitude.training.loop import LoopOptions, Stopped, take_step, train
from tests.training.conftest import CPU, small

TASKS = (("text", 1.0), ("copy", 1.0))


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / MODEL)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns(corpus, tmp_path):
    run, steps = small(corpus, steps=60, batch=8), []
    options = LoopOptions(report=steps.append)
    losses, last = train(make_job(run, corpus, CPU), lab_folder(tmp_path), CPU, options)
    assert losses[0] > 5 and losses[-10:].mean() < 3.5
    assert [step.step for step in steps] == [*range(1, 61)] and steps[-1] == last
    assert last.left == 0 < last.tokens_per_second and last.rate == run.rate_at(59)
    assert last.event("train").figures["loss"] == f"{losses[-20:].mean():.3f}"


def test_reports_are_seldom_but_the_last_one_is_certain(corpus, tmp_path):
    run, steps = small(corpus, steps=4), []
    options = LoopOptions(report_seconds=1e9, report=lambda step: steps.append(step.step))
    train(make_job(run, corpus, CPU), lab_folder(tmp_path), CPU, options)
    assert steps == [1, 4]


def test_steps_are_those_of_adamw_written_out(corpus, tmp_path):
    """Weighted mean loss, gradients clipped to 1, decay of matrices alone, the rate of the step."""
    run = small(corpus, "t5()", steps=3, batch=6, tasks=TASKS)
    job = make_job(run, corpus, CPU)
    losses, _ = train(job, lab_folder(tmp_path), CPU, LoopOptions())
    ours, text = Decoder(run.config, run.seed), join(corpus.train)
    named = list(ours.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in named}
    for step in range(3):
        starts = torch.randint(len(text) - 32, (3,), generator=generator(0, step, "windows"))
        windows = torch.stack([text[s : s + 33] for s in starts.tolist()]).long()
        rows = task("copy", 32).rows(generator(0, step, "copy"), 3, 32, vary=True)
        tokens = torch.cat([windows, rows.tokens])
        weights = torch.cat([torch.ones(3, 32), rows.weights])
        each = torch.nn.functional.cross_entropy(
            ours(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        loss = (each * weights).sum() / weights.sum()
        torch.testing.assert_close(losses[step], loss.detach())
        ours.zero_grad()
        loss.backward()
        norm = sum(p.grad.pow(2).sum() for _, p in named).sqrt()
        for name, p in named:
            grad = p.grad / max(1.0, float(norm))
            first, second = moments[name]
            first.lerp_(grad, 0.1)
            second.lerp_(grad**2, 0.05)
            tall = first / (1 - 0.9 ** (step + 1))
            wide = (second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
            decays = p.dim() == 2 and ".at." not in name
            rate = run.rate_at(step)
            p.data = p.data * (1 - rate * (0.1 if decays else 0.0)) - rate * tall / wide
    for (name, p), (_, q) in zip(job.model.named_parameters(), named, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_accumulated_gradients_are_those_of_the_batch(corpus, tmp_path):
    """As many tokens at once as two rows have, or all of them."""
    run = small(corpus, steps=2, batch=5, tasks=TASKS)
    found = []
    for most in (None, 64, 1):
        job = replace(make_job(run, corpus, CPU), tokens_at_once=most)
        losses = [take_step(job, step, CPU) for step in range(2)]
        found.append((losses, dict(job.model.named_parameters())))
    (losses, weights), *others = found
    for other, parts in others:
        torch.testing.assert_close(other, losses)
        for name, p in parts.items():
            torch.testing.assert_close(p, weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", ["t5()", "randomized(64) + rope()"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(corpus, tmp_path, scheme):
    run = small(corpus, scheme, steps=6, tasks=TASKS)
    train_run(run, corpus, lab_folder(tmp_path / "straight"), CPU)
    stopped = lab_folder(tmp_path / "stopped")

    def stop_at_three(step) -> None:
        if step.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped after step 3 of 6: the same command continues"):
        train_run(run, corpus, stopped, CPU, LoopOptions(report=stop_at_three))
    assert stopped.saved_step == 3 and not stopped.done
    train_run(run, corpus, stopped, CPU)
    assert same(weights_of(tmp_path / "straight"), weights_of(stopped.path))
    assert stopped.history()["losses"] == lab_folder(tmp_path / "straight").history()["losses"]


@pytest.mark.parametrize("save", [{"save_seconds": 0.0}, {"save_steps": 2}])
def test_states_are_saved_by_time_or_by_steps(corpus, tmp_path, save):
    class Killed(Exception):
        pass

    def kill_at_five(step) -> None:
        if step.step == 5:
            raise Killed

    run, folder = small(corpus, steps=6), lab_folder(tmp_path)
    with pytest.raises(Killed):
        train_run(run, corpus, folder, CPU, LoopOptions(**save, report=kill_at_five))
    assert folder.saved_step == 4


def test_a_kill_at_any_moment_leaves_a_state_to_go_on_from(folder, tmp_path):
    """SIGKILL while it writes a state after every step; then to the end."""
    command = [
        sys.executable, "-m", "longitude", "train", "--scheme", "rope()", "--length", "32",
        "--size", "nano", "--steps", "12", "--batch", "2", "--text", str(folder),
        "--every", "0", "--resume", "--device", "cpu", "--out",
    ]  # fmt: skip
    env, killed = {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "killed"
    child = subprocess.Popen([*command, str(killed)], env=env, stderr=subprocess.DEVNULL)
    while not (killed / STATE).exists() and child.poll() is None:
        time.sleep(0.002)
    child.kill()
    child.wait()
    assert lab_folder(killed).done or lab_folder(killed).saved_step is not None
    from longitude.cli.main import run

    for path in (killed, tmp_path / "straight"):
        assert run([*command[3:], str(path)]) == 0
    assert same(weights_of(killed), weights_of(tmp_path / "straight"))


def test_same_seed_same_weights_and_another_seed_others(corpus, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_run(small(corpus, steps=2, seed=seed), corpus, lab_folder(tmp_path / name), CPU)
    a, b, c = (weights_of(tmp_path / name) for name in "abc")
    assert same(a, b) and not same(a, c)


def test_a_loss_that_is_not_finite_stops_with_a_sentence(corpus, tmp_path):
    run = small(corpus, rate=1e30, steps=40)
    with pytest.raises(UserError, match="lower the learning rate"):
        train_run(run, corpus, lab_folder(tmp_path), CPU)


def test_the_gradients_of_processes_average_to_that_of_the_batch(corpus, monkeypatch):
    """As DDP and FSDP average them; Adam alone would hide a wrong factor."""
    monkeypatch.setattr(loop, "CLIP_NORM", float("inf"))
    monkeypatch.setattr(World, "sum", lambda self, loss: loss)
    run = small(corpus, batch=6, tasks=TASKS)

    class Recorder(torch.optim.Optimizer):
        """An optimizer that only records gradients."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), {"lr": 1.0})
            self.model = model

        def step(self, closure=None) -> None:
            self.gradients = [p.grad.clone() for p in self.model.parameters()]

    def gradients(rank: int, size: int) -> list[torch.Tensor]:
        job = make_job(run, corpus, CPU)
        job = replace(job, optimizer=Recorder(job.model))
        take_step(job, 0, World(torch.device("cpu"), rank, size))
        return job.optimizer.gradients

    full, parts = gradients(0, 1), [gradients(rank, 3) for rank in range(3)]
    for one, *each in zip(full, *parts, strict=True):
        torch.testing.assert_close(one, sum(each) / 3)


def test_processes_take_every_nth_row(corpus):
    batch = make_batch(small(corpus, "randomized(64) + rope()", batch=6), join(corpus.train), 5)
    for size in (2, 3):
        for rank in range(size):
            part = batch.rows(slice(rank, None, size), torch.device("cpu"))
            assert torch.equal(part.tokens, batch.tokens[rank::size])
            assert torch.equal(part.weights, batch.weights[rank::size])
            assert part.total == batch.total and torch.equal(part.pos, batch.pos)
