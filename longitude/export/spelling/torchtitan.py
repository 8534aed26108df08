"""torchtitan: the rotation of a model's Python configuration, `RoPE.Config`.

It has three kinds: none, llama (Llama 3.1's) and yarn; no list of factors, and no factor on cosine
and sine but YaRN's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longitude.export.spelling.carriers import theta
from longitude.export.spelling.value import Model, Spelling
from longitude.export.wanted import Wanted
from longitude.parts import Llama3, Ntk, Unscaled, Yarn


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
