"""A config.json as llama.cpp's convert_hf_to_gguf.py writes it into a GGUF file's keys.

conversion/ of b11549: `rope_parameters` before `rope_scaling`; linear and yarn by name, with keys
for the betas and the factor on cosine and sine that llama.cpp then does not read; longrope as two
tensors and llama3 as one; "dynamic" is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longitude.export.effective.transformers import version5
from longitude.export.effective.value import Effective, Read, frequencies, longrope_attention
from longitude.export.wanted import of_text
from longitude.hf.configs.stated import ORIGINAL
from longitude.parts.rotary.frequencies.unscaled import powers

ARCHITECTURES = {"mistral": "llama", "smollm3": "smollm3", "phi3": "phi3"}  # where names differ


def gguf_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and rotary tensors that the converter would write, by their names."""
    text = of_text(config)
    first = text.get("rope_parameters")
    held = {k: v for k, v in text.items() if k != "rope_scaling"} if first else text
    read = version5(held)
    kind = str(text.get("model_type", "llama"))
    arch = ARCHITECTURES.get(kind, kind)
    own = {
        "context_length": read.most,
        "rope.dimension_count": read.dims,
        "rope.freq_base": read.base,
        **{f"rope.scaling.{key}": value for key, value in _scaling(read).items()},
    }
    flags = {k: v for k, v in config.items() if k.startswith("-") or k == "num_ctx"}
    named = {f"{arch}.{key}": value for key, value in own.items()}
    return {"general.architecture": arch, **named, **_tensors(read), **flags}


def _scaling(read: Read) -> dict[str, Any]:
    match read.kind:
        case "linear":
            return {"type": "linear", "factor": read.number("factor")}
        case "yarn":
            keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            told = {to: read.own[key] for key, to in keys.items() if read.own.get(key)}
            given = read.maybe("attention_factor")
            dead = {} if given is None else {"yarn_attn_factor": given}
            return told | dead | _yarn(read)
        case "longrope":
            scale = read.most / read.number(ORIGINAL)
            gain = longrope_attention(read, scale)
            original = int(read.number(ORIGINAL))
            return {"type": "longrope", "original_context_length": original, "attn_factor": gain}
    return {}


def _yarn(read: Read) -> dict[str, Any]:
    original = int(read.number(ORIGINAL))
    return {"type": "yarn", "factor": read.number("factor"), "original_context_length": original}


def _tensors(read: Read) -> dict[str, list[float]]:
    match read.kind:
        case "longrope":
            lists = {"short": read.own["short_factor"], "long": read.own["long_factor"]}
            return {f"rope_factors_{name}.weight": list(each) for name, each in lists.items()}
        case "llama3":
            base = float(read.base or 0)
            scaled = frequencies(read).inv_freq(read.dims, base, read.most)
            return {"rope_freqs.weight": (1 / (scaled * powers(read.dims, base))).tolist()}
    return {}


def explained(config: Mapping[str, Any], found: Effective) -> Effective:
    """The traps of the converter beside those of llama.cpp."""
    read = version5(config)
    lost = ["dynamic is static"] if read.kind == "dynamic" else []
    if read.kind == "yarn":
        lost += ["truncate ignored"] * (not read.own.get("truncate", True))
        lost += ["attention factor ignored"] * (read.maybe("attention_factor") is not None)
        lost += ["mscale ignored"] * bool(read.maybe("mscale") and read.maybe("mscale_all_dim"))
    if read.kind == "longrope":
        lost += ["attention factor ignored"]
    return Effective(found.inv_freq, found.attention, found.length, (*found.traps, *lost))
