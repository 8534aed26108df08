"""`longitude lint` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.runtimes.configs import YARN, five


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(five({**YARN, "attention_factor": 1.3})))
    return str(file)


def test_all_is_well(longitude: Callable[..., Ran]) -> None:
    code, out, _ = longitude("lint", "tiny-rope")
    assert code == 0 and "every runtime computes what the settings mean" in out


def test_differences_are_told_with_their_cures(longitude: Callable[..., Ran], config: str) -> None:
    code, out, _ = longitude("lint", config)
    words = " ".join(out.split())
    assert code == 1
    assert "attention factor ignored: sglang, llama.cpp, tensorrt-llm" in words
    assert "rope_parameters unread: mlx" in words and "write both spellings" in words
    assert "1.1386" in out and "1.3000" in out


def test_what_transformers_refuses_is_a_fault(
    longitude: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(five(YARN) | {"max_position_embeddings": 8192.0}))
    code, out, _ = longitude("lint", str(file))
    assert code == 1 and "refused: transformers refuses" in out and "expected int" in out


def test_a_window_by_default_is_named(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    file, raw = tmp_path / "config.json", five({"rope_theta": 1e4})
    for stated in (True, False):
        file.write_text(json.dumps(raw))
        code, out, _ = longitude("lint", str(file))
        assert code == 0 and ("length by default" in out) is not stated
        code, out, _ = longitude("inspect", str(file))
        words = " ".join(out.split())
        note = "the file states no max_position_embeddings: 2,048 is the default of LlamaConfig"
        assert code == 0 and (note in words) is not stated
        raw.pop("max_position_embeddings", None)


def test_json(longitude: Callable[..., Ran], config: str) -> None:
    code, out, _ = longitude("lint", config, "--for", "vllm,sglang", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    vllm, sglang = found["runtimes"]
    assert (vllm["same"], sglang["same"]) == (True, False)
    assert sglang["traps"][0]["name"] == "attention factor ignored"
    assert len(found["meant"]["inv_freq"]) == 32


def test_what_is_said_at_the_start(longitude: Callable[..., Ran]) -> None:
    told = json.dumps({"--max-model-len": 99999})
    code, out, _ = longitude("lint", "tiny-rope", "--for", "vllm", "--with", told)
    assert code == 1 and "does not start" in out and "length refused" in out


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("tiny-rope", "--for", "vlm"), "no runtime is called 'vlm'"),
        (("tiny-rope", "--with", "[]"), "--with takes a JSON object, but got '[]'"),
        (("tiny-rope", "--scheme", "layers(rope(), rope())"), "leave layers(…) out"),
        (("nowhere.gguf",), "there is no file or folder 'nowhere.gguf'"),
    ],
)
def test_mistakes_are_one_sentence(
    longitude: Callable[..., Ran], args: tuple[str, ...], sentence: str
) -> None:
    code, _, err = longitude("lint", *args)
    assert code == 2 and sentence in err and len(err.splitlines()) == 1
