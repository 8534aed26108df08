"""TensorRT-LLM: `model_kwargs` in the YAML file of its server, over the checkpoint's config.json.

It drops attention_factor, and has YaRN's from mscale alone: 1 + 0.1 m ln s. Without an original
length it would take 1,024.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.export.spelling.carriers import by_mscale, fixed, level, placed
from longitude.export.spelling.value import Model, Spelling
from longitude.export.spelling.yaml import yaml
from longitude.export.wanted import Wanted

FILE = "tensorrt-llm.yaml"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in _parameters(w, model.config):
        entries = {
            "max_position_embeddings": w.target,
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": parameters,
        }
        given = {"model_kwargs": placed(model.config, entries)}
        settings = {**model.config, **given, "max_seq_len": w.target}
        start = (
            f"# trtllm-serve {shlex.quote(model.name)} --max_seq_len {w.target} "
            f"--extra_llm_api_options {FILE}\n"
        )
        yield Spelling("tensorrt-llm", version, settings, start + yaml(given), FILE)


def _parameters(w: Wanted, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from by_mscale(w, config)
    yield fixed(w, config)
    yield from level(w, config)
