"""What a runtime computes, as one value, and the formulas that runtimes share.

Frequencies of a type ("yarn", "llama3", …) have the same formula everywhere, in `longitude.parts`.
Runtimes differ in which entries they read, in their defaults and in the context they allow.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.part import Frequencies
from longitude.core.validate import UserError
from longitude.hf.rope_config import TYPES, MissingEntryError, is_number, rope_type
from longitude.hf.rope_config import frequencies as read_frequencies
from longitude.parts import LongRope
from longitude.parts.rotary_tables import attention_scaling
from longitude.runtimes import Issue, ordered
from longitude.runtimes.target import LENGTHS, Target, head_size

DEFAULT_BASE = 10000.0
TOLERANCE = 1e-6  # relative: float32, which GGUF files store, has 6e-8
MALFORMED = (TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError, KeyError)
_TABLE = tomllib.loads(Path(__file__).with_name("issues.toml").read_text(encoding="utf-8"))
ISSUES = {name: Issue(name, **entry) for name, entry in _TABLE.items()}


@dataclass(frozen=True)
class Effective:
    """What a runtime's own code computes from its settings."""

    inv_freq: tuple[float, ...]  # empty if the runtime does not start
    attention: float  # factor on cosine and on sine, each
    length: int  # the longest input
    issues: tuple[str, ...] = ()  # names of issues, in the order they were encountered
    remap: str = ""  # remap of positions, as a scheme writes it

    @property
    def starts(self) -> bool:
        return bool(self.inv_freq)


@dataclass(frozen=True)
class Difference:
    """How far what a runtime computes is from what the settings mean."""

    frequencies: float = 0.0  # the largest relative one; infinite if the number of pairs differs
    attention: float = 0.0  # relative
    length: int = 0  # positions too many, or too few if negative
    starts: bool = True
    remap: bool = False  # whether positions are remapped differently

    @property
    def affects(self) -> set[str]:
        if not self.starts:
            return {"start"}
        names = ("frequencies", "attention", "length", "remap")
        sizes = {name: getattr(self, name) for name in names}
        return {name for name, size in sizes.items() if abs(size) > TOLERANCE}


def difference(meant: Effective | Target, found: Effective) -> Difference:
    """Compare what is meant with what a runtime computes."""
    if not found.starts:
        return Difference(starts=False)
    attention = abs(found.attention / meant.attention - 1) if meant.attention else 0.0
    largest = float("inf")
    if len(meant.inv_freq) == len(found.inv_freq):
        pairs = [(a, b) for a, b in zip(meant.inv_freq, found.inv_freq, strict=True) if a != b]
        largest = max((abs(b - a) / max(abs(a), 1e-300) for a, b in pairs), default=0.0)
    remapped = isinstance(meant, Effective) and meant.remap != found.remap
    return Difference(largest, attention, found.length - meant.length, remap=remapped)


def emulated(
    emulate: Callable[..., Effective], config: Mapping[str, Any], version: str | None = None
) -> Effective:
    """Return what a runtime's own code computes from these settings, by default in its newest
    version. If it would not start, there are no frequencies, and the last issue says why.

    The settings are what the runtime receives: the entries of config.json, and under its file name
    the content of tokenizer_config.json; or the keys of a GGUF file, its rotary tensors as lists
    ("rope_freqs.weight"), flags and parameters of a Modelfile. Start options are under their own
    names ("--hf-overrides": {…}).
    """
    try:
        return emulate(config, version)
    except DoesNotStart as reason:
        return Effective((), 0.0, 0, (str(reason),))
    except UserError:
        raise
    except MALFORMED:  # a list in place of a number, say: the runtime's formulas fail as ours do
        return Effective((), 0.0, 0, ("out of range",))


class DoesNotStart(Exception):
    """Raised for settings at which a runtime stops; the argument is the name of the issue."""


