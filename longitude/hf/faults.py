"""Faults of a config.json: entries on the rotation that transformers reads differently than meant.

transformers replaces missing, duplicated or misspelt entries by defaults, with a warning at most,
and the model rotates at other frequencies than it was trained with. Each fault is a function of a
rope dictionary that returns the value to show in its message, or None. A serious fault leaves it
unclear how the checkpoint rotates; the others are worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.hf.rope_config import (
    LISTS,
    ORIGINAL,
    SECTIONS,
    SHARE,
    THETAS,
    TYPES,
    RopeDict,
    is_number,
    main_rope_dict,
    rope_dicts,
)

KEYS = {kind: {*keys} - {SHARE} for kind, (_, keys) in TYPES.items()}
EVERY = {"rope_type", "type", "rope_theta", SHARE, *SECTIONS}
IDLE = {"finetuned", *set().union(*KEYS.values())}  # harmless where the type does not read them
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": LISTS,
}
NOT_NUMBERS = {"rope_type", "type", "truncate", "finetuned", *SECTIONS, *LISTS}
BOUNDS = {
    "llama3": (("low_freq_factor", 1), ("high_freq_factor", 4)),
    "yarn": (("beta_slow", 1), ("beta_fast", 32)),
}
COUNTS = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
COUNTS += ("max_position_embeddings", "sliding_window")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a configuration, and what to do about it."""

    name: str
    sentence: str
    serious: bool


Check = Callable[[RopeDict], str | None]
RULES: dict[Fault, Check] = {}  # in the order in which to correct them


def rule(sentence: str, *, serious: bool = True) -> Callable[[Check], Check]:
    """Register a check in the table, under its function's name."""

    def enter(wrong: Check) -> Check:
        RULES[Fault(wrong.__name__.replace("_", " "), sentence, serious)] = wrong
        return wrong

    return enter


def faults(raw: Mapping[str, Any]) -> list[Fault]:
    """Return every fault of a config.json's rotation, the serious ones first."""
    unique = {
        replace(fault, sentence=fault.sentence.format(at=s.where, kind=s.kind, got=got)): None
        for s in rope_dicts(raw)
        for fault, wrong in RULES.items()
        if (got := wrong(s)) is not None
    }
    return sorted(unique, key=lambda fault: not fault.serious)


def check(raw: Mapping[str, Any], name: str = "") -> None:
    """Raise the first serious fault of a config.json; `name` is the model's, for the message."""
    for fault in faults(raw):
        if fault.serious:
            raise UserError(f"{name}: {fault.sentence}" if name else fault.sentence)


@rule("{got}, but should be a whole number above zero: correct it.")
def no_count(s: RopeDict) -> str | None:
    for key in COUNTS:
        value = s.raw.get(key)
        read = key != "sliding_window" or s.named(key)
        if isinstance(value, str) or (is_number(value) and value <= 0 and read):
            return f"{key} is {shown(value)}"
    return None


@rule("{got}, and the first is no multiple of the second: correct one.")
def uneven_heads(s: RopeDict) -> str | None:
    heads, width = (s.raw.get(key) for key in ("num_attention_heads", "hidden_size"))
    shared = s.raw.get("num_key_value_heads")
    if is_number(heads) and is_number(shared) and shared > 0 and heads % shared:
        return f"num_attention_heads is {heads} and num_key_value_heads {shared}"
    if s.raw.get("head_dim") or not s.head or s.named("head_dim", "configuration"):
        return None  # heads need not fill the width
    uneven = is_number(heads) and heads > 0 and is_number(width) and width % heads
    return f"hidden_size is {width} and num_attention_heads {heads}" if uneven else None


@rule("the rotation in {at} should be a dictionary, but got {got}: give it a rope_type in braces.")
def not_a_dictionary(s: RopeDict) -> str | None:
    values = [s.raw.get(key) for key in ("rope_scaling", "rope_parameters")]
    wrong = [value for value in values if value is not None and not isinstance(value, Mapping)]
    return shown(wrong[0]) if wrong else None


