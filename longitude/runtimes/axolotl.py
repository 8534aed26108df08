"""axolotl: `overrides_of_model_config` in its YAML file, set on a configuration of transformers 5.

It trains the model in transformers; `sequence_len` is the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.core.validate import UserError
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import DoesNotStart, Effective
from longitude.runtimes.rope_dictionaries import named_or_listed, nested, yaml
from longitude.runtimes.target import Target
from longitude.runtimes.transformers import computed, version5

ADAPTER = "an adapter stores no rotation: serve it on a base model with this configuration."


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    if "rope_scaling" in config.get("axolotl", {}):
        raise DoesNotStart("unknown type")
    rope = version5(config, config.get("overrides_of_model_config") or {})
    return computed(rope, config.get("sequence_len"))


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield settings with a named rope type, or with a list of factors."""
    if inside := ", ".join(nested(model.config, {})):
        raise UserError(
            f"axolotl sets entries of the outermost configuration, but this model's rotation is in "
            f"its {inside}: train the folder that --for transformers writes."
        )
    for parameters in named_or_listed(target):
        entries = {"max_position_embeddings": target.length, "rope_parameters": parameters}
        settings: dict[str, Any] = {"overrides_of_model_config": entries}
        settings |= {"sequence_len": target.length}
        text = yaml({"base_model": model.name, **settings})
        yield Settings({**model.config, **settings}, text, notes=(ADAPTER,))


RUNTIME = Runtime(
    name="axolotl",
    title="axolotl",
    versions=("0.19",),
    emulate=emulate,
    write=write,
    rank=10,
    file="axolotl.yaml",
    advice="transformers",
    overrides="overrides_of_model_config",
    lengths=("sequence_len",),
)
