"""`longitude inspect` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from longitude.hf import encodings as types
from tests.cli.conftest import Ran
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder
from tests.runtimes.configs import YARN, five


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    raw = five(YARN)
    raw["rope_parameters"] = {**raw["rope_parameters"], "type": "linear"}
    file.write_text(json.dumps(raw))
    return str(file)


def test_a_rotation(longitude: Callable[..., Ran]) -> None:
    code, out, _ = longitude("inspect", "tiny-rope", "--to", "4x")
    words = " ".join(out.split())
    assert code == 0
    assert "rope rotary" in words and "window 256 tokens (max_position_embeddings)" in words
    assert "critical dimension 14 of 32" in words and "to 1,024" in words
    assert "Wavelengths" in out and "Decay" in out
    assert "every runtime computes what the settings mean" in words


@pytest.mark.parametrize(
    ("name", "kind", "scheme"),
    [
        ("tiny-rope", "rope", "rope()"),
        ("tiny-alibi", "alibi", "alibi()"),
        ("tiny-learned", "learned", "learned(256)"),
    ],
)
def test_json(longitude: Callable[..., Ran], name: str, kind: str, scheme: str) -> None:
    code, out, _ = longitude("inspect", name, "--json")
    found = json.loads(out)
    assert code == 0 and found["faults"] == []
    assert (found["encodings"][0]["kind"], found["encodings"][0]["scheme"]) == (kind, scheme)
    assert (found["lint"] is not None) == (kind == "rope")
    assert bool(found["wavelengths"]) == (kind == "rope")


@pytest.mark.parametrize("name", ["num_hidden_layers", "head_dim"])
def test_sizes_of_no_model(longitude: Callable[..., Ran], tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**five(YARN), name: 2**63}))
    code, _, said = longitude("inspect", str(tmp_path))
    assert code == 2 and f"the configuration's {name} is {2**63}, but no model is as large" in said


def test_a_gguf_file(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    keys |= {"rope.scaling.original_context_length": 16}
    file = write_gguf(tmp_path / "m.gguf", decoder("llama"), keys)
    code, out, _ = longitude("inspect", str(file), "--json")
    found = json.loads(out)
    assert code == 0 and found["encodings"][0]["scaling"] == "yarn(4, original=16)"
    assert found["encodings"][0]["window_from"] == "llama.context_length"
    assert {row["runtime"] for row in found["lint"]["runtimes"]} >= {"llama.cpp", "ollama"}


def test_what_is_wrong_is_told_even_where_nothing_else_can_be(
    longitude: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**five(YARN), "rope_parameters": "yarn"}))
    code, out, _ = longitude("inspect", str(file))
    assert code == 1 and "not a dictionary: " in out


def test_a_fault_is_told_and_ends_with_1(longitude: Callable[..., Ran], faulty: str) -> None:
    code, out, _ = longitude("inspect", faulty)
    assert code == 1 and "two types: " in out and "What runtimes compute from it" in out
    code, out, _ = longitude("inspect", faulty, "--json")
    assert code == 1 and json.loads(out)["faults"][0]["name"] == "two types"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "inspect takes one model, or --all"),
        (("tiny-rope", "--all"), "inspect takes one model, or --all"),
        (("tiny-rope", "--to", "far"), "--to takes a length, but got 'far'"),
        (("tiny-rope", "--to", "0"), "--to takes a length, but got '0'"),
        (("tiny-rope", "--length", "64"), "give --weights too"),
        (("--all", "--to", "4x"), "about one model"),
        (("tiny-rope", "--to", "3"), "less than one rotation"),
        (("nowhere.gguf",), "there is no file or folder 'nowhere.gguf'"),
    ],
)
def test_mistakes(longitude: Callable[..., Ran], args: tuple[str, ...], sentence: str) -> None:
    code, _, err = longitude("inspect", *args)
    assert code == 2 and sentence in err and err.count("\n") == 1


def test_the_table_begins_with_named_models(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(types.NAMED_MODELS)
    every = types.known_models
    monkeypatch.setattr(types, "known_models", lambda: islice(every(), count))
    code, out, _ = longitude("inspect", "--all", "--json")
    rows = {row["name"]: row["encodings"][0] for row in json.loads(out)}
    assert code == 0 and len(rows) == count
    assert rows["Falcon 7B, 40B, 180B"]["kind"] == "rope" and rows["Falcon-RW"]["kind"] == "alibi"
    assert rows["RoBERTa"]["scheme"] == "learned(512, offset=2) + bidirectional()"
    assert rows["XLNet"]["kind"] == "transformer-xl" and rows["ERNIE 3.0"]["kind"] == "learned"
    code, out, _ = longitude("inspect", "--all")
    assert code == 0 and "RoPE: ALiBi is Falcon-RW's alone" in " ".join(out.split())
