"""What a checkpoint's configuration says, put together."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from longitude.core.text import parse
from longitude.hf.encodings import Encoding, read_encodings
from longitude.hf.faults import faults
from longitude.hf.rope_config import rope_parameters
from longitude.inspection.api import InspectResult, encoding_page
from longitude.inspection.rope_limits import main_rope, rope_limits

LLAMA2: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2,
    "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
LISTS = ", ".join(str(1 + i / 4) for i in range(64))
EXPORTED = [
    "rope()",
    "rope(base=50000)",
    "rope(frequencies=linear(4))",
    "rope(frequencies=dynamic_ntk(4096, factor=2))",
    "rope(frequencies=proportional(0.25))",
    "rope(frequencies=yarn(4, original=4096))",
    "rope(frequencies=yarn(4, original=4096, fast=24, attention_factor=1.5))",
    "rope(frequencies=yarn(40, original=4096, mscale=0.7, mscale_all_dim=0.7, truncate=False))",
    "rope(base=500000, frequencies=llama3(8, original=8192))",
    f"rope(frequencies=longrope(({LISTS}), ({LISTS}), original=4096, factor=4))",
]


@pytest.mark.parametrize("text", EXPORTED)
def test_what_is_exported_is_read_back(text: str) -> None:
    rope = parse(text).layer(0).rotary
    assert rope
    raw = {k: v for k, v in LLAMA2.items() if k != "rope_theta"}
    (found,) = read_encodings(raw | {"rope_parameters": rope_parameters(rope)})
    assert found.scheme == str(parse(text))
    assert not [f for f in faults(raw | {"rope_parameters": rope_parameters(rope)}) if f.serious]


def test_llama_2_reaches_as_far_as_the_paper_says() -> None:
    encodings = read_encodings(LLAMA2)
    reach = rope_limits(encodings[0], target=16384)
    assert reach and (reach.dim, reach.critical_dimension) == (128, 92)
    assert reach.critical_base and round(reach.critical_base) == 71738
    waves = [2 * math.pi * 1e4 ** (i / 64) for i in range(64)]
    assert reach.longest == pytest.approx(max(waves))
    assert reach.unfinished == sum(wave > 4096 for wave in waves)
    assert reach.least_base and reach.against and reach.base < reach.least_base
    result = InspectResult("llama-2", encodings, reach=reach, page=encoding_page(encodings[0]))
    json.dumps(result.to_json(), allow_nan=False)
    assert "Wavelengths" in result.table() and "critical dimension" in result.table()


def test_a_base_that_is_large_enough_is_heard_everywhere() -> None:
    raw = LLAMA2 | {"rope_theta": 1e6, "max_position_embeddings": 8192}
    reach = rope_limits(read_encodings(raw)[0])
    assert reach and reach.against is None and reach.least_base and reach.base > reach.least_base


def test_the_chief_rotation_is_that_of_layers_that_see_everything() -> None:
    raw = {"model_type": "gemma3_text", "num_hidden_layers": 6, "max_position_embeddings": 2048}
    (gemma,) = read_encodings(raw)
    rope = main_rope(gemma)
    assert rope and rope.base == 1e6
    assert encoding_page(gemma) is not None


def test_encodings_without_a_rotation_have_no_reach() -> None:
    none = Encoding("none", window=2048)
    assert rope_limits(none) is None and encoding_page(none) is None
    assert InspectResult("none", (none,)).to_json()["wavelengths"] == []
