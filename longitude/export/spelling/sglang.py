"""SGLang: `--json-model-override-args`, which replaces the whole dictionary.

It drops transformers' attention_factor and multiplies YaRN's own by `attn_factor`. The length is
max_position_embeddings, for linear times its factor.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from typing import Any

from longitude.export.spelling.carriers import by_attn_factor, placed
from longitude.export.spelling.value import Model, Spelling
from longitude.export.wanted import Wanted


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in by_attn_factor(w, model.config, "attention_factor"):
        linear = parameters["rope_type"] == "linear"
        most = math.ceil(w.target / parameters["factor"]) if linear else w.target
        entries = {"max_position_embeddings": most, "rope_scaling": parameters}
        overrides = placed(model.config, entries)
        given = {"--json-model-override-args": overrides, "--context-length": w.target}
        settings = {**model.config, **given}
        yield Spelling("sglang", version, settings, _text(w, model, overrides), "sglang.sh")


def _text(w: Wanted, model: Model, overrides: dict[str, Any]) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model.name)} "
        f"--context-length {w.target} --json-model-override-args "
        f"{shlex.quote(json.dumps(overrides))}\n"
    )
