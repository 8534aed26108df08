"""TensorRT-LLM: `rope_scaling` with `type` before `rope_type`, and no `attention_factor`.

tensorrt_llm/_torch/attention_backend/interface.py, RopeParams.from_config. An original length that
is left out is 1,024, YaRN takes one mscale alone, LongRoPE its factor from the lengths, and
"dynamic" an `alpha` that stretches the base once, which is 1 if left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longitude.export.effective.transformers import overridden, version5
from longitude.export.effective.value import (
    Effective,
    Read,
    computed,
    frequencies,
    longrope_attention,
)
from longitude.hf.configs.stated import ORIGINAL
from longitude.parts import Ntk, Unscaled
from longitude.parts.rotary.frequencies.yarn import magnitude


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What TensorRT-LLM computes."""
    told = config.get("model_kwargs") or {}
    read, own = version5(overridden(config, told, "model_kwargs")), version5(config)
    told_theta = any(isinstance(v, Mapping) and v.get("rope_theta") for v in told.values())
    read = read.trapped("theta dropped" if read.base != own.base and not told_theta else None)
    kind = read.own.get("type") or read.kind
    read = read.having(rope_type=kind, **{ORIGINAL: read.number(ORIGINAL, 1024)})
    length = int(config.get("max_seq_len") or read.most)
    match kind:
        case "yarn":
            return _yarn(read, length)
        case "longrope":
            gain = longrope_attention(read, read.most / read.number(ORIGINAL))
            near, far = read.own.get("short_factor"), read.own.get("long_factor")
            traps = ["attention factor ignored"] + ["longrope switch"] * (near != far)
            seen = config.get("max_seq_len") or read.number(ORIGINAL) + 1
            return computed(
                read, frequencies(read), attention=gain, length=length, seen=seen, traps=traps
            )
        case "dynamic":
            alpha = read.maybe("alpha") or 1.0
            parts = Unscaled() if alpha == 1 else Ntk(alpha)
            return computed(read, parts, length=length, traps=["dynamic is static"])
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            read = read.having(**{**bounds, **read.own})
    return computed(read, frequencies(read), length=length)


def _yarn(read: Read, length: int) -> Effective:
    factor = read.number("factor", 1.0)
    top, bottom = read.number("mscale", 1.0), read.number("mscale_all_dim", 0.0)
    plain = read.having(truncate=None, factor=factor)
    traps = ["attention factor ignored"] * (read.maybe("attention_factor") is not None)
    traps += ["truncate ignored"] * (not read.own.get("truncate", True))
    gain = magnitude(factor, top) / magnitude(factor, bottom)
    return computed(plain, frequencies(plain), attention=gain, length=length, traps=traps)