@rule("rope_parameters and rope_scaling disagree on {got}, and one is dropped: keep one of them.")
def two_dictionaries(s: RopeDict) -> str | None:
    dicts = [s.raw.get(key) for key in ("rope_parameters", "rope_scaling")]
    one, other = (_plain(main_rope_dict(d), s) if isinstance(d, Mapping) else {} for d in dicts)
    differ = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
    return ", ".join(differ) if one and other and differ else None


def _plain(d: Mapping[str, Any], s: RopeDict) -> dict[str, Any]:
    kind = d.get("rope_type") or d.get("type") or "default"
    full = {"rope_theta": s.raw.get("rope_theta"), **d, "rope_type": kind, "type": None}
    return {key: value for key, value in full.items() if value is not None} if d else {}


@rule("type and rope_type of {at} differ, {got}, and transformers goes by rope_type: keep one.")
def two_types(s: RopeDict) -> str | None:
    both = [s.own.get(key) for key in ("type", "rope_type")]
    differ = None not in both and len({s.renamed(str(kind)) for kind in both}) > 1
    return " and ".join(map(shown, both)) if differ else None


@rule(f"transformers knows no rope_type {{got}}, as in {{at}}: it has {', '.join(KEYS)}.")
def unknown_type(s: RopeDict) -> str | None:
    return shown(s.kind) if s.kind not in KEYS else None


@rule("neither transformers nor its model reads {got} in {at}: remove it or correct its spelling.")
def unknown_key(s: RopeDict) -> str | None:
    unknown = sorted(key for key in s.own if key not in EVERY | IDLE)
    files = ("modeling", "configuration") if s.model else ()
    unread = [key for key in unknown if not any(s.named(key, file) for file in files)]
    return unread[0] if unread else None


@rule("{got} in {at}, but should be a number: write one.")
def no_number(s: RopeDict) -> str | None:
    wrong = (k for k in s.own if k in (IDLE | EVERY) - NOT_NUMBERS and not is_number(s.own[k]))
    return next((f"{k} is {shown(s.own[k])}" for k in wrong if s.own[k] is not None), None)


@rule("{at} of type {kind} has no {got}, without which there are no frequencies: add it.")
def missing_key(s: RopeDict) -> str | None:
    missing = next((key for key in REQUIRED.get(s.kind, ()) if s.own.get(key) is None), None)
    return "factor" if s.kind == "yarn" and "factor" not in s.own else missing


@rule("{at} has no rope_theta, only {got}, so a default would be the base: add rope_theta.")
def no_theta(s: RopeDict) -> str | None:
    return _lacks_theta(s) if "rope_parameters" in s.where else None


def _lacks_theta(s: RopeDict) -> str | None:
    lost = s.own.get("rope_theta") is None and all(s.raw.get(name) is None for name in THETAS)
    return ", ".join(sorted(s.own)) if s.own and lost else None


@rule("rope_theta is {got}, and transformers 5 takes the one inside {at}, 4 the other: keep one.")
def two_thetas(s: RopeDict) -> str | None:
    above = s.raw.get("rope_theta")
    dictionaries = [d for d in s.whole.values() if isinstance(d, Mapping)] or [s.whole]
    inside = [d["rope_theta"] for d in dictionaries if d.get("rope_theta") is not None]
    return None if above is None or not inside or above in inside else f"{above} and {inside[0]}"


@rule(
    f"{{at}} of type {{kind}} does not say how long the model was trained, and transformers takes "
    f"max_position_embeddings, {{got}}: add {ORIGINAL}."
)
def no_original(s: RopeDict) -> str | None:
    needed = ORIGINAL in KEYS.get(s.kind, ()) and s.number(ORIGINAL) is None
    return shown(s.raw.get("max_position_embeddings", "its default")) if needed else None


@rule(f"{ORIGINAL} is {{got}}, and transformers ignores the one inside {{at}}: keep one.")
def two_originals(s: RopeDict) -> str | None:
    both = [d.get(ORIGINAL) for d in (s.raw, s.own)]
    differ = not s.nested and None not in both and both[0] != both[1]
    return " and ".join(map(shown, both)) if differ else None


@rule("{got} in {at}, which is out of range: correct it.")
def out_of_range(s: RopeDict) -> str | None:
    least = {"factor": 1, "rope_theta": 1.000001, ORIGINAL: 1, "attention_factor": 0}
    numbers = {key: s.number(key) for key in least}
    wrong = [f"{k} is {n}" for k, n in numbers.items() if n is not None and not n >= least[k]]
    shares = [] if 0 < s.share <= 1 else [f"partial_rotary_factor is {s.share}"]
    return next(iter(wrong + shares), None)


