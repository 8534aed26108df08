"""M-RoPE: for a text it is RoPE, and what is written keeps the sections that images need."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import longitude
import longitude.hf as lh
from longitude.hf.rope_config import SECTIONS
from longitude.runtimes.checkpoint import open_checkpoint
from longitude.runtimes.export import ExportResult, exports
from longitude.runtimes.files import write_files
from tests.hf.tiny import decoder, ids
from tests.runtimes.configs import lint, request

YARN = "rope(frequencies=yarn(4, original=64))"
STATED = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
TRAINED = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **STATED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qwen3_5_text")
    decoder("qwen3_5_text", rope_parameters=dict(TRAINED)).save_pretrained(out)
    return out


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def sections(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: entries[key] for key in SECTIONS if key in entries}


def test_transformers_computes_what_was_exported(folder: Path, tmp_path: Path) -> None:
    place = open_checkpoint(str(folder))
    done = exports(place, [request("transformers", YARN)], 256)
    assert done[0].refused is None
    write_files(ExportResult(place, tuple(done), 256), tmp_path / "out")
    written, text = config(tmp_path / "out"), ids(200)
    assert sections(written["rope_parameters"]) == sections(written["rope_scaling"]) == STATED
    model, _ = lh.load(folder, quiet=True)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad(), lh.patched(model, YARN):
        torch.testing.assert_close(exported(text).logits, model(text).logits)
    assert lint(written, ["transformers", "transformers==4.57.6", "vllm", "sglang"]).same


def test_saved_sections_come_back(folder: Path, tmp_path: Path) -> None:
    model, _ = lh.load(folder, quiet=True)
    lh.apply(model, YARN)
    lh.save(model, tmp_path)
    written = config(tmp_path)
    assert written["rope_parameters"]["rope_type"] == "yarn"
    assert sections(written["rope_parameters"]) == STATED
    assert sections(written["longitude"]["rope_parameters"]) == STATED
    again, _ = lh.load(tmp_path, quiet=True)
    assert lh.scheme_of(again) == lh.scheme_of(model)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_a_server_reads_sections_under_two_types(folder: Path, runtime: str) -> None:
    place = open_checkpoint(str(folder))
    texts = (YARN, "rope(base=5000000)", "rope(frequencies=linear(4))")
    yarn, base, linear = (exports(place, [request(runtime, text)], 256)[0] for text in texts)
    for done in (yarn, base):
        assert done.text
        over = json.loads(shlex.split(done.text)[-1])
        assert sections(over.get("rope_parameters") or over["rope_scaling"]) == STATED
    assert linear.refused and "it would not start" in linear.refused
    found = lint({**config(folder), "rope_parameters": {**TRAINED, **LINEAR}}, [runtime])
    assert [issue.name for issue in found.rows[0].issues] == ["sections unread"]


LINEAR = {"rope_type": "linear", "factor": 4.0}


def test_a_files_sections_are_no_fault(folder: Path) -> None:
    assert not lint(config(folder)).faults
    older = {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}
    text = {"model_type": "qwen2_vl_text", "hidden_size": 1536, "num_attention_heads": 12}
    text |= {"rope_scaling": older, "rope_theta": 1e6, "max_position_embeddings": 32768}
    found = lint({"model_type": "qwen2_vl", "text_config": text}, ["transformers", "vllm"])
    assert not found.faults and found.same and len(found.meant.inv_freq) == 64


def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    stated = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes["max_position_embeddings"] = 64
    AutoConfig.for_model(
        "qwen2_5_vl", text_config={**sizes, "rope_parameters": stated}
    ).save_pretrained(tmp_path)
    (done,) = exports(open_checkpoint(str(tmp_path)), [request("transformers", YARN)], 256)
    assert done.config
    inner = done.config["text_config"]
    assert inner["rope_scaling"]["rope_type"] == "yarn" and "vision_config" in done.config
    assert inner["rope_scaling"]["mrope_section"] == [2, 3, 3]


def test_vllm_serves_texts_of_a_multimodal_model_under_any_scheme(
    folder: Path, tmp_path: Path
) -> None:
    wanted = [request("vllm", "rope(remap=rerope(32))")]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes["max_position_embeddings"] = 64
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    whole = AutoConfig.for_model("qwen2_vl", text_config={**sizes, "rope_parameters": rope})
    whole.save_pretrained(tmp_path)
    for place, alone in ((tmp_path, True), (folder, False)):
        (done,) = exports(open_checkpoint(str(place)), wanted, 256)
        assert done.text and ("--language-model-only" in done.text) == alone
        assert done.settings
        assert any("without images" in note for note in done.settings.notes) == alone


def test_inspect_says_what_images_have(folder: Path) -> None:
    (found,) = longitude.inspect(str(folder)).encodings
    assert found.layers[1] == ("rope(base=1000000, fraction=0.25)", (3,))
    assert found.layers[0] == ("no attention (linear_attention)", (0, 1, 2))
    assert "M-RoPE, sections [1, 1, 0]" in found.notes[0]
