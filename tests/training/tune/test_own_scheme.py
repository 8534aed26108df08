"""What a fine-tune wrote has the scheme it was trained under as its own, whoever opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import longitude.hf as lh
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.extension.api import estimate
from longitude.extension.plan import ExtendOptions, TargetModel
from longitude.inspection.api import InspectOptions, inspect
from longitude.runtimes.api import ExportOptions, VerifyOptions, export, lint, verify
from longitude.training.tune.run import TuneOptions, fine_tune

REMAP = "rope(remap=leaky_rerope(128, 8))"
IDS = torch.arange(400)[None] * 7 % 256
CASES = {  # what is tuned, its scheme, what a patch gives, the same in full on the bare weights
    "drope": ({"recipe": "drope"}, "drope(256)", "temperature(2.0)", "nope()"),
    "remap": ({"scheme": REMAP}, REMAP, "logn(64)", f"{REMAP} + logn(64)"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, folder, tmp_path_factory) -> tuple[Path, str, str, str]:
    given, *schemes = CASES[request.param]
    out = tmp_path_factory.mktemp(request.param) / "run"
    sizes: Any = {"steps": 2, "batch": 2, "seq": 24, "lora": False, "device": "cpu"}
    tuned = fine_tune(
        "tiny-rope", "2x", TuneOptions(text=(str(folder),), out=out, **sizes, **given)
    )
    return Path(tuned.folder), *schemes


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def under(folder: Path, scheme: str) -> torch.Tensor:
    """The logits of the bare weights under a scheme."""
    bare = AutoModelForCausalLM.from_pretrained(folder).eval()
    with lh.patched(bare, scheme):
        return logits(bare)


def test_it_loads_runs_and_is_patched_from_its_own_scheme(case, capsys) -> None:
    folder, own, patch, full = case
    model, _ = lh.load(folder, device="cpu")
    assert f"under {own}, which it was saved with" in capsys.readouterr().err
    tuned = under(folder, own)
    torch.testing.assert_close(logits(model), tuned)
    assert dump(lh.scheme_of(model)) == own
    with lh.patched(model, patch):
        changed = logits(model)
    if full != "nope()":
        torch.testing.assert_close(changed, under(folder, full))
    else:  # without rotation an order of keys makes no difference; with one it would
        assert lh.scheme_of(model).layer(0).rotary is None
        assert not torch.allclose(changed, tuned, atol=1e-3)
    torch.testing.assert_close(logits(model), tuned, rtol=0, atol=0)
    lh.apply(model, patch)
    torch.testing.assert_close(logits(model), changed)
    lh.undo(model)
    torch.testing.assert_close(logits(model), tuned, rtol=0, atol=0)
    new = model.generate(IDS[:, :40], max_new_tokens=4, do_sample=False)
    assert new[0, 40] == logits(model)[0, 39].argmax()


def test_a_patch_on_top_is_saved_in_full(case, tmp_path) -> None:
    folder, own, patch, _ = case
    model, tokenizer = lh.load(folder, device="cpu", quiet=True)
    lh.apply(model, patch)
    if "drope" in own:  # by itself the text would get the configuration's rotation
        with pytest.raises(UserError, match=r"can't be saved on top of drope\(256\)"):
            lh.save(model, tmp_path, tokenizer)
        lh.apply(model, "drope(256, c=0.2)")
    lh.save(model, tmp_path, tokenizer)
    again, _ = lh.load(tmp_path, device="cpu", quiet=True)
    assert lh.scheme_of(again) == lh.scheme_of(model)
    torch.testing.assert_close(logits(again), logits(model))


def test_inspect_extend_and_lint_name_it(case) -> None:
    folder, own, *_ = case
    result = inspect(str(folder))
    first = result.encodings[0]
    assert first.scheme == own and first.kind == ("rope" if own == REMAP else "none")
    assert first.notes[0].startswith(f"it was saved under {own}, which is in force")
    assert own in result.table()
    with pytest.raises(UserError, match="leave --weights out"):
        inspect(str(folder), options=InspectOptions(weights=True))
    planned = estimate(str(folder), to="2x", options=ExtendOptions(device="cpu")).to_json()
    assert planned["scheme"] == own and planned["methods"][0] == "baseline"
    assert planned["trained"] == 512 and len(planned["methods"]) > 1
    (fault, *_) = lint(str(folder)).faults
    assert own in fault.sentence and fault.serious


def test_export_and_verify_run_it(case, tmp_path) -> None:
    folder, own, *_ = case
    made = export(str(folder), options=ExportOptions("transformers", out=tmp_path / "out"))
    assert made.exports[0].scheme == dump(parse(own)) and made.target == 512
    again, _ = lh.load(tmp_path / "out", device="cpu", quiet=True)
    torch.testing.assert_close(logits(again), under(folder, own))
    (proof,) = verify(str(folder), options=VerifyOptions("transformers")).proofs
    assert proof.holds and proof.rows


def test_a_rotation_is_not_put_back_where_it_was_dropped(case) -> None:
    folder, own, *_ = case
    if "drope" not in own:
        pytest.skip("it rotates")
    model, tokenizer = lh.load(folder, device="cpu", quiet=True)
    refused = r"trained without rotation, with drope\(256\), but got 'rope\(remap=rerope\(64\)\)'"
    with pytest.raises(UserError, match=refused), lh.patched(model, "rope(remap=rerope(64))"):
        pass
    assert TargetModel.of(model, tokenizer, "it").subject.family == "none"
    with pytest.raises(UserError, match="for models with rope positions"):
        fine_tune(str(folder), "2x", TuneOptions(recipe="yarn", steps=1, device="cpu"))
