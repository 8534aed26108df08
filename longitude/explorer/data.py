"""The numbers of the page: what `longitude show` and `longitude extend` compute for each scheme, at
a few hundred points whatever the length; which tokens the last query of a text sees, which ones a
cache keeps for it, and which lie past the distances that training showed.

A rotary pair that completes less than one rotation in the trained window has seen the angles up to
window × θ and no others (Liu et al. 2023, arXiv:2310.05209). Rotated at θ' for a distance d, it is
inside that range while d θ' <= window θ; pairs that complete a rotation have seen every angle. So
the minimum of window × θ/θ' over slow pairs bounds d. For a bias, d is the distance in units of the
model's own slopes, and the window bounds it; embeddings are bounded by position, as far as their
table goes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Scheme
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.explorer.methods import parse_cached, resolve
from longitude.explorer.state import OWN, WRITTEN, Column, PageState
from longitude.extension.distance_map import map_of
from longitude.hf.families.alibi import LINEAR, slopes
from longitude.inspection import curves
from longitude.inspection.catalogue import all_parts, distinct_layers, part_row
from longitude.inspection.rows import WavelengthRow
from longitude.inspection.score_variance import fresh_weights, positions, remapped_distance
from longitude.parts import Randomized
from longitude.viz.text import spans

SAMPLES = 8  # points of a decay curve between two of its rows, for its range
MAX_KINDS = 12  # distinct layers that can be chosen from
MAP = ("distance", "low", "high")
MAX_BIAS, MAX_HEAVY_BIAS = 16384, 2048  # tokens drawn of a bias, and of a heavy one
HEAVY = 100_000  # weights of a heavy bias; biases are drawn from tables over every distance
MAX_WIDTH = 1024  # dimensions of all heads together, for a learned bias
MAX_RANDOMIZED = 2**18  # tokens of randomized positions, each of them in memory
DROPPED, HIDDEN, KNOWN, PAST = STATES = ("dropped", "hidden", "known", "past")
HEADS = 8  # number of heads whose slopes are compared
ROUNDING = 1e-9  # relative: 4096 × θ/θ' with a factor of exactly 4 is 16384
STEPS = 64  # probes per interval in each round of the search


class Sizes(NamedTuple):
    """The sizes of a model, and the length that is drawn."""

    window: int
    length: int
    dim: int
    heads: int


def draw(state: PageState) -> str:
    """The answer to a state, as JSON: its columns, each with its numbers or an error."""
    columns = ",".join(_column(column, state) for column in state.columns)
    sizes = {name: getattr(state, name) for name in ("model", "own", *Sizes._fields)}
    head = {"link": state.link, "asked": sizes}
    return f'{json.dumps(head)[:-1]}, "columns": [{columns}]}}'


def _column(column: Column, state: PageState) -> str:
    """One column as JSON; if layers differ, it shows the layers of one scheme."""
    try:
        resolved = resolve(column, state)
        layers, own = resolved.scheme, parse_cached(state.own)
        drawn_layers = [*distinct_layers(layers).items()][:MAX_KINDS]
        # layers without a window say most about longer texts
        full = next((n for n, (layer, _) in enumerate(drawn_layers) if len(layer.mask) == 1), 0)
        index, count = full if column.layer is None else column.layer, len(drawn_layers)
        if index >= count:
            raise UserError(
                f"there is no layer {index}: {count} kinds of layers are drawn, so give 0 to "
                f"{count - 1}."
            )
        scheme = drawn_layers[index][0]
        at = next((n for n in range(len(layers)) if layers.layer(n) == scheme), 0)
        own_layer = own.layer(at if len(own) == len(layers) else len(own) - 1)
        sizes = Sizes(state.window, state.length, state.dim, state.heads)
        body = numbers(scheme, own_layer, sizes)
    except UserError as error:
        return json.dumps({"method": column.method, "mistake": str(error)})
    head = {
        "method": column.method,
        "label": {OWN: "baseline", WRITTEN: "custom"}.get(column.method, column.method),
        "base": resolved.base,
        "factor": resolved.factor,
        "scheme": dump(layers),
        "layer": index,
        "layers": [spans(used) for _, used in drawn_layers] if count > 1 else [],
    }
    return f"{json.dumps(head)[:-1]}, {body[1:]}"


@lru_cache(maxsize=512)
def numbers(scheme: Scheme, own: Scheme, sizes: Sizes) -> str:
    """Everything that is drawn of one scheme, as JSON: columns of numbers by name."""
    window, length, dim, heads = reduced(scheme, sizes)
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    weights = fresh_weights(scheme, dims).values() if scheme.bias else ()
    heavy = sum(w.numel() for tensors in weights for w in tensors.values()) >= HEAVY
    bias_end = min(length, MAX_HEAVY_BIAS if heavy else MAX_BIAS)
    known = bound(scheme, own, window, length, dim)
    last, waves = keys(scheme, known, length), curves.wavelengths(scheme, length, dim)
    cuts = {
        f"Drawn for {length:,} tokens, not {sizes.length:,}.": length < sizes.length,
        f"Its learned weights are drawn for {heads} heads, not {sizes.heads}.": heads < sizes.heads,
        f"The bias is drawn up to {bias_end:,} tokens.": bool(scheme.bias) and bias_end < length,
    }
    return json.dumps(
        {
            "drawn": dump(scheme),
            "length": length,
            "absolute": at_input(scheme),
            "parts": [part_row(p)._asdict() for p in (all_parts(scheme) or scheme.mask)],
            "notes": [
                *curves.notes(scheme, bias_end, dims),
                *(text for text, holds in cuts.items() if holds),
            ],
            "reach": last.reach,
            "kept": last.kept,
            "causal": scheme.causal,
            "gain": scheme.rotary.frequencies.gain(length) if scheme.rotary else 1.0,
            "states": Counter(w.state for w in waves),
            "longest": max((w.scaled for w in waves if w.scaled), default=None),
            "map": _columns(
                map_of([scheme], own, bias_end if learns(scheme, own) else length, dim), MAP
            ),
            "decay": _decay(scheme, length, dim),
            "wavelengths": _columns(waves) | stretch(waves, curves.wavelengths(own, length, dim)),
            "bias": _columns(curves.bias(scheme, bias_end, dims)),
            "scale": _columns(curves.scale(scheme, length, dims)),
            "pairs": _pairs(scheme, length, known),
            "keys": _columns(last.runs),
        },
        allow_nan=False,
    )


def reduced(scheme: Scheme, sizes: Sizes) -> Sizes:
    """Limit the length, and the heads of a learned bias, to what can be drawn interactively."""
    limit = MAX_RANDOMIZED if isinstance(scheme.positions, Randomized) else sizes.length
    heads = max(1, min(sizes.heads, MAX_WIDTH // sizes.dim)) if learns(scheme) else sizes.heads
    return sizes._replace(length=min(sizes.length, limit), heads=heads)


def learns(*schemes: Scheme) -> bool:
    """Whether a bias of these schemes has weights, and so is a table over every distance."""
    return any(part.init(Dims(2, 1, 2), None) for scheme in schemes for part in scheme.bias)


def stretch(new: Sequence[WavelengthRow], own: Sequence[WavelengthRow]) -> dict[str, list[Any]]:
    """How many times longer each wavelength is than the model's own (None: frequency 0)."""
    if len(new) != len(own):
        return {"stretch": [None] * len(new)} if new else {}
    pairs = zip(new, own, strict=True)
    return {"stretch": [a.scaled / b.scaled if a.scaled and b.scaled else None for a, b in pairs]}