@rule("the lower bound of {kind} in {at} is above the upper one ({got}): swap them.")
def bounds_crossed(s: RopeDict) -> str | None:
    ends = [(name, s.number(name) or default) for name, default in BOUNDS.get(s.kind, ())]
    crossed = bool(ends) and ends[0][1] > ends[1][1]
    return " and ".join(f"{name}={end}" for name, end in ends) if crossed else None


@rule(
    "short_factor and long_factor of {at} have a number for each pair, but got {got}: correct it."
)
def wrong_lists(s: RopeDict) -> str | None:
    short, long = (s.own.get(key) for key in LISTS)
    if s.kind != "longrope" or short is None or long is None:
        return None
    if not all(isinstance(each, list) and all(map(is_number, each)) for each in (short, long)):
        return "something else than lists of numbers"
    pairs = int(s.head * s.share) // 2 if s.head else len(short)
    return None if len(short) == len(long) == pairs else f"{len(short)}, {len(long)} for {pairs}"


@rule(
    "{at} rotates {got} dimensions of a head, which can't be paired: correct head_dim or its share."
)
def odd_head(s: RopeDict) -> str | None:
    dim = int(s.head * (1 if s.kind == "proportional" else s.share)) if s.head else 0
    return f"{dim} of {s.head}" if dim % 2 else None


@rule(
    "{at} rotates {got} of each head, but this model's code rotates whole heads: remove "
    "partial_rotary_factor or correct model_type."
)
def partial_ignored(s: RopeDict) -> str | None:
    latent = "qk_rope_head_dim" in s.raw and s.kind != "default"  # a share of another dimension
    read = "rotary_dim" in s.raw or s.named("partial_rotary_factor")
    if s.share == 1 or s.kind == "proportional" or latent or read:
        return None
    return shown(s.share)


@rule("truncate is {got} in {at}, but is read only in the outer dictionary: move it there.")
def truncate_ignored(s: RopeDict) -> str | None:
    value = s.own.get("truncate", True) if s.kind == "yarn" else True
    is_read = not s.nested or bool(value) == bool(s.whole.get("truncate", True))
    return None if is_read else shown(value)


@rule("{at}, {got}, has no rope_theta: add the model's default to be sure.", serious=False)
def theta_by_default(s: RopeDict) -> str | None:
    return _lacks_theta(s) if "rope_scaling" in s.where else None  # version 4 never stored it there


@rule("{at} has the entry {got}, which type {kind} does not use: remove it.", serious=False)
def idle_key(s: RopeDict) -> str | None:
    idle = IDLE - KEYS.get(s.kind, IDLE)
    return next((key for key in sorted(s.own) if key in idle and not s.named(key)), None)


@rule("{at} gives {got} alone, which changes nothing: give both mscales or none.", serious=False)
def mscale_alone(s: RopeDict) -> str | None:
    present = [key for key in ("mscale", "mscale_all_dim") if s.own.get(key)]
    return present[0] if s.kind == "yarn" and len(present) == 1 else None


@rule(
    "the factor of {at} is not the ratio of lengths ({got}); the factor is used: make them agree.",
    serious=False,
)
def other_ratio(s: RopeDict) -> str | None:
    factor, original, longest = s.number("factor"), s.number(ORIGINAL), s.most
    if s.kind not in ("yarn", "longrope") or not factor or not original or not longest:
        return None
    return None if longest / original in (1, factor) else f"{factor} for {longest} / {original}"


@rule(
    "{at} scales positions, but max_position_embeddings is not extended, so servers cut prompts "
    f"there: set it to {ORIGINAL} × factor ({{got}}).",
    serious=False,
)
def not_extended(s: RopeDict) -> str | None:
    original, longest = s.number(ORIGINAL), s.most if s.kind in ("llama3", "yarn") else None
    factor = s.number("factor") or 1.0
    if not (original and longest and original >= longest and factor > 1):
        return None
    return f"{original * factor:.0f}, not {longest:.0f}"
