"""TensorRT-LLM: `rope_scaling` with `type` before `rope_type`, and no `attention_factor`.

tensorrt_llm/_torch/attention_backend/interface.py, RopeParams.from_config. An original length that
is left out is 1,024, YaRN takes one mscale alone, LongRoPE its factor from the lengths, and
"dynamic" an `alpha` that stretches the base once, which is 1 if left out.

TensorRT-LLM: `model_kwargs` in the YAML file of its server, over the checkpoint's config.json.

It drops attention_factor, and has YaRN's from mscale alone: 1 + 0.1 m ln s. Without an original
length it would take 1,024.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL
from longitude.parts import Ntk, Unscaled
from longitude.parts.frequencies import magnitude
from longitude.runtimes.effective import Effective, Read, computed, frequencies, longrope_attention
from longitude.runtimes.rope_dictionaries import by_mscale, fixed, level, placed
from longitude.runtimes.settings import Model, Spelling, yaml
from longitude.runtimes.target import Wanted
from longitude.runtimes.transformers import overridden, version5


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
