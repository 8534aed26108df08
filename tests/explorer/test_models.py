"""The page starts from a model's own scheme and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longitude import parse
from longitude.core.validate import UserError
from longitude.explorer.state import Column, shortest, start_from, start_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
}


def test_one_of_ours() -> None:
    found = start_from("tiny-rope")
    assert (found.own, found.window, found.dim, found.heads) == ("rope()", 256, 32, 6)
    assert found.length == 1024
    assert [c.method for c in found.columns] == ["own", "yarn", "leaky_rerope"]


def test_a_configuration(tmp_path: Path) -> None:
    found = start_from_config(LLAMA, "mine")
    assert (found.own, found.window, found.dim) == ("rope(base=250000)", 2048, 64)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert start_from(str(file)).own == found.own


def test_kinds_without_rotation() -> None:
    assert start_from("tiny-alibi").columns[1] == Column("alibi_interpolated")
    assert start_from("tiny-learned").own.startswith("learned(")


def test_what_has_no_scheme_is_told() -> None:
    with pytest.raises(UserError, match="mamba"):
        start_from_config({"model_type": "mamba"})


def test_layers_are_as_few_as_tile_the_model() -> None:
    assert str(shortest(parse("layers(rope(), rope())"))) == "rope()"
    six = parse(f"layers({', '.join(['rope()', 'rope()', 'causal()'] * 2)})")
    assert str(shortest(six)) == "layers(rope(), rope(), causal())"
    odd = parse("layers(rope(), causal(), rope())")
    assert shortest(odd) == odd