def _columns(rows: Sequence[Any], names: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Rows transposed to one list per name, which takes half the time to serialise."""
    named = names or (rows[0]._fields if rows else ())
    return dict(zip(named, map(list, zip(*rows, strict=True)), strict=True)) if rows else {}


def _decay(scheme: Scheme, length: int, dim: int) -> dict[str, list[Any]]:
    """The mean cosine over pairs by distance, and its range up to the next row."""
    if scheme.rotary is None:
        return {}
    edges, _, values = curves.mean_cosine(scheme, scheme.rotary, length, dim, SAMPLES)
    named = zip(("mean", "low", "high"), (values.nanmean(1), *curves.extremes(values)), strict=True)
    return {"distance": edges} | {k: [*map(curves.number, v.tolist())] for k, v in named}


def _pairs(scheme: Scheme, length: int, most: float) -> dict[str, list[Any]]:
    """Which pairs are visible, at which distance in whole tokens (hidden: -1), and which are past
    the trained distances: a row of keys for each query."""
    count = min(curves.GRID, length)
    tokens = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    at = positions(scheme, length, tokens)
    distance = remapped_distance(scheme, at[:, None], at).abs()
    coordinate = (
        torch.where(distance.isnan(), distance, at.to(distance)) if at_input(scheme) else distance
    )
    past = coordinate > most * (1 + ROUNDING)
    rounded = distance.nan_to_num(-1.0).round().long()
    return {"tokens": tokens.tolist(), "believed": rounded.tolist(), PAST: past.int().tolist()}


# what the last query sees


class Run(NamedTuple):
    """Consecutive tokens, first to last, of one state."""

    first: int
    last: int
    state: str


class Keys(NamedTuple):
    """The tokens of a text as the last query sees them."""

    runs: tuple[Run, ...]
    kept: int  # tokens in a cache
    reach: int | None  # the largest distance (or position) before the first PAST; None: none is


def at_input(scheme: Scheme) -> bool:
    """Whether positions enter by an embedding alone, so that positions matter, not distances."""
    return scheme.embed is not None and scheme.rotary is None


def bound(scheme: Scheme, own: Scheme, window: int, length: int, head_dim: int) -> float:
    """The largest distance, or input position, that training showed; infinite if it showed all."""
    if scheme.rotary and own.rotary:
        new, old = (
            rope.inv_freq(rope.dim(head_dim), length) for rope in (scheme.rotary, own.rotary)
        )
        if new.shape != old.shape:
            return float(window)
        slow = (old * window < 2 * math.pi) & (new > 0)
        return (window * old[slow] / new[slow]).amin().item() if slow.any() else math.inf
    new, old = (next((b for b in s.bias if isinstance(b, LINEAR)), None) for s in (scheme, own))
    if new and old:
        return window * (slopes(old, HEADS) / slopes(new, HEADS)).amin().item()
    if at_input(scheme):
        rows = getattr(scheme.embed, "reach", getattr(scheme.embed, "length", window))
        return math.inf if rows is None else rows - 1.0  # the last position that has a vector
    flat = all(b.flat_beyond is not None and b.flat_beyond <= window for b in scheme.bias)
    return math.inf if flat and scheme.rotary is None else float(window)


def keys(scheme: Scheme, most: float, length: int) -> Keys:
    """The state of each token, in runs; `most` is the largest known distance, or the largest known
    position where positions enter at the input."""
    absolute = at_input(scheme)

    def state(tokens: Tensor) -> Tensor:
        at = positions(scheme, length, tokens)
        last = positions(scheme, length, torch.tensor(length - 1))
        distance = remapped_distance(scheme, last, at)
        code = torch.full_like(tokens, STATES.index(DROPPED))
        for area in scheme.areas():
            code[area.ever(last, at)] = STATES.index(HIDDEN)
        code[~distance.isnan()] = STATES.index(KNOWN)
        value = torch.where(distance.isnan(), distance, at.to(distance)) if absolute else distance
        code[value.abs() > most * (1 + ROUNDING)] = STATES.index(PAST)
        return code

    parts = runs(state, length)
    past = [run.first if absolute else length - 1 - run.last for run in parts if run.state == PAST]
    kept = sum(run.last - run.first + 1 for run in parts if run.state != DROPPED)
    return Keys(parts, kept, min(past) - 1 if past else None)


def runs(state: Callable[[Tensor], Tensor], length: int) -> tuple[Run, ...]:
    """Runs of tokens in one state; the ends are searched for between a few hundred samples."""
    samples = _samples(length)
    codes = state(samples)
    changes = (codes[1:] != codes[:-1]).nonzero()[:, 0]
    low, high, before = samples[changes], samples[changes + 1], codes[changes]
    while (high - low > 1).any():
        step = -(-(high - low) // STEPS)
        probes = low[:, None] + step[:, None] * torch.arange(STEPS + 1)
        probes = torch.minimum(probes, high[:, None])
        same = state(probes.flatten()).view_as(probes) == before[:, None]
        first = same.int().argmin(1)  # the first probe in another state
        high = probes.gather(1, first[:, None])[:, 0]
        low = torch.maximum(low, high - step)
    ends = [*low.tolist(), length - 1]
    starts = [0, *(n + 1 for n in low.tolist())]
    kinds = [*before.tolist(), int(codes[-1])]
    return tuple(Run(a, b, STATES[k]) for a, b, k in zip(starts, ends, kinds, strict=True))


@lru_cache(maxsize=64)
def _samples(length: int) -> Tensor:
    """Tokens to sample: dense at both ends of a text, where states change."""
    near = curves.sample(length)
    return torch.tensor(sorted({*near, *(length - 1 - n for n in near)}))
