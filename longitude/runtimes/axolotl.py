"""axolotl: `overrides_of_model_config` in its YAML file; what it trains, transformers 5 runs."""

from __future__ import annotations

from collections.abc import Iterator

from longitude.runtimes.rope_dictionaries import either, placed
from longitude.runtimes.settings import Model, Spelling, yaml
from longitude.runtimes.target import Wanted

ADAPTER = "an adapter keeps no rotation: serve it on a base model with this configuration."


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in either(w, model.config):
        entries = {"max_position_embeddings": w.target, "rope_parameters": parameters}
        given = {"overrides_of_model_config": placed(model.config, entries)}
        given |= {"sequence_len": w.target}
        text = yaml({"base_model": model.name, **given})
        settings = {**model.config, **given}
        yield Spelling("axolotl", version, settings, text, "axolotl.yaml", notes=(ADAPTER,))
