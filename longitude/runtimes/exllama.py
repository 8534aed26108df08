"""exllamav3 (from version 1) and exllamav2 (before): config.json alone.

exllamav3/util/rope.py and model/config.py of 1.6.5. The base is the top one, or `rope_parameters`'
own, never `rope_scaling`'s. YaRN's factor is the ratio of the lengths where the original one is
given, whatever `factor` says; its mscales are not read. LongRoPE's factor on cosine and sine comes
from the lengths. exllamav2 reads `rope_scaling` alone, ramps over the longest input, and stops
where both `type` and `rope_type` are given.

exllamav3: it reads config.json in either spelling, and has no flags for rotations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, RopeDict, is_number, main_rope_dict
from longitude.runtimes.effective import (
    Effective,
    Read,
    Refused,
    before,
    computed,
    frequencies,
    longrope_attention,
    turned_dims,
    yarn_attention,
)
from longitude.runtimes.rope_dictionaries import both, either, level
from longitude.runtimes.settings import Model, Spelling, refuse_before
from longitude.runtimes.target import Wanted, of_text
from longitude.runtimes.transformers import THETA

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What exllama computes."""
    old = before(version, "1")
    read = _held(of_text(config), old)
    match read.kind:
        case "yarn":
            return _yarn(read, old)
        case "longrope" | "su":
            read = read.having(**{ORIGINAL: read.number(ORIGINAL, read.text.get(ORIGINAL))})
            scale = read.most / read.number(ORIGINAL)
            traps = ["attention factor ignored", "longrope switch"]
            if read.own.get("short_factor") == read.own.get("long_factor"):
                traps.remove("longrope switch")
            gain = longrope_attention(read, scale)
            return computed(read, frequencies(read), attention=gain, length=read.most, traps=traps)
        case "dynamic":
            raise Refused("unknown type")
        case "llama3":
            read = read.having(**{**LLAMA3, **read.own})
    return computed(read, frequencies(read), length=read.most)


def _held(text: Mapping[str, Any], old: bool) -> Read:
    inside = text.get("rope_parameters")
    other = main_rope_dict(inside) if isinstance(inside, Mapping) and not old else {}
    scaling = text.get("rope_scaling")
    own = dict(main_rope_dict(scaling)) if isinstance(scaling, Mapping) else dict(other)
    if old and own.get("type") and own.get("rope_type"):
        raise Refused("both types")
    thetas = (text.get("rope_theta"), other.get("rope_theta"))
    base = next((float(t) for t in thetas if is_number(t)), THETA)
    unread = old and isinstance(inside, Mapping) and (not own or not text.get("rope_theta"))
    lost = base != own.get("rope_theta", base)
    shares = (text.get("partial_rotary_factor"), other.get("partial_rotary_factor"), 1.0)
    share = next(float(s) for s in shares if is_number(s))
    stated = RopeDict(text, own, own, "")
    share = 1.0 if stated.kind == "proportional" else share
    read = Read(text, own, base, turned_dims(text, share))
    return read.trapped(
        "rope_parameters unread" if unread else None, "theta beside" if lost else None
    )


def _yarn(read: Read, old: bool) -> Effective:
    original = read.maybe(ORIGINAL)
    stated = read.number("factor", 1.0)
    if old:
        plain = read.having(
            **{ORIGINAL: read.most}, beta_fast=None, beta_slow=None, truncate=None
        ).trapped("other original" if original != read.most else None)
        gain = yarn_attention(plain, explicit=False, ratio=False)
        traps = ["attention factor ignored"]
        return computed(plain, frequencies(plain), attention=gain, length=read.most, traps=traps)
    factor = read.most / original if original else stated
    plain = read.having(**{ORIGINAL: original or read.most}, factor=factor)
    plain = plain.trapped("factor from lengths" if factor != stated else None)
    gain = yarn_attention(plain, ratio=False)
    ignored = read.maybe("mscale") and read.maybe("mscale_all_dim")
    traps = ["mscale ignored"] if ignored else []
    return computed(plain, frequencies(plain), attention=gain, length=read.most, traps=traps)


TEXT = "python examples/chat.py -m {folder} -cs {target}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    refuse_before("exllama", version, "1", "exllamav2's YaRN ramps over other lengths")
    for parameters in (*either(w, model.config), *level(w, model.config)):
        config = both(model, parameters, w.target)
        text = TEXT.replace("{target}", str(w.target))
        yield Spelling("exllama", version, config, text, "exllama.sh", config)
