"""Several processes: one step of two is one step of one; a lost one leaves a state that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longitude.training.tune.run import tune_folder
from tests.processes import python

PROGRAM = """
import sys
from longitude.training.tune.run import TuneOptions, fine_tune
text, out, steps, trained = sys.argv[1:5]
options = TuneOptions(recipe="yarn", text=(text,), steps=int(steps), batch=4, seq=48, lr=1e-4,
                      lora=trained == "lora", out=out, save_every=2, device="cpu")
fine_tune("tiny-rope", "2x", options)
"""
BROKEN = """
import os, signal, longitude.training.loop as loop
take = loop.take_step
def step(job, step, world):
    if step == 3 and world.rank in {ranks}:
        {end}
    return take(job, step, world)
loop.take_step = step
"""
LOST = BROKEN.format(ranks=[1], end="os._exit(9)") + PROGRAM
KILLED = BROKEN.format(ranks=[0], end="os.kill(os.getpid(), signal.SIGKILL)") + PROGRAM


def begin(program: str, processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    given = ["-c", program, *map(str, arguments)]
    if processes == 1:
        return python(*given)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, "--no-python", sys.executable, *given]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, timeout=300, capture_output=True, text=True)


def result(out: Path) -> dict[str, torch.Tensor]:
    (file,) = (out / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_one_step_of_two_processes_is_one_step_of_one(folder, tmp_path, trained):
    if trained == "lora":
        pytest.importorskip("peft")
    for processes in (1, 2):
        ran = begin(PROGRAM, processes, folder, tmp_path / str(processes), 1, trained)
        assert ran.returncode == 0, ran.stderr
    one, two = (result(tmp_path / name) for name in ("1", "2"))
    assert one.keys() == two.keys()
    for name, wanted in one.items():
        torch.testing.assert_close(two[name], wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_killed_and_resumed_equals_undisturbed(folder, tmp_path):
    killed = begin(KILLED, 1, folder, tmp_path / "killed", 5, "full")
    assert killed.returncode == -9 and tune_folder(tmp_path / "killed").saved_step == 2
    assert begin(PROGRAM, 1, folder, tmp_path / "killed", 5, "full").returncode == 0
    assert begin(PROGRAM, 1, folder, tmp_path / "whole", 5, "full").returncode == 0
    resumed, whole = (result(tmp_path / name) for name in ("killed", "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_lost_process_leaves_a_state_that_goes_on(folder, tmp_path):
    lost = begin(LOST, 2, folder, tmp_path / "run", 6, "full")
    assert lost.returncode != 0 and tune_folder(tmp_path / "run").saved_step == 2
    assert begin(PROGRAM, 2, folder, tmp_path / "run", 6, "full").returncode == 0
    assert begin(PROGRAM, 1, folder, tmp_path / "one", 6, "full").returncode == 0
    for name, wanted in result(tmp_path / "one").items():
        torch.testing.assert_close(result(tmp_path / "run")[name], wanted, rtol=0, atol=2e-4)
