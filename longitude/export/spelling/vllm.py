"""vLLM: `--hf-overrides`, which replaces the whole dictionary: every entry stands in it.

`linear` multiplies max_position_embeddings by its factor, the other types don't. Longrope's factor
on cosine and sine goes under names of vLLM's own; YaRN's under two, since older versions multiply
theirs and drop transformers'. A tokenizer that ends before the target would cut the length.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from typing import Any

from longitude.export.effective.value import before
from longitude.export.spelling.carriers import by_attn_factor, layered, placed
from longitude.export.spelling.value import TOKENIZER, Entries, Model, Spelling
from longitude.export.spelling.versions import refuse_before
from longitude.export.wanted import Wanted


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    refuse_before("vllm", version, "0.6.4", "it has no --hf-overrides yet")
    if model.kinds:
        refuse_before("vllm", version, "0.12", "it has one rotation for all types of layers yet")
    for parameters in by_attn_factor(w, model.config):
        entries = _entries(w, model, parameters, version)
        if model.limit is not None and model.limit < entries["max_position_embeddings"]:
            entries["model_max_length"] = w.target  # allows what the tokenizer's limit would not
        overrides = placed(model.config, entries)
        given = {"--hf-overrides": overrides, "--max-model-len": w.target}
        settings = {**model.config, TOKENIZER: dict(model.tokenizer), **given}
        yield Spelling("vllm", version, settings, _text(w, model, overrides), "vllm.sh")


def _entries(w: Wanted, model: Model, parameters: Entries, version: str) -> Entries:
    linear = parameters["rope_type"] == "linear"
    most = math.ceil(w.target / parameters["factor"]) if linear else w.target
    if before(version, "0.12"):  # version 5's name is not read yet
        scaling = {} if parameters["rope_type"] == "default" else {"rope_scaling": parameters}
        theta = {"rope_theta": parameters["rope_theta"]}
        return {"max_position_embeddings": most, **theta, **scaling}
    return {"max_position_embeddings": most, "rope_parameters": layered(model, parameters)}


def _text(w: Wanted, model: Model, overrides: dict[str, Any]) -> str:
    name, told = shlex.quote(model.name), shlex.quote(json.dumps(overrides))
    return f"vllm serve {name} --max-model-len {w.target} --hf-overrides {told}\n"
