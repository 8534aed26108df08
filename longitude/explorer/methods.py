"""The methods that the page offers: every way past the model's window, and every preset.

A way past the window is a candidate of `longitude extend`, with its windows and groups by each
paper's own rule, put into the model's own scheme; a preset takes the page's base, factor and window
where it has arguments of these names.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from longitude.core.lengths import Lengths
from longitude.core.part import PARTS
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.explorer.options import OWN, WRITTEN, Asked, Column
from longitude.extension.candidates import full_layers, proposals
from longitude.hf.merge_scheme import merge_scheme
from longitude.inspection.catalogue import meaning, presets
from longitude.parts import Alibi, Learned
from longitude.presets import PRESETS

MOST_LAYERS = 512
TABLES = ("buckets", "dim", "hidden", "clip", "span")  # sizes of what biases learn
TABLE = 4096  # past this a fresh one would fill the memory
Either = Scheme | Layers


@dataclass(frozen=True)
class Made:
    """What a column comes to, and the numbers that its controls stand at (None: it has none)."""

    scheme: Either
    base: float | None
    factor: float | None


def choices(own_text: str) -> list[dict[str, Any]]:
    """The methods for a model of this scheme, in groups, each with what it is."""
    past = [{"name": n, "what": meaning(PARTS[n])} for n in _ways(kind(parse(own_text)), 1024, 4)]
    first = [{"name": OWN, "what": "The model as it is."}]
    other = [{"name": p.name, "what": p.meaning} for p in presets() if p.scheme]
    written = [{"name": WRITTEN, "what": "What you write."}]
    groups = {"The model": first, "Past its window": past, "Other encodings": other}
    groups["Yours"] = written
    return [{"group": name, "methods": held} for name, held in groups.items() if held]


def made(column: Column, asked: Asked) -> Made:
    """The scheme of a column; raises where there is none."""
    return _made(replace(column, layer=None), asked.own, asked.window, asked.stretch)


@lru_cache(maxsize=256)
def parsed(text: str) -> Either:
    """A scheme, read once for all the answers that name it."""
    return parse(text)


@lru_cache(maxsize=1024)
def _made(column: Column, own_text: str, window: int, stretch: float) -> Made:
    own, factor = _checked(parsed(own_text)), column.factor or stretch
    if column.method == WRITTEN:
        scheme = parse(column.text)
        return Made(_checked(scheme), base_of(scheme), None)
    moved, ways = rebased(own, column.base), _ways(kind(own), window, factor)
    if column.method == OWN:
        return Made(moved, base_of(moved), None)
    if column.method in ways:
        text = ways[column.method]
        scheme = _checked(_joined(full_layers(text, own), moved, window))
        counts = text != _ways(kind(own), window, 2 * factor + 1)[column.method]
        return Made(scheme, base_of(scheme), factor if counts else None)
    if column.method in PRESETS:
        scheme = _checked(_preset(column, window, factor))
        return Made(scheme, base_of(scheme), _factor_of(column, factor))
    known = [OWN, *ways, *PRESETS, WRITTEN]
    near = difflib.get_close_matches(column.method, known, n=3, cutoff=0.4) or known[:4]
    raise UserError(
        f"no method of this model is called {shown(column.method)}: use {', '.join(near)}, or "
        f"{WRITTEN} with a text."
    )


def kind(own: Either) -> str | None:
    """Which methods of `longitude extend` a model of this scheme has, if any."""
    first = own.layer(0)
    if any(own.layer(n).rotary for n in range(len(own))):
        return "rope"
    if any(isinstance(b, Alibi) for b in first.bias):
        return "alibi"
    return "learned" if isinstance(first.embed, Learned) else None


@lru_cache(maxsize=64)
def _ways(kind: str | None, window: int, factor: float) -> dict[str, str]:
    """The texts of `longitude extend` by name, the first of each name."""
    if kind is None:
        return {}
    lengths = Lengths(window, max(window + 1, round(factor * window)))
    found: dict[str, str] = {}
    for method in ("candidates", "more_candidates"):
        for one in proposals(kind, lengths, method):
            found.setdefault(one.name, one.text or "")
    return found


def _joined(text: str, own: Either, window: int) -> Either:
    """A way put into the model's own scheme, layer by layer."""
    asked = parse(text)
    if asked.layer(0).embed is not None:
        return replace(asked.layer(0), mask=own.layer(0).mask)
    each = merge_scheme(text, [own.layer(n) for n in range(len(own))], window)
    return each[0] if len(set(each)) == 1 else Layers(tuple(each))


def _preset(column: Column, window: int, factor: float) -> Either:
    """A preset with the page's numbers in its arguments of the same meaning."""
    make = PRESETS[column.method]
    target = round(factor * window)
    given = dict.fromkeys(("train", "original", "length", "mean"), window)
    given |= dict.fromkeys(("target", "max"), target)
    held: dict[str, Any] = {**given, "base": column.base, "factor": column.factor}
    taken = inspect.signature(make).parameters
    try:
        return make(**{k: v for k, v in held.items() if k in taken and v is not None})
    except TypeError:
        raise UserError(
            f"{column.method} needs more than the page has controls for: write it out as a text, "
            f"with its arguments."
        ) from None


def _factor_of(column: Column, factor: float) -> float | None:
    """The factor that a preset's control stands at: its own default where none is given."""
    taken = inspect.signature(PRESETS[column.method]).parameters
    if "factor" in taken:
        return column.factor or taken["factor"].default
    return factor if {"target", "max"} & taken.keys() else None


def base_of(scheme: Either) -> float | None:
    """The base of the rotation; of the layers that turn most slowly, where they differ."""
    ropes = [scheme.layer(n).rotary for n in range(len(scheme))]
    return max((float(rope.base) for rope in ropes if rope), default=None)


def rebased(scheme: Either, base: float | None) -> Either:
    """The scheme with another base in place of `base_of`'s."""
    held = base_of(scheme)
    if base is None or held is None:
        return scheme
    each = [
        replace(one, rotary=replace(one.rotary, base=base))
        if one.rotary and one.rotary.base == held
        else one
        for one in (scheme.layer(n) for n in range(len(scheme)))
    ]
    return Layers(tuple(each)) if isinstance(scheme, Layers) else each[0]


def _checked(scheme: Either) -> Either:
    """Raise for what the page could draw only with much memory or time."""
    if len(scheme) > MOST_LAYERS:
        raise UserError(f"{len(scheme)} layers are too many here: write {MOST_LAYERS} at most.")
    for part in {bias for n in range(len(scheme)) for bias in scheme.layer(n).bias}:
        if max(getattr(part, name, 0) for name in TABLES) > TABLE:
            raise UserError(
                f"{shown(part)} has a table too large for the page: write at most {TABLE:,}."
            )
    return scheme
