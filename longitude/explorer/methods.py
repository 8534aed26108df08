"""The methods that the page offers: every candidate of `longitude extend`, and every preset.

A candidate has its windows and groups by its paper's rule, and is merged into the model's own
scheme; a preset takes the page's base, factor and window where it has arguments of these names.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from longitude.core.lengths import Lengths
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.explorer.state import OWN, WRITTEN, Column, PageState, kind
from longitude.extension.candidates import full_layers, proposals
from longitude.hf.merge_scheme import as_layers, merge_scheme
from longitude.inspection.catalogue import parts, presets
from longitude.presets import PRESETS

MAX_LAYERS = 512
TABLE_FIELDS = ("buckets", "dim", "hidden", "clip", "span")  # sizes of what biases learn
MAX_TABLE = 4096  # larger fresh tables would fill the memory
Either = Scheme | Layers


@dataclass(frozen=True)
class Resolved:
    """The scheme of a column, and the values of its controls (None: it has none)."""

    scheme: Either
    base: float | None
    factor: float | None


def choices(own_text: str) -> list[dict[str, Any]]:
    """The methods for a model of this scheme, in groups, each with its meaning."""
    extending = _candidates(parse(own_text), 1024, 4)
    meanings = {row.name: row.meaning for row in (*parts(), *presets())}
    groups = {
        "Model": [{"name": OWN, "what": "The model’s own scheme."}],
        "Context extension": [{"name": n, "what": meanings[n]} for n in extending],
        "Other encodings": [
            {"name": p.name, "what": p.meaning}
            for p in presets()
            if p.scheme and p.name not in extending
        ],
        "Custom": [{"name": WRITTEN, "what": "A scheme that you write."}],
    }
    return [{"group": name, "methods": methods} for name, methods in groups.items() if methods]


def resolve(column: Column, state: PageState) -> Resolved:
    """The scheme of a column; raises where there is none."""
    return _resolve(replace(column, layer=None), state.own, state.window, state.stretch)


parse_cached = lru_cache(maxsize=256)(parse)


@lru_cache(maxsize=1024)
def _resolve(column: Column, own_text: str, window: int, stretch: float) -> Resolved:
    own, factor = _checked(parse_cached(own_text)), column.factor or stretch
    if column.method == WRITTEN:
        scheme = _checked(parse(column.text))
        return Resolved(scheme, base_of(scheme), None)
    rebased, candidates = with_base(own, column.base), _candidates(own, window, factor)
    if column.method == OWN:
        return Resolved(rebased, base_of(rebased), None)
    if column.method in candidates:
        text = candidates[column.method]
        scheme = _checked(_merged(full_layers(text, own), rebased, window))
        depends = text != _candidates(own, window, 2 * factor + 1)[column.method]
        return Resolved(scheme, base_of(scheme), factor if depends else None)
    if column.method in PRESETS:
        return _preset(column, window, factor)
    known = [OWN, *candidates, *PRESETS, WRITTEN]
    near = difflib.get_close_matches(column.method, known, n=3, cutoff=0.4) or known[:4]
    raise UserError(
        f"no method of this model is called {shown(column.method)}: use {', '.join(near)}, or "
        f"{WRITTEN} with a text."
    )


@lru_cache(maxsize=64)
def _candidates(own: Either, window: int, factor: float) -> dict[str, str]:
    """The candidates of `longitude extend`, the first of each name."""
    lengths = Lengths(window, max(window + 1, round(factor * window)))
    texts: dict[str, str] = {}
    for method in ("candidates", "more_candidates") if kind(own) else ():
        for one in proposals(kind(own) or "", lengths, method):
            texts.setdefault(one.name, one.text or "")
    if isinstance(own, Layers):  # as few as tile the model: too few to split
        texts.pop("split", None)
    return texts


def _merged(text: str, own: Either, window: int) -> Either:
    """A candidate merged into the model's own scheme, layer by layer."""
    scheme = parse(text)
    if (first := scheme.layer(0)).embed is not None:
        return replace(first, mask=own.layer(0).mask)
    count = max(len(own), len(scheme))
    return as_layers(merge_scheme(text, [own.layer(n) for n in range(count)], window), scheme)


def _preset(column: Column, window: int, factor: float) -> Resolved:
    """A preset with the page's numbers in its arguments of the same meaning."""
    make = PRESETS[column.method]
    given: dict[str, Any] = {"base": column.base, "factor": column.factor}
    given |= dict.fromkeys(("train", "original", "length", "mean"), window)
    given |= dict.fromkeys(("target", "max"), round(factor * window))
    parameters = inspect.signature(make).parameters
    try:
        scheme = make(**{k: v for k, v in given.items() if k in parameters and v is not None})
    except TypeError:
        raise UserError(
            f"{column.method} needs arguments that the page has no controls for: write it out as "
            f"a text."
        ) from None
    if "factor" in parameters:
        shown_factor = column.factor or parameters["factor"].default
    else:
        shown_factor = factor if {"target", "max"} & parameters.keys() else None
    return Resolved(_checked(scheme), base_of(scheme), shown_factor)


def base_of(scheme: Either) -> float | None:
    """The base of the rotation; the largest, where layers differ."""
    ropes = [scheme.layer(n).rotary for n in range(len(scheme))]
    return max((float(rope.base) for rope in ropes if rope), default=None)


def with_base(scheme: Either, base: float | None) -> Either:
    """The scheme with another base in place of `base_of`'s."""
    old = base_of(scheme)
    if base is None or old is None:
        return scheme
    each = [
        replace(one, rotary=replace(one.rotary, base=base))
        if one.rotary and one.rotary.base == old
        else one
        for one in (scheme.layer(n) for n in range(len(scheme)))
    ]
    return replace(scheme, schemes=tuple(each)) if isinstance(scheme, Layers) else each[0]


def _checked(scheme: Either) -> Either:
    """Raise for what would take too much memory or time to draw."""
    if len(scheme) > MAX_LAYERS:
        raise UserError(f"{len(scheme)} layers are too many here: write {MAX_LAYERS} at most.")
    for part in {bias for n in range(len(scheme)) for bias in scheme.layer(n).bias}:
        if max(getattr(part, name, 0) for name in TABLE_FIELDS) > MAX_TABLE:
            raise UserError(
                f"{shown(part)} has a table too large for the page: write at most {MAX_TABLE:,}."
            )
    return scheme
