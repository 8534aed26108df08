"""A whole run: from the question to a folder that opens, whatever happens on the way."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pytest
import torch

from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.hf.loading import load
from longitude.hf.patch import apply, scheme_of
from longitude.training import checkpoint
from longitude.training.tune.options import HISTORY, QUESTION, STATE, Asked
from longitude.training.tune.pipeline import run
from longitude.training.tune.resume import kept_step


@pytest.fixture
def asked(folder, tmp_path):
    return Asked(
        to="2x", recipe="yarn", text=(str(folder),), steps=4, rows=2, length=24, trained="full",
        out=str(tmp_path / "run"), save_every=2, device="cpu", quiet=True,
    )  # fmt: skip


def weights_of(tuned):
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    return model.state_dict()


def test_it_learns_and_the_result_opens(asked, tmp_path):
    told = []
    tuned = run(replace(asked, steps=12, rate=1e-3), told.append)
    assert [step.step for step in told] == list(range(1, 13))
    assert told[-1].left == 0 < told[-1].tokens_per_second
    assert sum(tuned.losses[-3:]) < sum(tuned.losses[:3])
    model, tokenizer = load(tuned.folder, device="cpu", quiet=True)
    assert dump(scheme_of(model)) == tuned.scheme == "rope(frequencies=yarn(2, original=256))"
    assert tokenizer is not None and model.config.max_position_embeddings == tuned.target == 512
    json.dumps(tuned.plain())
    history = json.loads((tmp_path / "run" / HISTORY).read_text())
    assert tuple(history["losses"]) == tuned.losses and len(tuned.losses) == 12


def test_a_finished_run_is_not_run_again(asked):
    first = run(asked)
    assert run(asked, lambda step: pytest.fail("it trains again")) == first


def test_stopped_and_resumed_equals_undisturbed(asked, tmp_path):
    class Killed(Exception):
        pass

    def kill(step):
        if step.step == 3:  # past the state of step 2
            raise Killed

    with pytest.raises(Killed):
        run(asked, kill)
    assert kept_step(tmp_path / "run") == 2
    told = []
    resumed = run(asked, told.append)
    assert [step.step for step in told] == [3, 4]
    whole = run(replace(asked, out=str(tmp_path / "whole")))
    assert resumed.losses == whole.losses
    a, b = weights_of(resumed), weights_of(whole)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_full_disk_leaves_the_last_state_and_says_how_to_go_on(asked, tmp_path, monkeypatch):
    write, count = checkpoint.save_file, []

    def full(state, path, **more):
        count.append(path)
        if len(count) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path, **more)

    monkeypatch.setattr(checkpoint, "save_file", full)
    asked = replace(asked, steps=6)
    with pytest.raises(UserError, match=r"No space left.*state of step 2 is whole.*same command"):
        run(asked)
    assert kept_step(tmp_path / "run") == 2
    assert {f.name for f in (tmp_path / "run").iterdir()} == {QUESTION, STATE}
    assert len(run(asked).losses) == 6


def test_another_question_in_the_same_folder_is_refused(asked, tmp_path):
    run(asked)
    with pytest.raises(UserError, match="its seed is 0, not 1"):
        run(replace(asked, seed=1))
    with pytest.raises(UserError, match="its steps is 4, not 5"):
        run(replace(asked, steps=5))
    with pytest.raises(UserError, match="this very run already"):
        run(replace(asked, resume=False))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(UserError, match="other files and no run"):
        run(replace(asked, out=str(tmp_path / "other")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "--steps must be above zero, but got 0"),
        ({"to": "256"}, "trained to 256: it reads that already"),
        ({"recipe": "alibi"}, "alibi is for models with alibi positions"),
        ({"recipe": "nothing"}, "no recipe is called"),
        ({"length": 513}, "reach past --to"),
        ({"to": "1000x", "length": 200_000}, "one sequence takes 200,001"),
        ({"save_every": 0}, "--save-every counts steps from 1"),
        ({"dtype": "int8"}, "--dtype is auto, float32 or bfloat16"),
        ({"scheme": "hierarchical(256)"}, "belongs before a model's first layer"),
    ],
)
def test_bad_input_is_told_before_any_work(asked, tmp_path, wrong, said):
    with pytest.raises(UserError, match=said):
        run(replace(asked, **wrong), lambda step: pytest.fail("it trains"))
    assert not (tmp_path / "run").exists()


def test_the_table_grows_and_learns(asked):
    tuned = run(replace(asked, model="tiny-learned", recipe="learned", rate=1e-3))
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert model.config.n_positions == 512
    base, _ = load("tiny-learned", device="cpu", quiet=True)
    apply(base, "hierarchical(256)")
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, base(ids).logits)
    assert model(torch.arange(400)[None] % 256).logits.shape[1] == 400


def test_alibi_trains_on_longer_text_with_its_own_slopes(asked):
    tuned = run(replace(asked, model="tiny-alibi", recipe="alibi"))
    assert tuned.scheme == "alibi()" and tuned.kind == "checkpoint"
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    assert model.config.seq_length == 512


@pytest.mark.parametrize("recipe", ["longlora", "pose"])
def test_an_adapter_opens_as_it_was_trained(asked, recipe, monkeypatch):
    """The file gives the model that was trained, embeddings and norms included."""
    pytest.importorskip("peft")
    import longitude.training.tune.pipeline as room

    kept, keep = [], room._keep
    monkeypatch.setattr(
        room, "_keep", lambda made, job, *rest: (keep(made, job, *rest), kept.append(job))
    )
    tuned = run(replace(asked, recipe=recipe, trained="lora", checkpointing=True))
    assert tuned.kind == "adapter" and tuned.weights["trained"] < tuned.weights["all"]
    model, _ = load(tuned.folder, device="cpu", quiet=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        trained, opened = kept[0].reader.model(ids).logits, model(ids).logits
        base = load("tiny-rope", device="cpu", quiet=True)[0]
        apply(base, tuned.scheme)
        torch.testing.assert_close(opened, trained, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(opened, base(ids).logits, atol=1e-3)
