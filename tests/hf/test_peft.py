"""An adapter comes back with its scheme, on its own base and on no other."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude import UserError
from longitude.core.text import dump
from longitude.hf.loading import without_weights
from longitude.hf.peft import check_base, read_adapter
from tests.hf.adapters import with_lora
from tests.hf.tiny import WINDOW, decoder

pytest.importorskip("peft")
IDS = torch.arange(2 * WINDOW)[None] * 7 % 97
REMAP = "rope(remap=leaky_rerope(16, 8))"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    lh.save(decoder("llama"), tmp_path / "base")
    return tmp_path / "base"


def saved(base: Path, folder: Path, scheme: str | None = REMAP) -> torch.Tensor:
    """Save an adapter of a base; what its model says."""
    model, _ = lh.load(base, quiet=True)
    made = with_lora(model).eval()
    if scheme:
        lh.apply(made.get_base_model(), scheme)
    said = logits(made)
    lh.save_adapter(made, folder, str(base), target=8 * WINDOW)
    return said


def test_it_comes_back_with_its_scheme(base: Path, tmp_path: Path) -> None:
    said = saved(base, tmp_path / "adapter")
    again, _ = lh.load(tmp_path / "adapter", quiet=True)
    torch.testing.assert_close(logits(again), said, rtol=1e-4, atol=1e-4)
    assert "leaky_rerope(16, 8)" in dump(lh.scheme_of(again))
    lh.undo(again)
    assert not torch.allclose(logits(again), said, atol=1e-2)


def test_its_window_is_the_length_it_was_trained_for(base: Path, tmp_path: Path) -> None:
    saved(base, tmp_path / "adapter")
    assert without_weights(base)[0] == WINDOW
    assert without_weights(tmp_path / "adapter")[0] == 8 * WINDOW
    model, _ = lh.load(tmp_path / "adapter", quiet=True)
    with lh.stream(model, window=4 * WINDOW) as stream:  # refused past the window
        assert len(stream.score(IDS[0])) == len(IDS[0]) - 1


def test_merged_and_saved_it_is_a_checkpoint(base: Path, tmp_path: Path) -> None:
    said = saved(base, tmp_path / "adapter")
    model, _ = lh.load(tmp_path / "adapter", quiet=True)
    lh.save(model, tmp_path / "whole")
    again, _ = lh.load(tmp_path / "whole", quiet=True)
    torch.testing.assert_close(logits(again), said, rtol=1e-4, atol=1e-4)


def test_the_rope_configuration_lies_beside_it(base: Path, tmp_path: Path) -> None:
    saved(base, tmp_path / "adapter")
    held = json.loads((tmp_path / "adapter" / "longitude.json").read_text())
    assert held["scheme"] == REMAP and held["target"] == 8 * WINDOW
    assert held["base"]["name"] == str(base.resolve())
    assert {f.name for f in tmp_path.iterdir()} == {"base", "adapter"}  # nothing half written


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    saved(base, tmp_path / "adapter")
    other = decoder("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    lh.save(other, tmp_path / "other")
    with pytest.raises(UserError, match=r"was trained on .*base, but .*other has other weights"):
        lh.load(tmp_path / "adapter", base=str(tmp_path / "other"), quiet=True)
    shutil.rmtree(base)
    lh.save(other, base)  # or the same name, and other weights under it
    with pytest.raises(UserError, match="has other weights"):
        lh.load(tmp_path / "adapter", quiet=True)


def test_a_base_that_was_moved_or_rounded_is_the_same(base: Path, tmp_path: Path) -> None:
    said = saved(base, tmp_path / "adapter")
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="its base can't be found"):
        lh.load(tmp_path / "adapter", quiet=True)
    moved = str(tmp_path / "elsewhere")
    again, _ = lh.load(tmp_path / "adapter", base=moved, quiet=True)
    torch.testing.assert_close(logits(again), said, rtol=1e-4, atol=1e-4)
    rounded, _ = lh.load(moved, quiet=True)
    check_base(rounded.bfloat16(), read_adapter(tmp_path / "adapter"))  # raises if it is another


def test_without_a_scheme_it_reads_with_its_bases(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = saved(base, tmp_path / "adapter", None)
    (tmp_path / "adapter" / "longitude.json").unlink()
    again, _ = lh.load(tmp_path / "adapter")
    torch.testing.assert_close(logits(again), said, rtol=1e-4, atol=1e-4)
    assert "names no scheme: the base's is used" in capsys.readouterr().err


def test_a_model_that_is_no_adapter_has_no_base(base: Path) -> None:
    with pytest.raises(UserError, match="is no adapter"):
        lh.load(base, base="tiny-rope", quiet=True)


def test_an_adapter_of_another_shape_is_refused(base: Path, tmp_path: Path) -> None:
    saved(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "longitude.json").unlink()
    with pytest.raises(UserError, match="does not fit tiny-rope"):
        lh.load(tmp_path / "adapter", base="tiny-rope", quiet=True)
