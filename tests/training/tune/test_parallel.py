"""Several processes: one step of two is one step of one; a lost one leaves a state that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from longitude.core.validate import UserError
from longitude.training.distributed import World
from longitude.training.tune.fsdp import check_rows, layers
from longitude.training.tune.resume import kept_step, telling

PROGRAM = """
import sys
from longitude.training.tune.options import Asked
from longitude.training.tune.pipeline import run
text, out, steps, trained = sys.argv[1:5]
run(Asked(to="2x", recipe="yarn", text=(text,), steps=int(steps), rows=4, length=48, rate=1e-4,
          trained=trained, out=out, save_every=2, device="cpu", quiet=True))
"""
LOST = PROGRAM.replace(
    "run(Asked",
    """
import os, longitude.training.tune.train as train
take = train.take_step
def step(job, learns, optimizer, step, world):
    if step == 3 and world.rank == 1:
        os._exit(9)
    return take(job, learns, optimizer, step, world)
train.take_step = step
run(Asked""",
)
KILLED = PROGRAM.replace(
    "run(Asked",
    """
import os, signal, longitude.training.tune.train as train
take = train.take_step
def step(job, learns, optimizer, step, world):
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(job, learns, optimizer, step, world)
train.take_step = step
run(Asked""",
)


def begin(program: str, processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    alone = [sys.executable, "-c", program]
    command = alone if processes == 1 else [sys.executable, *launch, "--no-python", *alone]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [*command, *map(str, arguments)]
    return subprocess.run(given, env=env, timeout=300, capture_output=True, text=True, check=False)


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
    assert killed.returncode == -9 and kept_step(tmp_path / "killed") == 2
    assert begin(PROGRAM, 1, folder, tmp_path / "killed", 5, "full").returncode == 0
    assert begin(PROGRAM, 1, folder, tmp_path / "whole", 5, "full").returncode == 0
    resumed, whole = (result(tmp_path / name) for name in ("killed", "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_lost_process_leaves_a_state_that_goes_on(folder, tmp_path):
    lost = begin(LOST, 2, folder, tmp_path / "run", 6, "full")
    assert lost.returncode != 0 and kept_step(tmp_path / "run") == 2
    assert begin(PROGRAM, 2, folder, tmp_path / "run", 6, "full").returncode == 0
    assert begin(PROGRAM, 1, folder, tmp_path / "one", 6, "full").returncode == 0
    for name, wanted in result(tmp_path / "one").items():
        torch.testing.assert_close(result(tmp_path / "run")[name], wanted, rtol=0, atol=2e-4)


def test_a_lost_process_is_told_with_how_to_go_on(tmp_path):
    world = World(torch.device("cpu"), 0, 2)
    with (
        pytest.raises(UserError, match=r"lost at step 7 .*no state was kept before; give the same"),
        telling(tmp_path, 7, world),
    ):
        raise RuntimeError("Connection closed by peer")


def test_errors_of_one_process_are_its_own(tmp_path):
    with pytest.raises(RuntimeError, match="a fault"), telling(tmp_path, 7, None):
        raise RuntimeError("a fault")


def test_a_batch_divides_among_the_processes():
    with pytest.raises(UserError, match="batch of 5 sequences does not divide among 2"):
        check_rows(5, World(torch.device("cpu"), 0, 2))
    check_rows(6, World(torch.device("cpu"), 0, 2))


def test_layers_are_the_longest_list_of_one_class(llama):
    assert layers(llama) == [*llama.model.layers]
    assert layers(nn.Linear(2, 2)) == []
