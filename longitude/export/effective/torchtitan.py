"""torchtitan: RoPE.Config in Python, with `scaling` none, llama or yarn.

torchtitan/models/common/rope.py of 0.3.0. Its rotation stays one: YaRN's factor on cosine and sine
is left to the model, which only DeepSeek's and gpt-oss's fold into the softmax scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longitude.export.effective.value import Effective, Read, Refused, computed
from longitude.part import Frequencies
from longitude.parts import Llama3, Unscaled, Yarn

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
