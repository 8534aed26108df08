"""Learned positions: a longer table among the weights, which whatever reads the folder then has.

There is nothing to say but how long an input may be; a folder of its own holds the new weights.
"""

from __future__ import annotations

from longitude.core.scheme import Layers, Scheme
from longitude.parts import Hierarchical, LearnedInterpolated, LearnedTiled
from longitude.runtimes.settings import NEWEST, Model, Spelling
from longitude.runtimes.transformers import TEXT

WORDS = {
    "transformers": (TEXT, "load.py"),
    "vllm": ("vllm serve {folder} --max-model-len {target}\n", "vllm.sh"),
    "sglang": (
        "python -m sglang.launch_server --model-path {folder} --context-length {target}\n",
        "sglang.sh",
    ),
}


def is_table(scheme: Scheme | Layers) -> bool:
    """Whether a scheme is a table of positions read further, and nothing else."""
    embed = scheme.layer(0).embed
    grown = isinstance(embed, Hierarchical | LearnedInterpolated | LearnedTiled)
    return grown and scheme == Scheme.of(embed, *scheme.layer(0).mask)


def table(runtime: str, model: Model, target: int, version: str | None) -> Spelling:
    """How a runtime is started on the folder with the longer table."""
    text, file = WORDS[runtime]
    config = {**model.config, **dict.fromkeys(_lengths(model), target)}
    said = text.replace("{target}", str(target))
    return Spelling(runtime, version or NEWEST[runtime], config, said, file, config)


def _lengths(model: Model) -> list[str]:
    """The entries that say how long the table is, which GPT-2 calls otherwise."""
    return [k for k in ("max_position_embeddings", "n_positions", "n_ctx") if k in model.config]
