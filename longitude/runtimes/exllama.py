"""exllamav3 (version 1 and later) and exllamav2 (before): settings of config.json only.

Source: exllamav3/util/rope.py and model/config.py of 1.6.5. The base is the top-level one, or that
of `rope_parameters`, never that of `rope_scaling`. YaRN's factor is the ratio of the lengths if the
original one is given, whatever `factor` says; mscales are not read. LongRoPE's factor on cosine and
sine comes from the lengths. exllamav2 reads `rope_scaling` only, computes YaRN's ramp over the
longest input, and stops if both `type` and `rope_type` are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.core.validate import UserError
from longitude.hf.rope_config import ORIGINAL, RopeDict, is_number, main_rope_dict, rope_type
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import (
    DoesNotStart,
    Effective,
    RopeEntries,
    before,
    rotated_dims,
)
from longitude.runtimes.rope_dictionaries import both_spellings, equal_lengths, named_or_listed
from longitude.runtimes.target import Target, text_config
from longitude.runtimes.transformers import default_theta

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    old = before(version, "1")
    rope = _read(text_config(config), old)
    match rope.kind:
        case "yarn":
            original, longest = rope.optional(ORIGINAL), rope.max_length
            stated = rope.number("factor", 1.0)
            if old:
                issue = "other original" if original != longest else None
                unread = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale")
                plain = rope.updated(**{ORIGINAL: longest}, **dict.fromkeys(unread)).noting(issue)
                return plain.computed(longest, issues=["attention factor ignored"])
            factor = longest / original if original else stated
            plain = rope.updated(**{ORIGINAL: original or longest}, factor=factor, mscale=None)
            plain = plain.noting("factor from lengths" if factor != stated else None)
            return plain.computed(longest, issues=rope.ignoring("mscale"))
        case "longrope" | "su":
            original = rope.number(ORIGINAL, rope.config.get(ORIGINAL))
            rope = rope.updated(**{ORIGINAL: original})
            plain = rope.updated(attention_factor=None, factor=None)
            return plain.computed(rope.max_length, issues=["attention factor ignored"])
        case "dynamic":
            raise DoesNotStart("unknown type")
        case "llama3":
            rope = rope.updated(**{**LLAMA3, **rope.entries})
    return rope.computed(rope.max_length)


def _read(text: Mapping[str, Any], old: bool) -> RopeEntries:
    parameters, scaling = text.get("rope_parameters"), text.get("rope_scaling")
    rope_parameters = {} if old else main_rope_dict(parameters)
    own = main_rope_dict(scaling) if isinstance(scaling, Mapping) else rope_parameters
    if old and own.get("type") and own.get("rope_type"):
        raise DoesNotStart("both types")
    bases = (text.get("rope_theta"), rope_parameters.get("rope_theta"), default_theta(text))
    base = next(float(b) for b in bases if is_number(b))
    stated = RopeDict(text, {}, rope_parameters, "")
    share = 1.0 if rope_type(own) == "proportional" else stated.share
    unread = old and isinstance(parameters, Mapping) and (not own or not text.get("rope_theta"))
    return RopeEntries(text, own, base, rotated_dims(text, share)).noting(
        "rope_parameters unread" if unread else None,
        "theta beside" if base != own.get("rope_theta", base) else None,
    )


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield config.json with a named rope type, or with a list of factors."""
    if before(version, "1"):
        raise UserError(
            f"schemes can't be exported to {RUNTIME.called(version)} (exllamav2 computes YaRN's "
            f"ramp over the longest input): use 1 or newer."
        )
    candidates = (*named_or_listed(target), *equal_lengths(target)) if all(target.inv_freq) else ()
    for parameters in candidates:
        config = both_spellings(model, parameters, target.length)
        yield Settings(config, config=config)


RUNTIME = Runtime(
    name="exllama",
    title="exllama",
    versions=("0.3.2", "1.6.5"),
    emulate=emulate,
    write=write,
    rank=8,
    start="python examples/chat.py -m {folder} -cs {target}\n",
    file="exllama.sh",
    writes="folder",
    advice="vllm",
    lints=("config.json",),
)