@dataclass(frozen=True)
class RopeEntries:
    """A rotation as a runtime holds it after reading a configuration."""

    config: Mapping[str, Any]  # the configuration around it
    entries: Mapping[str, Any]  # its rope dictionary
    base: float | None
    dims: int  # rotated dimensions of a head
    issues: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return rope_type(self.entries)

    @property
    def max_length(self) -> int:
        """The longest input that the configuration states, or 2,048."""
        stated = filter(is_number, map(self.config.get, LENGTHS))
        return int(next(stated, 2048))

    def number(self, key: str, default: float | None = None) -> float:
        """Return an entry as a number; without one the runtime does not start."""
        value = self.entries.get(key, default)
        if not is_number(value):
            raise DoesNotStart("missing key")
        return float(value)

    def optional(self, key: str) -> float | None:
        value = self.entries.get(key)
        return float(value) if is_number(value) else None

    def updated(self, **entries: Any) -> RopeEntries:
        """Return a copy with changed entries; the value None removes an entry."""
        merged = {**self.entries, **entries}
        return replace(self, entries={k: v for k, v in merged.items() if v is not None})

    def noting(self, *issues: str | None) -> RopeEntries:
        """Return a copy with further issues; None is skipped."""
        return replace(self, issues=(*self.issues, *(name for name in issues if name)))

    def ignoring(self, *keys: str) -> list[str]:
        """Return the issues of a runtime that does not read these entries, if they are set."""
        is_set = {
            "attention_factor": self.optional("attention_factor") is not None,
            "mscale": bool(self.optional("mscale") and self.optional("mscale_all_dim")),
            "truncate": not self.entries.get("truncate", True),
        }
        names = {"attention_factor": "attention factor ignored"}
        return [names.get(key, f"{key} ignored") for key in keys if is_set[key]]

    def frequencies(self) -> Frequencies:
        """Return the frequencies by the formulas that all runtimes share."""
        kind = {"mrope": "default", "none": "default", "su": "longrope"}.get(self.kind, self.kind)
        if kind not in TYPES:
            raise DoesNotStart("unknown type")
        if kind == "yarn":
            self.number("factor")
        try:
            return read_frequencies({**self.entries, "rope_type": kind}, self.max_length)
        except MissingEntryError as error:
            raise DoesNotStart("missing key") from error
        except UserError as error:  # crossed bounds, a factor below zero
            raise DoesNotStart("out of range") from error

    def attention(self, *unread: str) -> float:
        """Return the formula's own factor on cosine and sine, without the entries `unread`."""
        return attention_scaling(self.updated(**dict.fromkeys(unread)).frequencies(), 1)

    def computed(
        self,
        length: float,
        frequencies: Frequencies | None = None,
        *,
        attention: float | None = None,
        at: float | None = None,
        issues: Iterable[str] = (),
    ) -> Effective:
        """Return what the runtime computes, with the frequencies for an input of `at` (by default
        `length`) tokens. `attention` is the factor on cosine and sine, by default the formula's."""
        frequencies = self.frequencies() if frequencies is None else frequencies
        if self.base is None:
            raise DoesNotStart("no theta")
        try:
            inv = frequencies.inv_freq(self.dims, self.base, int(at or length)).tolist()
        except UserError as error:  # a list whose length is not the number of pairs
            raise DoesNotStart("wrong list") from error
        if not all(map(math.isfinite, inv)):  # the base is not positive
            raise DoesNotStart("out of range")
        two_lists = isinstance(frequencies, LongRope) and frequencies.short != frequencies.long
        switch = ["longrope switch"] if two_lists else []
        all_issues = (*self.issues, *issues, *switch)
        gain = attention_scaling(frequencies, 1) if attention is None else attention
        return Effective(tuple(inv), float(gain), int(length), all_issues)


def rotated_dims(config: Mapping[str, Any], share: float) -> int:
    """The rotated dimensions of a head; multi-head latent attention has an entry for them."""
    stated = config.get("qk_rope_head_dim")
    return int(stated) if is_number(stated) else int(head_size(config) * share)


def before(version: str | None, first: str) -> bool:
    """Whether a version is older than `first`; None is the newest."""
    return version is not None and ordered(version) < ordered(first)
