"""torchtitan: `RoPE.Config` in a model's Python configuration, with `scaling` none, llama or yarn.

torchtitan/models/common/rope.py of 0.3.0. There is no list of factors, and no factor on cosine and
sine: YaRN's is left to the model, and only DeepSeek's and gpt-oss's fold it into the softmax scale.
The settings are the fields of RoPE.Config, with `dim` and `max_seq_len`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.core.part import Frequencies
from longitude.parts import Llama3, Ntk, Unscaled, Yarn
from longitude.runtimes import Issue, Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import DoesNotStart, Effective, RopeEntries
from longitude.runtimes.rope_dictionaries import base_of
from longitude.runtimes.target import Target

DEFAULTS = {
    "theta": 10000.0,
    "scaling": "none",
    "scaling_factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_seq_len": 4096,
    "truncate": True,
}


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What torchtitan computes from the fields of its RoPE.Config."""
    if not {"dim", "max_seq_len"} <= config.keys():
        raise DoesNotStart("missing key")
    c = {**DEFAULTS, **config}
    rope = RopeEntries({}, {}, float(c["theta"]), int(c["dim"]))
    scaled = c["scaling"] == "yarn" and c["rope_factor"] > 1
    issues = ["temperature left out"] * scaled
    return rope.computed(int(c["max_seq_len"]), _frequencies(c), issues=issues)


def _frequencies(c: Mapping[str, Any]) -> Frequencies:
    match c["scaling"]:
        case "llama":
            ends = {"low": float(c["low_freq_factor"]), "high": float(c["high_freq_factor"])}
            original = int(c["original_max_position_embeddings"])
            return Llama3(float(c["scaling_factor"]), original=original, **ends)
        case "yarn" if c["rope_factor"] > 1:
            return Yarn(
                float(c["rope_factor"]),
                original=int(c["original_seq_len"]),
                fast=float(c["beta_fast"]),
                slow=float(c["beta_slow"]),
                truncate=bool(c["truncate"]),
            )
        case "none" | "yarn":
            return Unscaled()
    raise DoesNotStart("unknown type")


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """The fields of one of its three kinds."""
    match target.rope.frequencies:
        case Unscaled() | Ntk():
            fields: dict[str, Any] = {"scaling": "none"}
        case Llama3() as f:
            fields = {"scaling": "llama", "scaling_factor": float(f.factor)}
            fields |= {"low_freq_factor": float(f.low), "high_freq_factor": float(f.high)}
            fields |= {"original_max_position_embeddings": f.original}
        case Yarn(ramp="code") as f:
            fields = {"scaling": "yarn", "rope_factor": float(f.factor)}
            fields |= {"beta_fast": float(f.fast), "beta_slow": float(f.slow)}
            fields |= {"original_seq_len": f.original, "truncate": f.truncate}
        case _:
            return
    fields = {"dim": target.dims, "max_seq_len": target.length, "theta": base_of(target), **fields}
    arguments = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    yield Settings(fields, f"rope = RoPE.Config({arguments})\n")


RUNTIME = Runtime(
    name="torchtitan",
    title="torchtitan",
    versions=("0.3",),
    emulate=emulate,
    write=write,
    rank=11,
    file="torchtitan.py",
    advice="vllm",
    issues=(
        Issue(
            "temperature left out",
            "attention",
            "torchtitan leaves YaRN's factor on cosine and sine to the model's own code.",
            "fold its square into the softmax scale, or set attention_factor=1 in the scheme.",
        ),
    ),
)
