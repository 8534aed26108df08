"""Models whose types of layers turn differently: Gemma 3's, OLMo 3's."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.hf.rope_config import read
from longitude.parts import Yarn
from longitude.runtimes.checkpoint import open_checkpoint
from longitude.runtimes.export import ExportResult, exports
from longitude.runtimes.files import write_files
from tests.runtimes.configs import emulate, request

TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = "rope(frequencies=yarn(4, original=256))"
FULL_ALONE = f"layers(rope(), rope(), {YARN})"


@pytest.fixture(scope="module", params=["gemma3_text", "olmo3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    config: Any = AutoConfig.for_model(
        request.param,
        **sizes,
        layer_types=TYPES,
        sliding_window=64,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(out)
    return out


def made(folder: Path, text: str, out: Path) -> Any:
    place = open_checkpoint(str(folder))
    done = exports(place, [request("transformers", text)], 1024)
    assert done[0].refused is None
    write_files(ExportResult(place, tuple(done), 1024), out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    return model.eval()


@pytest.mark.parametrize("text", [FULL_ALONE, YARN, "rope(frequencies=ntk_mixed(4))"])
def test_transformers_computes_the_scheme(folder: Path, text: str, tmp_path: Path) -> None:
    exported, ids = made(folder, text, tmp_path / "f"), torch.arange(3, 63).repeat(1, 5)
    model, _ = lh.load(folder, quiet=True)
    with torch.no_grad():
        plain = model(ids).logits
        with lh.patched(model, text):
            expected = model(ids).logits
        found = exported(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    "text",
    [
        "rope(remap=leaky_rerope(64, 4))",
        "rope(frequencies=dynamic_ntk(256))",
        "rope() + window(48, sinks=4)",  # of the full layers
        f"layers(rope(remap=rerope(16)), rope(remap=rerope(16)), {YARN})",
    ],
)
def test_what_has_no_settings_is_loaded_by_us(folder: Path, text: str, tmp_path: Path) -> None:
    place, ids = open_checkpoint(str(folder)), torch.arange(3, 63).repeat(1, 5)
    done = exports(place, [request("transformers", text)], 1024)
    write_files(ExportResult(place, tuple(done), 1024), tmp_path / "f")
    (ours, _), (exported, _) = (lh.load(at, quiet=True) for at in (folder, tmp_path / "f"))
    with torch.no_grad():
        plain = ours(ids).logits
        with lh.patched(ours, text):
            expected = ours(ids).logits
        torch.testing.assert_close(exported(ids).logits, expected)
    assert (expected - plain).abs().max() > 1e-4


def test_layers_that_are_not_asked_for_keep_their_own(folder: Path, tmp_path: Path) -> None:
    made(folder, FULL_ALONE, tmp_path / "f")
    before, after = (read(json.loads((at / "config.json").read_text())) for at in
                     (folder, tmp_path / "f"))  # fmt: skip
    assert before["sliding_attention"] == after["sliding_attention"]
    changed = after["full_attention"]
    assert changed and isinstance(changed.frequencies, Yarn)


def test_version_4_reads_the_full_layers(folder: Path, tmp_path: Path) -> None:
    made(folder, FULL_ALONE, tmp_path / "f")
    raw = json.loads((tmp_path / "f/config.json").read_text())
    four, five = (emulate("transformers", raw, v) for v in ("4.57.6", None))
    assert four.inv_freq == pytest.approx(five.inv_freq)
    assert four.attention == pytest.approx(five.attention)
    local = raw["rope_parameters"]["sliding_attention"]["rope_theta"]
    assert raw["rope_local_base_freq"] == local


def test_vllm_is_told_every_type(folder: Path) -> None:
    place = open_checkpoint(str(folder))
    (done,) = exports(place, [request("vllm", FULL_ALONE)], 1024)
    assert done.settings
    told = json.loads(next(w for w in shlex.split(done.settings.text) if w.startswith("{")))
    assert {k: v["rope_type"] for k, v in told["rope_parameters"].items()} == {
        "full_attention": "yarn",
        "sliding_attention": "default",
    }


def test_refusals(folder: Path) -> None:
    place = open_checkpoint(str(folder))
    requests = [
        request("vllm", YARN, "0.28"),
        request("sglang", FULL_ALONE),
        request("vllm", FULL_ALONE, "0.11.0"),
        request("vllm", YARN),
    ]
    others, sglang, old, plugin = (one.refused for one in exports(place, requests, 1024))
    assert others and "changes others as well" in others
    assert sglang and "layer types have different rotations" in sglang
    assert old and "use 0.12 or newer" in old
    assert plugin is None
    with pytest.raises(UserError, match="one type different ones"):
        place.resolve(f"layers({YARN}, rope(), rope())")
