"""Exported folders, opened by transformers itself and by `longitude.hf.loading`."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import longitude.hf as lh
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.faults import faults
from longitude.parts import LongRope
from longitude.runtimes import files
from longitude.runtimes.api import ExportOptions, export
from longitude.runtimes.checkpoint import open_checkpoint
from longitude.runtimes.export import ExportResult, exports
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder
from tests.runtimes.configs import request

FACTORS = tuple(1 + i / 4 for i in range(16))
STATED = [
    "rope(base=50000)",
    "rope(frequencies=linear(4))",
    "rope(frequencies=ntk(4))",
    "rope(frequencies=ntk_mixed(4))",
    "rope(frequencies=yarn(4, original=256))",
    "rope(frequencies=yarn(4, original=256, attention_factor=1.0, fast=24))",
    "rope(frequencies=yarn(4, original=256, ramp='paper'))",
    "rope(frequencies=llama3(4, original=256))",
    f"rope(frequencies=longrope({FACTORS}, {FACTORS}, original=256, factor=4))",
]


def made(text: str, out: Path, source: str = "tiny-rope", **options: Any) -> list[Path]:
    place = open_checkpoint(source)
    done = exports(place, [request("transformers", text)], 1024)
    assert done[0].refused is None
    return list(files.write_files(ExportResult(place, tuple(done), 1024), out, **options).written)


def rotary(folder: Path) -> Any:
    config: Any = AutoConfig.from_pretrained(folder)
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("text", STATED)
def test_transformers_computes_the_scheme_from_either_spelling(text: str, tmp_path: Path) -> None:
    made(text, tmp_path / "f", weights="none")
    raw = json.loads((tmp_path / "f/config.json").read_text())
    assert not [f for f in faults(raw) if f.serious]
    rope = parse(text).layer(0).rotary
    assert rope
    expected = rope.frequencies.inv_freq(32, rope.base, 1024)
    gain = math.sqrt(rope.frequencies.gain(1024))
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    new = {k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_theta")}
    for name, held in {"both": raw, "4": old, "5": new}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(held))
        found = rotary(tmp_path / name)
        torch.testing.assert_close(
            found.inv_freq.double(), expected, rtol=1e-6, atol=0, msg=f"{name}: {text}"
        )
        assert found.attention_scaling == pytest.approx(gain, rel=1e-6)
        assert found.config.max_position_embeddings == 1024


def test_a_folder_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert made(STATED[4], out) == [out]
    assert (out / "model.safetensors").is_symlink()
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    card = (out / "README.md").read_text()
    assert f"vllm serve {out} --max-model-len 1024" in card
    assert f"--model-path {out} --context-length 1024" in card
    ours, _ = lh.load("tiny-rope", quiet=True)
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(out)("def f(x):" * 60, return_tensors="pt")["input_ids"]
    assert ids.shape[1] > 512
    with lh.patched(ours, STATED[4]), torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, ours(ids).logits)


def test_another_length_than_the_factors_is_told_of() -> None:
    place = open_checkpoint("tiny-rope")
    new, old = (
        exports(place, [request("transformers", STATED[4], version)], 2048)[0].settings
        for version in (None, "4.51.3")
    )
    assert new and new.config
    assert "uses 8 for YaRN's factor, not 4: export with --to 1024" in new.notes[0]
    assert new.config["rope_parameters"]["rope_type"] == "yarn"
    assert old is None or (old.config or {})["rope_parameters"]["rope_type"] == "longrope"


def test_weights_linked_copied_or_left_out(tmp_path: Path) -> None:
    for weights in ("copy", "none", "link"):  # into the same folder, one after another
        made(STATED[0], tmp_path / "out", weights=weights)
        file = tmp_path / "out/model.safetensors"
        assert file.is_symlink() == (weights == "link")
        assert file.exists() == (weights != "none")
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UserError, match="--weights is link, copy or none, but got 'move'"):
        made(STATED[0], tmp_path / "other", weights="move")


def test_what_needs_our_attention_is_loaded_with_it(tmp_path: Path) -> None:
    text = "rope(remap=rerope(128))"
    made(text, tmp_path / "out")
    model, tokenizer = lh.load(tmp_path / "out", quiet=True)
    ours, _ = lh.load("tiny-rope", quiet=True)
    assert tokenizer is not None
    ids = torch.arange(600)[None] % 256
    with lh.patched(ours, text), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, ours(ids).logits)
    assert text in (tmp_path / "out/load.py").read_text()


def test_dynamic_ntk_in_transformers_words_and_ours(tmp_path: Path) -> None:
    made("rope(frequencies=dynamic_ntk(256, 4))", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_type"] == "dynamic"
    assert config.max_position_embeddings == 256  # where it begins
    model, _ = lh.load(tmp_path / "out", quiet=True)
    assert lh.scheme_of(model) == parse("rope(frequencies=dynamic_ntk(256, 4))")


def test_a_class_without_dynamic_ntk_gets_ours_alone(tmp_path: Path) -> None:
    decoder("phi3", original_max_position_embeddings=64).save_pretrained(tmp_path / "phi3")
    text = "rope(frequencies=dynamic_ntk(64))"
    result = export(
        tmp_path / "phi3", options=ExportOptions(scheme=text, out=tmp_path / "o", to=256)
    )
    model, _ = lh.load(tmp_path / "o", quiet=True)
    assert str(lh.scheme_of(model)) == text
    assert "with the model's own scheme" in result.notes[0]


@pytest.mark.parametrize("own", [None, 12])
def test_another_window_than_the_models_own_is_no_setting(own: int | None, tmp_path: Path) -> None:
    decoder("mistral", sliding_window=own).save_pretrained(tmp_path / "m")
    place, text = open_checkpoint(str(tmp_path / "m")), "rope() + window(24, sinks=4)"
    transformers, sglang = exports(
        place, [request(n, text) for n in ("transformers", "sglang")], 128
    )
    assert transformers.text and "longitude.hf" in transformers.text
    assert sglang.refused and "nearest it can serve is rope()" in sglang.refused
    (kept,) = exports(place, [request("sglang", "rope(base=500) + window(12)")], 128)
    assert (kept.refused is None) == (own == 12)


def test_longrope_keeps_both_its_lists_for_transformers(tmp_path: Path) -> None:
    short = (1.0,) * 16
    made(f"rope(frequencies=longrope({short}, {FACTORS}, original=256, factor=4))", tmp_path / "o")
    scheme = lh.scheme_of(lh.load(tmp_path / "o", quiet=True)[0]).layer(0)
    assert scheme.rotary
    assert scheme.rotary.frequencies == LongRope(short, FACTORS, original=256, factor=4)


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    model, _ = lh.load("tiny-rope", quiet=True)
    file = write_gguf(tmp_path / "m.gguf", model)
    made(STATED[4], tmp_path / "out", source=str(file), weights="copy")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(600)[None] % 256
    with lh.patched(model, STATED[4]), torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_longer_table_is_written_into_the_weights(tmp_path: Path) -> None:
    place, text = open_checkpoint("tiny-learned"), "hierarchical(256)"
    requests = [request(name, text) for name in ("transformers", "vllm", "sglang", "mlx")]
    made = ExportResult(place, tuple(exports(place, requests, 1024)), 1024)
    written = files.write_files(made, tmp_path)
    done = written.exports
    assert [one.refused is None for one in done] == [True, True, True, False]
    assert done[1].settings
    assert done[1].settings.text.startswith(f"vllm serve {tmp_path / 'transformers'} --max-model-")
    assert written.written == (tmp_path / "transformers",)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "transformers")
    model, _ = lh.load("tiny-learned", quiet=True)
    ids = torch.randint(256, (1, 900), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), lh.patched(model, text):
        torch.testing.assert_close(stock(ids).logits, model(ids).logits)
    card = (tmp_path / "transformers/README.md").read_text()
    assert "its table of positions, which is written out longer" in card and "texts of 256." in card


def test_places_that_can_be_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"is a file: name another folder\."):
        made(STATED[0], tmp_path / "file")
    with pytest.raises(UserError, match=r"can't be written \(Not a directory\)"):
        made(STATED[0], tmp_path / "file" / "inside")
    made(STATED[0], tmp_path / "own")
    with pytest.raises(UserError, match="the model's own folder"):
        made(STATED[1], tmp_path / "own", source=str(tmp_path / "own"))
    own = ExportOptions(scheme=STATED[0], to="4x", runtimes="vllm,sglang", out=tmp_path / "own")
    with pytest.raises(UserError, match="the model's own folder"):  # its card would be replaced
        export(tmp_path / "own", options=own)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("# A project")
    with pytest.raises(UserError, match=r"has a README\.md of its own"):
        made(STATED[0], tmp_path / "project")


def test_a_folder_without_weights_has_none_to_link(tmp_path: Path) -> None:
    made(STATED[0], tmp_path / "bare", weights="none")
    with pytest.raises(UserError, match="has no weights to link"):
        made(STATED[1], tmp_path / "out", source=str(tmp_path / "bare"))
    made(STATED[1], tmp_path / "out", source=str(tmp_path / "bare"), weights="none")


def test_commands_quote_the_folder(tmp_path: Path) -> None:
    options = ExportOptions(scheme=STATED[1], runtimes="mlx,exllama", out=tmp_path / "my models")
    for one in export("tiny-rope", options=options).exports:
        assert one.path in shlex.split(str(one.text))


def test_a_kill_leaves_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    made(STATED[0], out)

    class Killed(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(files, "write_settings", stop)
    before = (out / "config.json").read_text()
    with pytest.raises(Killed):
        made(STATED[1], out)
    assert (out / "config.json").read_text() == before


def test_vllm_gets_a_folder_for_what_it_has_no_settings_for(tmp_path: Path) -> None:
    out, text = tmp_path / "out", "rope(remap=rerope(128))"
    options = ExportOptions("vllm", text, to="8x", out=str(out))
    result = export("tiny-rope", options=options)
    assert json.loads((out / "longitude.json").read_text())["to"] == 2048
    assert (out / "vllm.sh").read_text() == f"vllm serve {out}\n" == f"{result.table()}\n"
    assert (out / "model.safetensors").is_symlink()
    assert any('pip install "longitude[vllm]"' in note for note in result.notes)
    old = replace(options, version="0.28", out=tmp_path / "old")
    with pytest.raises(UserError, match="the nearest it can serve is"):
        export("tiny-rope", options=old)


def test_dynamic_frequencies_switch_prefix_caching_off(tmp_path: Path) -> None:
    text = "rope(frequencies=dynamic_yarn(256))"
    options = ExportOptions("vllm", text, to=1024, out=tmp_path / "out")
    result = export("tiny-rope", options=options)
    assert "--no-enable-prefix-caching" in result.table()
    assert any("frequencies of 1024 tokens" in note for note in result.notes)
