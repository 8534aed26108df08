"""What a runtime computes, as one value, and how it is made of what a runtime has read.

Formulas of a name are the same everywhere, and stand in `parts`: what differs is which entries a
runtime reads, what it takes for those it doesn't find, and how long it lets an input be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longitude.core.part import Frequencies
from longitude.core.validate import UserError
from longitude.hf.rope_config import ORIGINAL, is_number
from longitude.parts import DynamicNtk, Linear, Llama3, LongRope, Proportional, Unscaled, Yarn
from longitude.parts.frequencies import magnitude
from longitude.runtimes.target import head_size


@dataclass(frozen=True)
class Effective:
    """What a runtime's own code makes of its settings."""

    inv_freq: tuple[float, ...]  # empty where it does not start
    attention: float  # on cosine and on sine each
    length: int  # positions that it serves at most
    traps: tuple[str, ...] = ()  # names in longitude.export.traps, in the order they were met

    @property
    def starts(self) -> bool:
        """Whether the runtime starts at all."""
        return bool(self.inv_freq)


class Refused(Exception):
    """A runtime does not start with these settings; the one argument is the trap's name."""


@dataclass(frozen=True)
class Read:
    """A rotation as a runtime holds it: all that it has read of it in one dictionary."""

    text: Mapping[str, Any]  # the configuration around it
    own: Mapping[str, Any]
    base: float | None
    dims: int
    traps: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The name of its frequencies."""
        return str(self.own.get("rope_type") or self.own.get("type") or "default")

    @property
    def most(self) -> int:
        """The file's own longest input."""
        found = self.text.get("max_position_embeddings")
        return int(found) if is_number(found) else 2048

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the dictionary; a runtime that misses it does not start."""
        value = self.own.get(key, default)
        if not is_number(value):
            raise Refused("missing key")
        return float(value)

    def maybe(self, key: str) -> float | None:
        """A number of the dictionary, if it has one."""
        value = self.own.get(key)
        return float(value) if is_number(value) else None

    def having(self, **entries: Any) -> Read:
        """The same with other entries; None takes one away."""
        kept = {**self.own, **entries}
        return replace(self, own={key: value for key, value in kept.items() if value is not None})

    def trapped(self, *names: str | None) -> Read:
        """The same with more traps met."""
        return replace(self, traps=(*self.traps, *(name for name in names if name)))


def turned_dims(text: Mapping[str, Any], share: float) -> int:
    """The dimensions of a head that turn; multi-head latent attention says them itself."""
    piece = text.get("qk_rope_head_dim")
    return int(piece) if is_number(piece) else int(head_size(text) * share)


def frequencies(read: Read) -> Frequencies:
    """The frequencies of a rotation by the formulas that every runtime shares."""
    try:
        return _named(read)
    except UserError as mistake:  # bounds that cross, a factor below nothing
        raise Refused("out of range") from mistake


def _named(read: Read) -> Frequencies:
    own = read.own
    match read.kind:
        case "default" | "mrope" | "none":
            return Unscaled()
        case "linear":
            return Linear(read.number("factor"))
        case "dynamic":
            return DynamicNtk(read.most, read.number("factor"))
        case "proportional":
            return Proportional(read.number("partial_rotary_factor", 1.0), read.number("factor", 1))
        case "llama3":
            low, high = (read.number(f"{end}_freq_factor") for end in ("low", "high"))
            original = int(read.number(ORIGINAL))
            return Llama3(read.number("factor"), original=original, low=low, high=high)
        case "yarn":
            return Yarn(
                read.number("factor"),
                original=int(read.number(ORIGINAL)),
                fast=read.maybe("beta_fast") or 32.0,
                slow=read.maybe("beta_slow") or 1.0,
                truncate=bool(own.get("truncate", True)),
            )
        case "longrope" | "su":
            short, long = (_list(own.get(key)) for key in ("short_factor", "long_factor"))
            return LongRope(short, long, original=int(read.number(ORIGINAL)))
    raise Refused("unknown type")


def _list(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not values or not all(map(is_number, values)):
        raise Refused("missing key")
    return tuple(map(float, values))


def computed(
    read: Read,
    parts: Frequencies,
    *,
    attention: float = 1.0,
    length: float,
    seen: float | None = None,
    traps: Iterable[str] = (),
) -> Effective:
    """The value of a runtime: its frequencies at the length that they are made for, `seen`, which
    is the longest input if not given."""
    if read.base is None:
        raise Refused("no theta")
    at = int(length if seen is None else seen)
    try:
        inv = parts.inv_freq(read.dims, read.base, at).tolist()
    except UserError as mistake:  # a list of another length than there are pairs
        raise Refused("wrong list") from mistake
    return Effective(tuple(inv), float(attention), int(length), (*read.traps, *traps))


def yarn_attention(read: Read, *, explicit: bool = True, ratio: bool = True) -> float:
    """YaRN's factor on cosine and sine as transformers finds it: by `attention_factor` if it is
    read, by the ratio of both mscales if they are, or else 0.1 ln s + 1."""
    given, factor = read.maybe("attention_factor"), read.number("factor")
    if explicit and given is not None:
        return given
    top, bottom = read.maybe("mscale"), read.maybe("mscale_all_dim")
    if ratio and top and bottom:
        return magnitude(factor, top) / magnitude(factor, bottom)
    return magnitude(factor)


def longrope_attention(read: Read, scale: float) -> float:
    """LongRoPE's √(1 + ln s / ln L)."""
    original = read.number(ORIGINAL)
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def before(version: str | None, first: str) -> bool:
    """Whether a version came before another; without one it is the newest."""
    return version is not None and _ordered(version) < _ordered(first)


def _ordered(version: str) -> tuple[int, ...]:
    digits = "".join(c if c.isdigit() else " " for c in version.split("rc")[0]).split()
    if not digits:
        raise UserError(f"a version is made of numbers, as 0.32.0 or b11549, but got {version!r}.")
    return tuple(map(int, digits))
