"""Processes that share the tokens of each sequence train what one process trains."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.training.checkpoint import HISTORY
from longitude.training.distributed import World, process_group
from longitude.training.tune.run import TuneOptions, fine_tune, split_for, tune_folder
from tests.training.test_distributed import FORK
from tests.training.tune.test_parallel import BROKEN, PROGRAM, begin

SHARED = PROGRAM.replace("save_every=2", "save_every=2, context_parallel=int(sys.argv[5])")
BY_HEADS = SHARED.replace(
    "save_every=2", "save_every=2, context_parallel_by='auto', progress=lambda e: print(e.stage)"
)
LOST = BROKEN.format(ranks=[1], end="os._exit(9)") + SHARED


def losses(folder) -> torch.Tensor:
    return torch.tensor(json.loads((folder / HISTORY).read_text())["losses"])


def test_two_processes_that_share_sequences_have_the_losses_of_one(folder, tmp_path):
    options = TuneOptions(recipe="yarn", text=(str(folder),), steps=8, batch=4, seq=48, lr=1e-4,
                          lora=False, out=tmp_path / "1", save_every=2, device="cpu")  # fmt: skip
    fine_tune("tiny-rope", "2x", options)
    one = losses(tmp_path / "1")
    assert len(one) == 8
    for name, program in (("tokens", SHARED), ("heads", BY_HEADS)):
        ran = begin(FORK + program, 1, folder, tmp_path / name, 8, "full", 2)
        assert ran.returncode == 0, ran.stderr
        torch.testing.assert_close(losses(tmp_path / name), one, rtol=0, atol=1e-4)
    assert "context parallelism by heads: 6 heads, 6 of keys, over 2 ranks" in ran.stdout


@pytest.mark.slow
def test_four_processes_share_sequences_in_pairs(folder, tmp_path):
    for processes, context in ((1, 1), (4, 2)):
        out = tmp_path / str(processes)
        ran = begin(SHARED, processes, folder, out, 5, "full", context)
        assert ran.returncode == 0, ran.stderr
    one, four = (losses(tmp_path / name) for name in ("1", "4"))
    torch.testing.assert_close(one, four, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_lost_process_ends_the_other_and_the_run_continues(folder, tmp_path):
    lost = begin(LOST, 2, folder, tmp_path / "run", 6, "full", 2)
    assert lost.returncode != 0 and tune_folder(tmp_path / "run").saved_step == 2
    said = [line for line in lost.stderr.splitlines() if "UserError" in line or "RankLost" in line]
    assert any("does not answer" in line or "process was lost" in line for line in said), said
    assert begin(SHARED, 2, folder, tmp_path / "run", 6, "full", 2).returncode == 0
    assert begin(SHARED, 1, folder, tmp_path / "one", 6, "full", 1).returncode == 0
    torch.testing.assert_close(
        losses(tmp_path / "run"), losses(tmp_path / "one"), rtol=0, atol=1e-4
    )


def chosen(by: str, heads: int, key_heads: int, ranks: int, scheme: str = "rope()") -> str:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    world = World(torch.device("cpu"), 0, ranks, context=ranks)
    options = TuneOptions(context_parallel_by=by)
    return split_for(config, parse(scheme), "bfloat16", options, world)


def test_auto_takes_what_sends_fewer_bytes_and_can_run():
    assert chosen("tokens", 8, 8, 4) == "tokens" and chosen("heads", 8, 8, 4) == "heads"
    assert chosen("auto", 32, 8, 8) == "heads"  # 2·2·40/8 = 20 bytes for 8·8 = 64
    assert chosen("auto", 32, 2, 2) == "tokens"  # 68 for 16: many queries, few keys
    assert chosen("auto", 6, 6, 4) == "tokens"  # heads don't divide
    assert chosen("auto", 8, 8, 4, "rope() + alibi()") == "tokens"  # a term of its own per head


def test_what_cant_be_shared_is_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="--context-parallel 3 does not divide 4 processes"):
        with process_group("cpu", 3):
            pass
    with pytest.raises(UserError, match="--context-parallel-by is tokens, heads, auto, but got"):
        TuneOptions(context_parallel_by="rows")
    with pytest.raises(UserError, match="6 query heads and 6 key heads can't be split over 4"):
        chosen("heads", 6, 6, 4)
    pair = World(torch.device("cpu"), 3, 4, context=2)
    assert pair.rows == (1, 2)
    with pytest.raises(UserError, match="of which 2 share a sequence: make it a multiple of 2"):
        pair.check_batch(3)
