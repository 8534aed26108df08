"""Settings that the tests of what runtimes compute share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longitude.core.scheme import Scheme
from longitude.runtimes import runtimes, select
from longitude.runtimes.effective import Effective, emulated
from longitude.runtimes.export import Export
from longitude.runtimes.lint import LintResult, lint_settings

SIZES = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 32,
}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8192, "rope_theta": 1e5}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e5}
BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 8192, "rope_theta": 5e5, **BOUNDS}
RISING = [1.0 + 0.1 * i for i in range(32)]
LONGROPE = {"rope_type": "longrope", ORIGINAL: 8192, "rope_theta": 1e5, "factor": 4.0} | {
    "short_factor": RISING,
    "long_factor": [2 * g for g in RISING],
}


def both(own: dict[str, Any], most: int = 32768, **more: Any) -> dict[str, Any]:
    """A config.json in both spellings."""
    plain = {"max_position_embeddings": most, "rope_theta": own["rope_theta"]}
    return {**SIZES, **plain, "rope_parameters": own, "rope_scaling": own, **more}


def five(own: dict[str, Any], most: int = 32768, **more: Any) -> dict[str, Any]:
    """A config.json in the spelling of transformers 5 alone."""
    return {**SIZES, "max_position_embeddings": most, "rope_parameters": own, **more}


def four(own: dict[str, Any], most: int = 32768, **more: Any) -> dict[str, Any]:
    """A config.json in the spelling of transformers 4 alone."""
    scaling = {k: v for k, v in own.items() if k != "rope_theta"}
    plain = {"max_position_embeddings": most, "rope_theta": own["rope_theta"]}
    return {**SIZES, **plain, "rope_scaling": scaling, **more}


def gguf(arch: str = "llama", **own: Any) -> dict[str, Any]:
    """The keys of a GGUF file; in a name, __ stands for a dot."""
    sizes = {"embedding_length": 256, "attention.head_count": 4, "context_length": 32768}
    named = {**sizes, "rope.freq_base": 1e5} | {k.replace("__", "."): v for k, v in own.items()}
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in named.items()}


def emulate(name: str, config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What a runtime computes, by its name."""
    return emulated(runtimes()[name].emulate, config, version)


def request(name: str, scheme: str, version: str | None = None) -> Export:
    """A scheme for a runtime, by its name."""
    return Export(runtimes()[name], scheme, version)


def lint(
    settings: Mapping[str, Any], names: Sequence[str] = (), scheme: Scheme | None = None
) -> LintResult:
    """What runtimes make of settings, by their names."""
    return lint_settings(settings, select(",".join(names)) if names else (), scheme)
