"""The page's numbers are the library's, at any length."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from longitude import Scheme, parse
from longitude.core.part import Dims
from longitude.explorer.data import MAX_BIAS, draw
from longitude.explorer.state import MAX_LENGTH, Column, PageState
from longitude.inspection import curves


def column(method: str, **asked: Any) -> dict[str, Any]:
    """The answer to one column."""
    return json.loads(draw(PageState(**asked, columns=(Column(method),))))["columns"][0]


def written(text: str, **asked: Any) -> dict[str, Any]:
    found = draw(PageState(**asked, columns=(Column("written", text=text),)))
    return json.loads(found)["columns"][0]


def scheme(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def test_curves_are_the_librarys() -> None:
    found, s = column("yarn"), scheme("rope(frequencies=yarn(4, original=4096))")
    assert found["scheme"] == str(s) and found["base"] == 10000 and found["factor"] == 4
    waves = curves.wavelengths(s, 16384, 64)
    assert found["wavelengths"]["scaled"] == [w.scaled for w in waves]
    assert found["wavelengths"]["stretch"] == pytest.approx(
        [(w.scaled or 0) / w.plain for w in waves]
    )
    for distance, mean in zip(found["decay"]["distance"], found["decay"]["mean"], strict=True):
        if distance < 8:  # where a row is one distance
            theta = s.rotary.frequencies.inv_freq(64, 10000, 16384) if s.rotary else None
            assert theta is not None
            assert mean == pytest.approx((distance * theta).cos().mean().item())
    assert found["gain"] == pytest.approx((0.1 * math.log(4) + 1) ** 2)


def test_the_map_is_relative_to_the_model() -> None:
    linear = column("linear")["map"]
    assert linear["low"] == pytest.approx([r / 4 for r in linear["distance"]])
    assert linear["high"] == pytest.approx(linear["low"])
    leaky = column("leaky_rerope")["map"]
    assert leaky["low"] == pytest.approx(
        [r if r < 2048 else 2048 + (r - 2048) / 16 for r in leaky["distance"]]
    )
    moved = written("rope(base=40000)")["map"]  # another base than the model's: a band
    assert moved["high"][-1] > 1.5 * moved["low"][-1] > 0


def test_biases_are_the_librarys() -> None:
    found = column("alibi_lm", window=64, length=256)["bias"]
    rows = curves.bias(scheme("alibi()"), 256, Dims(512, 8, 64))
    assert found["bias"] == pytest.approx([r.bias for r in rows])
    assert found["head"] == [r.head for r in rows]


def test_pairs_past_what_training_showed() -> None:
    plain = column("own", window=64, length=256)["pairs"]
    for i, line in zip(plain["tokens"], plain["past"], strict=True):
        assert line == [j <= i and i - j > 64 for j in plain["tokens"]]
    leaky = column("leaky_rerope", window=64, length=256)
    assert not any(map(any, leaky["pairs"]["past"])) and leaky["reach"] is None


def test_a_layer_can_be_chosen() -> None:
    text = "layers(rope() + window(16), rope(base=1000000))"
    asked = PageState(own=text, window=64, length=256)
    found = json.loads(draw(asked))["columns"][0]
    assert found["drawn"] == "rope(base=1000000)" and found["layers"] == ["0", "1"]
    one = PageState(own=text, window=64, length=256, columns=(Column("own", layer=0),))
    assert json.loads(draw(one))["columns"][0]["kept"] == 16
    lost = PageState(own=text, columns=(Column("own", layer=7),))
    assert "give 0 to 1" in json.loads(draw(lost))["columns"][0]["mistake"]


def test_a_mistake_is_of_its_column_alone() -> None:
    columns = (Column("yarn"), Column("written", text="rope(bass=1)"))
    right, wrong = json.loads(draw(PageState(columns=columns)))["columns"]
    assert right["scheme"] and "mistake" not in right
    assert "base" in wrong["mistake"]


@pytest.mark.parametrize(
    "method", ["own", "yarn", "streaming", "alibi_lm", "t5_decoder", "fire_lm", "randomized_rope"]
)
def test_ten_million_tokens_are_drawn_by_a_few_hundred_points(method: str) -> None:
    text = draw(PageState(length=MAX_LENGTH, columns=(Column(method),)))
    found = json.loads(text)["columns"][0]
    assert "mistake" not in found and len(text) < 200_000
    assert len(found["pairs"]["tokens"]) <= 40
    assert found["length"] == MAX_LENGTH or f"not {MAX_LENGTH:,}" in " ".join(found["notes"])


@pytest.mark.parametrize("length", [2, 3, 17, 100, 4097])
@pytest.mark.parametrize("method", ["own", "yarn", "self_extend", "alibi_encoder", "gpt2", "nope"])
def test_short_texts_are_drawn_too(method: str, length: int) -> None:
    found = column(method, length=length, window=64, dim=16)
    assert "mistake" not in found
    assert found["keys"]["last"][-1] == length - 1


@pytest.mark.parametrize("column", [Column("own"), Column("written", text="alibi()")])
def test_learned_biases_are_mapped_no_farther_than_drawn(column):
    """A table over ten million distances would keep the server busy for minutes."""
    own = "fire(hidden=4096)"
    state = PageState(own=own, length=MAX_LENGTH, dim=32, columns=(column,))
    (drawn,) = json.loads(draw(state))["columns"]
    assert max(drawn["map"]["distance"]) < MAX_BIAS
