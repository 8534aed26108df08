"""Processes that share the tokens of each sequence train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import longitude.hf as lh
from longitude.core.progress import silent
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import KIND, Measurement, from_row
from longitude.extension.result import STORE
from longitude.training import distributed
from longitude.training.api import tune
from longitude.training.checkpoint import HISTORY
from longitude.training.distributed import World, process_group
from longitude.training.tune import context
from longitude.training.tune.context import choose_context, split_for, step_bytes
from longitude.training.tune.evaluate import REPORT
from longitude.training.tune.recipes import Recipe
from longitude.training.tune.run import TuneOptions, fine_tune, tune_folder
from tests.hf.tiny import decoder
from tests.training.test_distributed import FORK
from tests.training.tune.test_parallel import BROKEN, PROGRAM, begin

SHARED = PROGRAM.replace("save_every=2", "save_every=2, context_parallel=int(sys.argv[5])")
BY_HEADS = SHARED.replace(
    "save_every=2", "save_every=2, context_parallel_by='auto', progress=lambda e: print(e.stage)"
)
# processes that are not told to share sequences, but one row of one process is too much
CHOSEN = """
import sys
from longitude.training import distributed
from longitude.training.tune import context
distributed.device_bytes = lambda device: int(sys.argv[5])
context.TOKENS_AT_ONCE = 24
""" + PROGRAM.replace("save_every=2", "save_every=2, progress=lambda e: print(e.stage)")
MEASURED = """
import sys
from longitude.training.api import tune
from longitude.training.tune.run import TuneOptions
text, out = sys.argv[1:3]
options = TuneOptions(recipe="yarn", text=(text,), steps=1, batch=2, seq=48, lr=1e-4, lora=False,
                      out=out, device="cpu", docs=1, tasks=("passkey",), questions=1,
                      context_parallel=2)
