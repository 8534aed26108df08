"""What is saved comes back: weights, tokenizer and the scheme that was applied."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import longitude.hf as lh
from longitude import UserError
from longitude.hf import save as _save  # the function, whatever was imported before
from tests.hf.tiny import WINDOW, decoder

IDS = torch.arange(2 * WINDOW)[None] * 7 % 97
REMAP = "rope(remap=leaky_rerope(16, 8))"
YARN = f"rope(frequencies=yarn(4, original={WINDOW}))"


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def equal(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_the_names_are_functions_whichever_was_imported_first() -> None:
    import longitude.hf.loading
    import longitude.hf.saving

    assert callable(lh.load) and lh.save is longitude.hf.save is _save
    assert {"apply", "load", "patched", "save", "scheme_of", "stream", "undo"} <= set(dir(lh))
    with pytest.raises(AttributeError, match="it has"):
        lh.telepathy  # noqa: B018


def test_a_model_as_it_is(tmp_path: Path) -> None:
    model, tokenizer = lh.load("tiny-rope", dtype="float32", quiet=True)
    lh.save(model, tmp_path / "out", tokenizer)
    assert "longitude" not in config(tmp_path / "out")
    again, theirs = lh.load(tmp_path / "out", quiet=True)
    equal(logits(again), logits(model))
    assert theirs is not None and tokenizer is not None
    assert theirs("Longitude").input_ids == tokenizer("Longitude").input_ids
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("scheme", [REMAP, YARN, f"{REMAP[:-1]}) + logn({WINDOW})"])
def test_a_scheme_comes_back_and_can_be_undone(tmp_path: Path, scheme: str) -> None:
    model = decoder("llama")
    stock = logits(model)
    lh.apply(model, scheme)
    patched = logits(model)
    lh.save(model, tmp_path)
    equal(logits(model), patched)  # the model in hand is still patched
    assert config(tmp_path)["longitude"]["scheme"] == scheme
    again, _ = lh.load(tmp_path, quiet=True)
    assert lh.scheme_of(again) == lh.scheme_of(model)
    assert not hasattr(again.config, "longitude")
    torch.testing.assert_close(logits(again), patched)
    lh.undo(again)
    torch.testing.assert_close(logits(again), stock)
    lh.undo(model)
    lh.save(model, tmp_path)
    assert "longitude" not in config(tmp_path)


def test_a_target_is_there_when_the_folder_is(tmp_path: Path, monkeypatch: Any) -> None:
    """A kill after config.json is in its place finds nothing left to write."""
    model = decoder("llama")
    lh.apply(model, YARN)
    moved: list[dict[str, Any]] = []
    replace = Path.replace

    def watched(self: Path, to: Path) -> Path:
        done = replace(self, to)
        moved.extend([config(tmp_path)] if to.name == "config.json" else [])
        return done

    monkeypatch.setattr(Path, "replace", watched)
    lh.save(model, tmp_path, target=4 * WINDOW)
    assert [each["longitude"]["target"] for each in moved] == [4 * WINDOW]
    lh.undo(model)


def test_length_and_force_come_back(tmp_path: Path) -> None:
    model = decoder("llama")
    scheme = f"rope(pairs='adjacent', frequencies=dynamic_ntk({WINDOW}))"
    lh.apply(model, scheme, length=4 * WINDOW, force=True)
    lh.save(model, tmp_path)
    entry = config(tmp_path)["longitude"]
    assert entry["length"] == 4 * WINDOW and entry["force"] is True
    assert config(tmp_path)["rope_parameters"]["rope_type"] == "default"  # its pairs have no name
    torch.testing.assert_close(logits(lh.load(tmp_path, quiet=True)[0]), logits(model))


def test_stock_transformers_honours_what_it_has_a_name_for(tmp_path: Path) -> None:
    model = decoder("llama")
    stock = logits(model)
    lh.apply(model, YARN)
    lh.save(model, tmp_path / "yarn")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    torch.testing.assert_close(logits(theirs), logits(model))
    lh.apply(model, REMAP)
    lh.save(model, tmp_path / "remap")
    as_it_was = AutoModelForCausalLM.from_pretrained(tmp_path / "remap")
    torch.testing.assert_close(logits(as_it_was), stock)


def test_a_name_that_would_mean_something_else_is_not_used(tmp_path: Path) -> None:
    """transformers takes dynamic NTK's length from max_position_embeddings."""
    model = decoder("llama")
    lh.apply(model, "rope(frequencies=dynamic_ntk(32))")
    lh.save(model, tmp_path)
    assert config(tmp_path)["rope_parameters"]["rope_type"] == "default"
    assert "rope_parameters" not in config(tmp_path)["longitude"]


def test_a_type_that_its_class_refuses_is_not_used(tmp_path: Path) -> None:
    """Phi-3's takes yarn for longrope, and then misses its lists."""
    model = decoder("phi3")
    lh.apply(model, YARN)
    lh.save(model, tmp_path / "phi3")
    again, _ = lh.load(str(tmp_path / "phi3"), device="cpu", quiet=True)
    equal(logits(again), logits(model))


def test_a_model_patched_for_a_while_is_refused(tmp_path: Path) -> None:
    model = decoder("llama")
    with lh.patched(model, REMAP):
        before = logits(model)
        with pytest.raises(UserError, match="with block"):
            lh.save(model, tmp_path / "out")
        equal(logits(model), before)
    assert not list(tmp_path.iterdir())


def test_old_weights_make_way(tmp_path: Path) -> None:
    decoder("llama", seed=1).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "notes.txt").write_text("mine")
    model = decoder("llama", seed=2)
    lh.save(model, tmp_path)
    assert [f.name for f in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    equal(logits(lh.load(tmp_path, quiet=True)[0]), logits(model))


def test_onto_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    decoder("llama").save_pretrained(tmp_path)
    model, _ = lh.load(tmp_path, quiet=True)
    before = logits(model)
    lh.apply(model, REMAP)
    lh.save(model, tmp_path)
    lh.undo(model)
    equal(logits(model), before)
    assert lh.scheme_of(lh.load(tmp_path, quiet=True)[0]).layer(0).rotary.remap is not None


def test_a_kill_leaves_the_old_folder(tmp_path: Path, monkeypatch) -> None:
    old, new = decoder("llama", seed=1), decoder("llama", seed=2)
    lh.save(old, tmp_path / "out")

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(new.config), "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        lh.save(new, tmp_path / "out")
    monkeypatch.undo()
    equal(logits(lh.load(tmp_path / "out", quiet=True)[0]), logits(old))
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_scheme_that_can_no_longer_be_applied(tmp_path: Path) -> None:
    model = decoder("llama")
    lh.save(model, tmp_path)
    raw = config(tmp_path) | {"longitude": {"scheme": "spiral(3)"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="spiral"):
        lh.load(tmp_path, quiet=True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="is a file"):
        lh.save(decoder("llama"), tmp_path / "out")
