"""A fine-tune: from its options to a folder that opens, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.hf.loading import load
from longitude.hf.patch import apply, scheme_of
from longitude.training import checkpoint
from longitude.training.checkpoint import HISTORY, STATE
from longitude.training.loop import Stopped
from longitude.training.tune.run import (
    QUESTION,
    Tuned,
    TuneOptions,
    fine_tune,
    make_trainable_model,
    prepare,
    tune_folder,
)
from tests.training.conftest import CPU


@pytest.fixture
def options(folder, tmp_path):
    return TuneOptions(
        recipe="yarn", text=(str(folder),), steps=4, batch=2, seq=24, lora=False,
        out=tmp_path / "run", save_every=2, device="cpu",
    )  # fmt: skip


def run(options: TuneOptions, report=lambda step: None, model: str = "tiny-rope", to: str = "2x"):
    return fine_tune(model, to, options, report)


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory) -> tuple[TuneOptions, Tuned]:
    """Four steps of YaRN, all weights: what several tests compare with."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    options = TuneOptions(
        recipe="yarn", text=(str(folder),), steps=4, batch=2, seq=24, lora=False, out=out,
        save_every=2, device="cpu",
    )  # fmt: skip
    return options, run(options)


def weights_of(tuned: Tuned) -> dict[str, Any]:
    return load(tuned.folder, device="cpu", quiet=True)[0].state_dict()


def test_it_learns_and_the_result_opens(options, tmp_path):
    steps = []
    tuned = run(replace(options, steps=12, lr=1e-3), steps.append)
    assert [step.step for step in steps] == list(range(1, 13))
    assert steps[-1].left == 0 < steps[-1].tokens_per_second
    assert sum(tuned.losses[-3:]) < sum(tuned.losses[:3])
    model, tokenizer = load(tuned.folder, device="cpu", quiet=True)
    assert dump(scheme_of(model)) == tuned.scheme == "rope(frequencies=yarn(2, original=256))"
    assert tokenizer is not None and model.config.max_position_embeddings == tuned.target == 512
    history = json.loads((tmp_path / "run" / HISTORY).read_text())
    assert tuple(history["losses"]) == tuned.losses and len(tuned.losses) == 12


def test_a_finished_run_is_not_run_again(undisturbed):
    options, tuned = undisturbed
    assert run(options, lambda step: pytest.fail("it trains again")) == tuned


def test_killed_and_resumed_equals_undisturbed(options, tmp_path, undisturbed):
    class Killed(Exception):
        pass

    def kill(step):
        if step.step == 3:  # past the state of step 2
            raise Killed

    with pytest.raises(Killed):
        run(options, kill)
    assert tune_folder(tmp_path / "run").saved_step == 2
    steps = []
    resumed = run(options, steps.append)
    assert [step.step for step in steps] == [3, 4]
    _, straight = undisturbed
    assert resumed.losses == straight.losses
    a, b = weights_of(resumed), weights_of(straight)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_stop_request_saves_the_state_of_its_step(options, tmp_path):
    def stop(step):
        if step.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="1"):
        run(options, stop)
    assert tune_folder(tmp_path / "run").saved_step == 1


def test_a_full_disk_leaves_the_last_state_and_says_how_to_resume(options, tmp_path, monkeypatch):
    write, count = checkpoint.save_file, []

    def full(state, path, **more):
        count.append(path)
        if len(count) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path, **more)

    monkeypatch.setattr(checkpoint, "save_file", full)
    options = replace(options, steps=6)
    with pytest.raises(UserError, match=r"No space left.*state of step 2 is saved.*same command"):
        run(options)
    assert tune_folder(tmp_path / "run").saved_step == 2
    assert {f.name for f in (tmp_path / "run").iterdir()} == {QUESTION, STATE}
    assert len(run(options).losses) == 6


def test_another_question_in_the_same_folder_is_refused(undisturbed, tmp_path):
    options, _ = undisturbed
    with pytest.raises(UserError, match="its seed is 0, not 1"):
        run(replace(options, seed=1))
    with pytest.raises(UserError, match="its steps is 4, not 5"):
        run(replace(options, steps=5))
    with pytest.raises(UserError, match="this very run, which is done"):
        run(replace(options, resume=False))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(UserError, match="other files and no run"):
        run(replace(options, out=tmp_path / "other"))


