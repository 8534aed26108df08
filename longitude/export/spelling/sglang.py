"""SGLang: `--json-model-override-args`, which replaces the whole dictionary.

It drops transformers' attention_factor and multiplies YaRN's own by `attn_factor`. The length is
max_position_embeddings, for linear times its factor.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.export.spelling.carriers import fixed, named, placed, usual, usual_gain
from longitude.export.spelling.value import Model, Spelling
from longitude.export.wanted import Wanted


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in _parameters(w, model.config):
        linear = parameters["rope_type"] == "linear"
        most = math.ceil(w.target / parameters["factor"]) if linear else w.target
        entries = {"max_position_embeddings": most, "rope_scaling": parameters}
        overrides = placed(model.config, entries)
        given = {"--json-model-override-args": overrides, "--context-length": w.target}
        settings = {**model.config, **given}
        yield Spelling("sglang", version, settings, _text(w, model, overrides), "sglang.sh")


def _parameters(w: Wanted, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = named(w, config)
    if found is not None and found["rope_type"] != "longrope":
        found.pop("attention_factor", None)
        yield found if usual(w) else found | {"attn_factor": w.attention / usual_gain(w)}
    if all(w.inv_freq):
        yield fixed(w, config, short_mscale=w.attention, long_mscale=w.attention)


def _text(w: Wanted, model: Model, overrides: dict[str, Any]) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model.name)} "
        f"--context-length {w.target} --json-model-override-args "
        f"{shlex.quote(json.dumps(overrides))}\n"
    )
