"""An adapter is exported merged, with its scheme; lint tells what runtimes would make of it."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import longitude.hf as lh
from longitude.cli.main import run
from longitude.runtimes.lint import read_settings
from tests.hf.adapters import with_lora
from tests.runtimes.configs import lint

pytest.importorskip("peft")
YARN = "rope(frequencies=yarn(4, original=256))"
IDS = torch.arange(600)[None] * 7 % 251


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


class Trained(NamedTuple):
    """An adapter's folder, and what the model says with it."""

    folder: Path
    logits: torch.Tensor


def adapter(folder: Path, scheme: str | None) -> Trained:
    model, _ = lh.load("tiny-rope", dtype="float32", quiet=True)
    made = with_lora(model).eval()
    if scheme:
        lh.apply(made.get_base_model(), scheme)
    found = logits(made)
    lh.save_adapter(made, folder, "tiny-rope", target=1024)
    return Trained(folder, found)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return adapter(tmp_path_factory.mktemp("yarn"), YARN)


@pytest.fixture(scope="module")
def remapped(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return adapter(tmp_path_factory.mktemp("remapped"), "rope(remap=leaky_rerope(128, 8))")


def test_exported_it_is_merged_and_stock_transformers_reads_it(
    yarn: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["export", str(yarn.folder), "--out", str(out)]) == 0, capsys.readouterr()
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 1024
    stock = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    torch.testing.assert_close(logits(stock), yarn.logits, rtol=1e-4, atol=1e-4)


def test_a_scheme_without_settings_is_saved_with_it(remapped: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["export", str(remapped.folder), "--out", str(out)]) == 0
    again, _ = lh.load(out, dtype="float32", quiet=True)
    torch.testing.assert_close(logits(again), remapped.logits, rtol=1e-4, atol=1e-4)


def test_servers_get_the_merged_folder(
    yarn: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["export", str(yarn.folder), "--out", str(tmp_path / "out"), "--for"]
    assert run([*given, "vllm"]) == 2
    assert "but got an adapter: add transformers to --for" in capsys.readouterr().err
    assert run([*given, "gguf"]) == 2
    assert "reads a GGUF file, but got an adapter" in capsys.readouterr().err
    assert run([*given, "transformers,vllm"]) == 0
    where = tmp_path / "out" / "transformers"
    assert f"vllm serve {where} --max-model-len 1024" in capsys.readouterr().out


def test_a_checkpoint_is_exported_with_the_scheme_it_was_saved_with(tmp_path: Path) -> None:
    model, tokenizer = lh.load("tiny-rope", dtype="float32", quiet=True)
    lh.apply(model, YARN)
    lh.save(model, tmp_path / "tuned", tokenizer)
    said = logits(model)
    assert run(["export", str(tmp_path / "tuned"), "--out", str(tmp_path / "out")]) == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(stock), said, rtol=1e-4, atol=1e-4)


def test_lint_says_when_the_rotation_is_missing(
    yarn: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(yarn.folder, tmp_path / "adapter")
    (tmp_path / "adapter" / "longitude.json").unlink()
    assert run(["lint", str(tmp_path / "adapter")]) == 1
    assert "adapter without its rotation" in capsys.readouterr().out


def test_lint_says_that_the_base_turns_otherwise(
    yarn: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lint", str(yarn.folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["meant"]["length"] == 1024 and not found["faults"]
    model, _ = lh.load(yarn.folder, quiet=True)
    turned = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(found["meant"]["inv_freq"]), turned.float())
    for row in found["runtimes"]:
        assert "adapter alone" in {issue["name"] for issue in row["traps"]}


def test_lint_of_an_adapter_of_a_models_own_scheme(tmp_path: Path) -> None:
    adapter(tmp_path / "adapter", None)
    assert json.loads((tmp_path / "adapter" / "longitude.json").read_text())["target"] == 1024
    rows = lint(read_settings(str(tmp_path / "adapter")), ("vllm",)).rows
    assert rows[0].difference.frequencies == 0 and rows[0].difference.length == 256 - 1024


def test_lint_of_a_scheme_beyond_settings(
    remapped: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lint", str(remapped.folder)]) == 1
    assert "load it by longitude.hf.load" in " ".join(capsys.readouterr().out.split())