tune("tiny-rope", to="2x", options=options)
"""
LOST = BROKEN.format(ranks=[1], end="os._exit(9)") + SHARED


def losses(folder) -> torch.Tensor:
    return torch.tensor(json.loads((folder / HISTORY).read_text())["losses"])


def address(row: Measurement) -> tuple[object, ...]:
    return row.value["label"], row.key.measure, row.key.length, str(row.key.at)


def enough_for_two(monkeypatch) -> int:
    """Memory in which two processes hold a step of CHOSEN together, but not one."""
    monkeypatch.setattr(context, "TOKENS_AT_ONCE", 24)
    model, _ = lh.load("tiny-rope", device="cpu", dtype="float32")
    recipe, two = Recipe("own", "", "", trained="full", rows=4), World(torch.device("cpu"), 0, 2)
    needed = step_bytes(model, recipe, 48, 4, False, two)
    return int(distributed.SPARE * (needed(1) + needed(2)) / 2)


def test_two_processes_that_share_sequences_have_the_losses_of_one(folder, tmp_path, monkeypatch):
    options = TuneOptions(recipe="yarn", text=(str(folder),), steps=4, batch=4, seq=48, lr=1e-4,
                          lora=False, out=tmp_path / "1", save_every=2, device="cpu")  # fmt: skip
    fine_tune("tiny-rope", "2x", options)
    one = losses(tmp_path / "1")
    assert len(one) == 4
    said = {}
    for name, program in (("chosen", CHOSEN), ("heads", BY_HEADS), ("tokens", SHARED)):
        number = enough_for_two(monkeypatch) if name == "chosen" else 2
        ran = begin(FORK + program, 1, folder, tmp_path / name, 4, "full", number)
        assert ran.returncode == 0, ran.stderr
        torch.testing.assert_close(losses(tmp_path / name), one, rtol=0, atol=1e-4)
        said[name] = ran.stdout
    assert "context parallelism by heads: 6 heads, 6 of keys, over 2 ranks" in said["heads"]
    (line,) = said["chosen"].splitlines()
    assert line.startswith("48 tokens need about") and line.endswith(
        ": each text is split over 2 ranks"
    )


def test_processes_that_shared_sequences_share_the_texts_that_are_measured(folder, tmp_path):
    options = TuneOptions(recipe="yarn", text=(str(folder),), steps=1, batch=2, seq=48, lr=1e-4,
                          lora=False, out=tmp_path / "1", device="cpu", docs=1,
                          tasks=("passkey",), questions=1)  # fmt: skip
    one = tune("tiny-rope", to="2x", options=options).measured
    ran = begin(FORK + MEASURED, 1, folder, tmp_path / "2")
    assert ran.returncode == 0, ran.stderr
    with Store(tmp_path / "2" / REPORT / STORE) as store:
        two = [from_row(row) for row in store.rows(kind=KIND)]
    assert {row.value["machine"].partition(":")[0] for row in two} == {"2 ranks"}
    found, wanted = ({address(r): r.value.get("loss") for r in rows} for rows in (two, one.rows))
    assert found.keys() == wanted.keys() and any(wanted.values())
    for key, loss in wanted.items():
        assert found[key] == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
def test_four_processes_share_sequences_in_pairs(folder, tmp_path):
    for processes, shared in ((1, 1), (4, 2)):
        out = tmp_path / str(processes)
        ran = begin(SHARED, processes, folder, out, 5, "full", shared)
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
    return split_for(config, parse(scheme), "bfloat16", by, world, silent)


def test_auto_takes_what_sends_fewer_bytes_and_can_run():
    assert chosen("tokens", 8, 8, 4) == "tokens" and chosen("heads", 8, 8, 4) == "heads"
    assert chosen("auto", 32, 8, 8) == "heads"  # 2·2·40/8 = 20 bytes for 8·8 = 64
    assert chosen("auto", 32, 2, 2) == "tokens"  # 68 for 16: many queries, few keys
    assert chosen("auto", 6, 6, 4) == "tokens"  # heads don't divide
    assert chosen("auto", 8, 8, 4, "rope() + alibi()") == "tokens"  # a term of its own per head


def test_the_memory_of_a_step_is_that_of_its_parts():
    model, cpu = decoder("llama"), torch.device("cpu")
    config, weights = model.config, sum(p.numel() for p in model.parameters())
    layer = 4 * (9 * config.hidden_size + 4 * config.intermediate_size)
    token = config.num_hidden_layers * layer + max(layer, 8 * config.vocab_size)
    full = Recipe("own", "", "", trained="full", rows=4)
    alone = step_bytes(model, full, 4096, 4, False, World(cpu))
    assert alone(1) == 16 * weights + 4 * 4096 * token
    four = step_bytes(model, full, 65536, 4, False, World(cpu, 0, 4))
    # 32,768 tokens go through the model at once: of a row each, of half of one, of two quarters
    assert four(1) - four(2) == 32768 * token and four(2) == four(4)
    assert four(1) - 65536 * token < 16 * weights, "the rest is sharded"
    stored = step_bytes(model, full, 4096, 4, True, World(cpu))
    assert stored(1) < alone(1), "checkpointing stores less"
    lora = Recipe("own", "", "", trained="lora", rows=4)
    assert step_bytes(model, lora, 4096, 4, False, World(cpu))(1) < alone(1)


def test_the_memory_of_activations_is_what_a_backward_keeps():
    model, kept = decoder("llama"), {}
    fixed = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # each is kept, and counted once
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model.base_model(torch.arange(128)[None] % 8, use_cache=False)[0]
    assert out.requires_grad
    counted = sum(s.nbytes() for at, s in kept.items() if at not in fixed)
    recipe = Recipe("own", "", "", trained="full", rows=1)
    one = World(torch.device("cpu"))
    need = step_bytes(model, recipe, 128, 4, False, one)(1)
    need -= step_bytes(model, recipe, 0, 4, False, one)(1)
    assert 0.7 < counted / need < 1, "one layer's more, for its gradients"


def test_the_memory_of_a_step_is_about_what_was_recorded():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    with torch.device("meta"):  # SmolLM2-135M
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    lines = (Path(__file__).parents[3] / "docs/results/tune.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row.get("kind") == "step"]
    assert len(steps) >= 8
    for row in steps:  # 32,768 tokens each
        recipe = Recipe("own", "", "", trained="full", rows=32768 // row["length"])
        again, one = row["model"].endswith("run again"), World(torch.device("cpu"))
        need = step_bytes(model, recipe, row["length"], 2, again, one)(1)
        assert need == pytest.approx(row["peak"], rel=0.1)


def test_the_fewest_processes_that_hold_a_step_share_a_sequence(monkeypatch):
    model, world = decoder("llama"), World(torch.device("cpu"), 0, 4)
    recipe = Recipe("own", "", "", trained="full", rows=4)
    needed = step_bytes(model, recipe, 2**17, 4, False, world)
    for has, ranks in ((needed(1), 1), (needed(2), 2), (needed(4), 4), (1, 4)):
        monkeypatch.setattr(distributed, "device_bytes", lambda device, has=has: 1.2 * has)
        found, said = choose_context(model, recipe, 2**17, "float32", False, world)
        assert found == ranks and said.startswith("131,072 tokens need about ") == (ranks > 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    grouped = Recipe("own", "", "", trained="full", rows=4, groups=0.25)
    hybrid = decoder("qwen3_next")
    for one in ((model, grouped), (hybrid, recipe)):
        found, said = choose_context(*one, 2**17, "float32", False, world)
        assert found == 1 and said.endswith("memory may run out"), "they can't be shared"


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
