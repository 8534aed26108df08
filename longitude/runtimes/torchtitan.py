"""torchtitan: RoPE.Config in Python, with `scaling` none, llama or yarn.

torchtitan/models/common/rope.py of 0.3.0. Its rotation stays one: YaRN's factor on cosine and sine
is left to the model, which only DeepSeek's and gpt-oss's fold into the softmax scale.

torchtitan: the rotation of a model's Python configuration, `RoPE.Config`.

It has three kinds: none, llama (Llama 3.1's) and yarn; no list of factors, and no factor on cosine
and sine but YaRN's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.core.part import Frequencies
from longitude.parts import Llama3, Ntk, Unscaled, Yarn
from longitude.runtimes.effective import Effective, Read, Refused, computed
from longitude.runtimes.rope_dictionaries import theta
from longitude.runtimes.settings import Model, Spelling
from longitude.runtimes.target import Wanted

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


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What torchtitan computes from the fields of its RoPE.Config."""
    if not {"dim", "max_seq_len"} <= config.keys():
        raise Refused("missing key")
    c = {**DEFAULTS, **config}
    read = Read({}, {}, float(c["theta"]), int(c["dim"]))
    scaled = c["scaling"] == "yarn" and c["rope_factor"] > 1
    traps = ["temperature left out"] if scaled else []
    return computed(read, _frequencies(c), length=int(c["max_seq_len"]), traps=traps)


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
    raise Refused("unknown type")


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its kind, where it has one."""
    fields = _fields(w)
    if fields is not None:
        fields = {"dim": w.dims, "max_seq_len": w.target, "theta": theta(w), **fields}
        inside = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        text = f"rope = RoPE.Config({inside})\n"
        yield Spelling("torchtitan", version, fields, text, "torchtitan.py")


def _fields(w: Wanted) -> dict[str, Any] | None:
    match w.rope.frequencies:
        case Unscaled() | Ntk():
            return {"scaling": "none"}
        case Llama3() as f:
            bounds = {"low_freq_factor": float(f.low), "high_freq_factor": float(f.high)}
            length = {"original_max_position_embeddings": f.original}
            return {"scaling": "llama", "scaling_factor": float(f.factor), **bounds, **length}
        case Yarn(ramp="code") as f:
            betas = {"beta_fast": float(f.fast), "beta_slow": float(f.slow)}
            rest = {"original_seq_len": f.original, "truncate": f.truncate}
            return {"scaling": "yarn", "rope_factor": float(f.factor), **betas, **rest}
    return None
