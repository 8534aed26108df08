"""Several processes: what they train together is what one would train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longitude.cli.main import run as here
from longitude.core.validate import UserError
from longitude.training.checkpoint import HISTORY
from longitude.training.distributed import World, layers
from longitude.training.lab.run import MODEL
from tests.processes import python

SMALL = (
    "train", "--length", "32", "--size", "nano", "--steps", "6", "--batch", "8", "--device", "cpu",
)  # fmt: skip
ONE = """
from longitude.cli.main import main
main()
"""
SHARDED = f"""
import longitude.training.distributed as distributed
distributed.SHARDED_FROM = 0  # small models too
{ONE}"""
# two processes as torchrun starts them
FORK = """
import os, socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
os.environ["RANK"] = "0" if os.fork() else "1"
"""


def run(
    folder: Path, out: Path, processes: int, *more: str, program: str, command: str = "train"
) -> None:
    """`longitude train` in some processes, begun by a program."""
    given = ["-c", program, command, *SMALL[1:], "--text", str(folder), "--out", str(out), *more]
    if processes == 1:
        python(*given).check_returncode()
        return
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    begin = [sys.executable, *launch, "--no-python", sys.executable, *given]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(begin, env=env, check=True, timeout=300)


@pytest.mark.parametrize(
    ("scheme", "tasks", "program"),
    [("randomized(128) + rope()", "text,copy", ONE), ("t5()", "text", SHARDED)],
    ids=["copied", "sharded"],
)
def test_two_processes_train_what_one_does(folder, tmp_path, scheme, tasks, program):
    settings = ("--scheme", scheme, "--tasks", tasks)
    assert here([*SMALL, "--text", str(folder), "--out", str(tmp_path / "one"), *settings]) == 0
    run(folder, tmp_path / "two", 1, *settings, program=FORK + program)
    one, two = (
        torch.tensor(json.loads((tmp_path / name / HISTORY).read_text())["losses"])
        for name in ("one", "two")
    )
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    a, b = (load_file(tmp_path / name / MODEL) for name in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-3)


# all processes stop after their third step, with the state kept
STOPPED = SHARDED.replace(
    "main()",
    """
import longitude.training.lab.run as runs
from longitude.training.checkpoint import RunFolder
from longitude.training.loop import Stopped
runs.SYNC_STEPS, save = 1, RunFolder.save
def save_and_stop(self, step, *rest):
    save(self, step, *rest)
    if step == 3:
        raise Stopped(step)
RunFolder.save = save_and_stop
main()
""",
)


@pytest.mark.slow
@pytest.mark.parametrize("program", [SHARDED, ONE], ids=["sharded", "one"])
def test_a_sharded_run_goes_on_from_its_state_however_many_go_on(folder, tmp_path, program):
    settings = ("--scheme", "rope()", "--resume")
    run(folder, tmp_path / "straight", 2, *settings, program=SHARDED)
    with pytest.raises(subprocess.CalledProcessError):
        run(folder, tmp_path / "stopped", 2, *settings, "--every", "0", program=STOPPED)
    assert not (tmp_path / "stopped" / MODEL).exists()
    run(folder, tmp_path / "stopped", 2 if program == SHARDED else 1, *settings, program=program)
    a, b = (load_file(tmp_path / name / MODEL) for name in ("straight", "stopped"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-3)


@pytest.mark.slow
def test_a_lab_of_two_processes_has_the_rows_of_one(folder, tmp_path):
    settings = ("--schemes", "rope(); alibi()", "--test", "32,64", "--excerpts", "2")
    for name, processes in (("one", 1), ("two", 2)):
        run(folder, tmp_path / name, processes, *settings, program=ONE, command="lab")
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [row["key"] for row in one] == [row["key"] for row in two] and len(one) == 4
    for a, b in zip(one, two, strict=True):
        assert a["value"]["value"] == pytest.approx(b["value"]["value"], abs=1e-3)


def test_a_batch_divides_among_the_processes():
    with pytest.raises(UserError, match="batch of 5 sequences does not divide among 2"):
        World(torch.device("cpu"), 0, 2).check_batch(5)
    World(torch.device("cpu"), 0, 2).check_batch(6)


def test_layers_are_the_longest_list_of_one_class(llama):
    assert layers(llama) == [*llama.model.layers]
    assert layers(torch.nn.Linear(2, 2)) == []