@pytest.mark.parametrize(
    ("wrong", "to", "message"),
    [
        ({"steps": 0}, "2x", "--steps must be above zero, but got 0"),
        ({}, "256", "trained to 256: it already covers that"),
        ({"recipe": "alibi"}, "2x", "alibi is for models with alibi positions"),
        ({"recipe": "nothing"}, "2x", "no recipe is called"),
        ({"seq": 513}, "2x", "reach past --to"),
        ({"seq": 200_000}, "1000x", "one sequence takes 200,001"),
        ({"save_every": 0}, "2x", "--save-every counts steps from 1"),
        ({"dtype": "int8"}, "2x", "--dtype is auto, float32 or bfloat16"),
        ({"scheme": "hierarchical(256)"}, "2x", "acts before the first layer"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, tmp_path, wrong, to, message):
    with pytest.raises(UserError, match=message):
        run(replace(options, **wrong), lambda step: pytest.fail("it trains"), to=to)
    assert not (tmp_path / "run").exists()


def test_the_table_grows_and_learns(options):
    tuned = run(replace(options, recipe="learned", lr=1e-3), model="tiny-learned")
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert model.config.n_positions == 512
    base, _ = load("tiny-learned", device="cpu", quiet=True)
    apply(base, "hierarchical(256)")
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, base(ids).logits)
    assert model(torch.arange(400)[None] % 256).logits.shape[1] == 400


@pytest.mark.parametrize("recipe", ["e2_llm", "cream"])
def test_drawn_positions_train_a_checkpoint_that_interpolates(options, recipe):
    tuned = run(replace(options, recipe=recipe, steps=8, lr=1e-3))
    assert sum(tuned.losses[-2:]) < sum(tuned.losses[:2])
    assert tuned.scheme == "rope(frequencies=linear(2))"


def test_mixed_windows_learn_and_stock_transformers_reads_the_factors(options):
    tuned = run(replace(options, recipe="longrope2", steps=8, lr=1e-3, seq=512, batch=1))
    assert sum(tuned.losses[-2:]) < sum(tuned.losses[:2])
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert dump(scheme_of(model)) == tuned.scheme and "longrope" in tuned.scheme
    stated = json.loads((Path(tuned.folder) / "config.json").read_text())["rope_parameters"]
    assert (stated["rope_type"], set(stated["short_factor"])) == ("longrope", {1.0})


def test_drope_learns_without_its_rotation_and_is_exported(options, tmp_path):
    """The result opens without rotation; lint says that stock runtimes would rotate, and an export
    with one β does not."""
    from longitude.runtimes.api import ExportOptions, export, lint

    tuned = run(replace(options, recipe="drope", steps=8))
    assert sum(tuned.losses[-2:]) < sum(tuned.losses[:2]) and tuned.scheme == "drope(256)"
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert scheme_of(model).layer(0).rotary is None
    (fault, *_) = lint(tuned.folder).faults
    assert fault.name == "scheme beyond settings" and "drope(256, length=512)" in fault.sentence
    with pytest.raises(UserError, match="each query's own"):
        export(tuned.folder, options=ExportOptions("sglang"))
    fixed = ExportOptions("sglang,mlx", scheme="drope(256, length=512)", out=tmp_path / "served")
    made = export(tuned.folder, options=fixed).exports
    assert "long_factor" in str(made[0].text) and "1e+30" in str(made[0].text)
    assert made[0].target is not None
    assert made[0].target.attention ** 2 == pytest.approx(1 + 0.103 * math.log(2))


def test_alibi_trains_on_longer_text_with_its_own_slopes(options):
    tuned = run(replace(options, recipe="alibi", steps=2), model="tiny-alibi")
    assert tuned.scheme == "alibi()" and tuned.kind == "checkpoint"
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert model.config.seq_length == 512


@pytest.mark.parametrize("recipe", ["longlora", "pose"])
def test_an_adapter_opens_as_it_was_trained(options, recipe, monkeypatch):
    """The file gives the model that was trained, embeddings and norms included."""
    pytest.importorskip("peft")
    import longitude.training.tune.run as module

    trained, make = [], module.make_trainable_model
    monkeypatch.setattr(
        module,
        "make_trainable_model",
        lambda prepared: trained.append(make(prepared)) or trained[-1],
    )
    tuned = run(replace(options, recipe=recipe, lora=True, checkpointing=True))
    assert tuned.kind == "adapter" and tuned.weights["trained"] < tuned.weights["all"]
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        in_memory, opened = trained[0][0].model(ids).logits, model(ids).logits
        base = load("tiny-rope", device="cpu", quiet=True)[0]
        apply(base, tuned.scheme)
        torch.testing.assert_close(opened, in_memory, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(opened, base(ids).logits, atol=1e-3)


SCHEMES = ["rope(remap=leaky_rerope(4, 8))", "rope(frequencies=yarn(2, original=256))"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("scheme", SCHEMES, ids=["ours", "stock"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_in_bfloat16_is_near_the_one_in_float32(options, scheme, lora):
    """What learns is held in float32 all the same."""
    if lora:
        pytest.importorskip("peft")
    options = replace(options, scheme=scheme, steps=1, batch=1, seq=8, lora=lora)
    losses = []
    for dtype in ("float32", "bfloat16"):
        given = replace(options, dtype=dtype, out=options.out / dtype)
        loss, _, _ = make_trainable_model(prepare("tiny-rope", "2x", given, CPU))
        assert {p.dtype for p in loss.parameters() if p.requires_grad} == {torch.float32}
        losses += run(given).losses
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
