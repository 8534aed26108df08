"""The numbers behind the page: what `longitude show` and `longitude extend` compute, for each
scheme that is asked for, at a few hundred points whatever the length."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from longitude.core.part import Dims
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.explorer.methods import made, parsed
from longitude.explorer.options import OWN, WRITTEN, Asked, Column
from longitude.explorer.visibility import PAST, ROUNDING, at_input, bound, keys
from longitude.extension.distance_map import map_of
from longitude.inspection import curves
from longitude.inspection.catalogue import all_parts, distinct_layers, part_row
from longitude.inspection.curves import notes
from longitude.inspection.rows import WavelengthRow
from longitude.inspection.score_variance import fresh_weights, positions, remapped_distance
from longitude.parts import Randomized
from longitude.viz.text import spans

WITHIN = 8  # points of a decay curve between two of its rows: enough for its swing
KINDS = 12  # of layers that differ, of which one can be chosen
MAP = ("distance", "low", "high")
LONGEST_BIAS = 16384  # tokens of which a bias is drawn,
SHORTEST_BIAS = 2048  # and of one with large weights: both are made of tables of every distance
HEAVY = 100_000  # weights
WIDEST = 1024  # dimensions of all heads together, where a bias learns
NUMBERED = 2**18  # tokens of a text whose positions are numbers of their own, each in memory


class Sizes(NamedTuple):
    """The numbers of a model, and the length that is drawn."""

    window: int
    length: int
    dim: int
    heads: int


def drawn(asked: Asked) -> str:
    """The answer to a state, as JSON: its columns, each with its numbers or its mistake."""
    columns = ",".join(_column(column, asked) for column in asked.columns)
    head = {"link": asked.link, "asked": _plain(asked)}
    return f'{json.dumps(head)[:-1]}, "columns": [{columns}]}}'


def chosen(column: Column, scheme: Scheme | Layers) -> tuple[Scheme, int, list[tuple[int, ...]]]:
    """The scheme that is drawn of layers that differ, which of them it is, and which there are."""
    kinds = distinct_layers(scheme)
    found = list(kinds)[:KINDS]
    # those that see everything say most of what a longer text does
    plain = [n for n, one in enumerate(found) if len(one.mask) == 1]
    index = column.layer if column.layer is not None else (plain or [0])[0]
    if index >= len(found):
        raise UserError(
            f"layer {index} was asked for, but {len(found)} kinds of layers are drawn: give 0 to "
            f"{len(found) - 1}."
        )
    return found[index], index, list(kinds.values())[:KINDS]


def _column(column: Column, asked: Asked) -> str:
    try:
        return _answered(column, asked)
    except UserError as mistake:
        return json.dumps({"method": column.method, "mistake": str(mistake)})


def _answered(column: Column, asked: Asked) -> str:
    found = made(column, asked)
    scheme, index, kinds = chosen(column, found.scheme)
    own = _own_layer(parsed(asked.own), found.scheme, scheme)
    sizes = Sizes(asked.window, asked.length, asked.dim, asked.heads)
    head = {
        "method": column.method,
        "label": _label(column),
        "base": found.base,
        "factor": found.factor,
        "scheme": dump(found.scheme),
        "layer": index,
        "layers": [spans(used) for used in kinds] if len(kinds) > 1 else [],
    }
    return f"{json.dumps(head)[:-1]}, {numbers(scheme, own, sizes)[1:]}"


def _own_layer(own: Scheme | Layers, whole: Scheme | Layers, scheme: Scheme) -> Scheme:
    """The model's own scheme of the layer that is drawn."""
    at = next((n for n in range(len(whole)) if whole.layer(n) == scheme), 0)
    return own.layer(at) if len(own) == len(whole) else own.layer(len(own) - 1)


def _label(column: Column) -> str:
    return {OWN: "as it is", WRITTEN: "yours"}.get(column.method, column.method)


@lru_cache(maxsize=512)
def numbers(scheme: Scheme, own: Scheme, sizes: Sizes) -> str:
    """Everything that is drawn of one scheme, as JSON: columns of numbers by name."""
    window, length, dim, heads = reduced(scheme, sizes)
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    far = min(length, LONGEST_BIAS if weight_count(scheme, dims) < HEAVY else SHORTEST_BIAS)
    most = bound(scheme, own, window, length, dim)
    found = keys(scheme, most, length)
    waves = curves.wavelengths(scheme, length, dim)
    return json.dumps(
        {
            "drawn": dump(scheme),
            "length": length,
            "absolute": at_input(scheme),
            "parts": [part_row(p)._asdict() for p in (all_parts(scheme) or scheme.mask)],
            "notes": [*notes(scheme, far, dims), *_cut(scheme, sizes, length, heads, far)],
            "reach": found.reach,
            "kept": found.kept,
            "causal": scheme.causal,
            "gain": scheme.rotary.frequencies.gain(length) if scheme.rotary else 1.0,
            "states": Counter(w.state for w in waves),
            "longest": max((w.scaled for w in waves if w.scaled), default=None),
            "map": _columns(map_of([scheme], own, length, dim), MAP),
            "decay": _decay(scheme, length, dim),
            "wavelengths": _columns(waves) | stretch(waves, curves.wavelengths(own, length, dim)),
            "bias": _columns(curves.bias(scheme, far, dims)),
            "scale": _columns(curves.scale(scheme, length, dims)),
            "pairs": _pairs(scheme, length, most),
            "keys": _columns(found.runs),
        },
        allow_nan=False,
    )


def reduced(scheme: Scheme, sizes: Sizes) -> Sizes:
    """The sizes with a length, and heads of a learned bias, that can be drawn at once."""
    most = NUMBERED if isinstance(scheme.positions, Randomized) else sizes.length
    heads = max(1, min(sizes.heads, WIDEST // sizes.dim)) if _learns(scheme) else sizes.heads
    return sizes._replace(length=min(sizes.length, most), heads=heads)


def _learns(scheme: Scheme) -> bool:
    """Whether a bias has weights, of which some have the square of a model's width."""
    return any(part.init(Dims(2, 1, 2), None) for part in scheme.bias)


def weight_count(scheme: Scheme, dims: Dims) -> int:
    """How many fresh weights the biases of a scheme have."""
    if not scheme.bias:
        return 0
    return sum(w.numel() for held in fresh_weights(scheme, dims).values() for w in held.values())


def _cut(scheme: Scheme, sizes: Sizes, length: int, heads: int, far: int) -> list[str]:
    """What is drawn of less than was asked for."""
    said = {
        f"Drawn for {length:,} tokens, not {sizes.length:,}.": length < sizes.length,
        f"Its learned weights are drawn for {heads} heads, not {sizes.heads}.": heads < sizes.heads,
        f"The bias is drawn up to {far:,} tokens.": bool(scheme.bias) and far < length,
    }
    return [sentence for sentence, holds in said.items() if holds]


def stretch(new: Sequence[WavelengthRow], own: Sequence[WavelengthRow]) -> dict[str, list[Any]]:
    """How many times longer each wavelength is than the model's own (None: one stands still)."""
    if len(new) != len(own):
        return {"stretch": [None] * len(new)} if new else {}
    both = zip(new, own, strict=True)
    return {"stretch": [a.scaled / b.scaled if a.scaled and b.scaled else None for a, b in both]}


def _columns(rows: Sequence[Any], names: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Rows turned by a quarter: a list for each name, which is half as long to write."""
    if not rows:
        return {}
    return dict(zip(names or rows[0]._fields, map(list, zip(*rows, strict=True)), strict=True))


def _decay(scheme: Scheme, length: int, dim: int) -> dict[str, list[Any]]:
    """The mean cosine over pairs by distance, and its swing up to the next row."""
    if scheme.rotary is None:
        return {}
    edges, _, swing = curves.mean_cosine(scheme, scheme.rotary, length, dim, WITHIN)
    named = zip(("mean", "low", "high"), (swing.nanmean(1), *curves.extremes(swing)), strict=True)
    return {"distance": edges} | {k: [*map(curves.number, v.tolist())] for k, v in named}


def _pairs(scheme: Scheme, length: int, most: float) -> dict[str, list[Any]]:
    """Which pairs are visible, and how far apart they are believed, in whole tokens (hidden: -1);
    and which are past what training showed. A row of keys for each query."""
    count = min(curves.GRID, length)
    tokens = torch.linspace(0, length - 1, count, dtype=torch.float64).round().long()
    where = positions(scheme, length, tokens)
    told = remapped_distance(scheme, where[:, None], where).abs()
    measured = torch.where(told.isnan(), told, where.to(told)) if at_input(scheme) else told
    past = measured > most * (1 + ROUNDING)
    whole = told.nan_to_num(-1.0).round().long()
    return {"tokens": tokens.tolist(), "believed": whole.tolist(), PAST: past.int().tolist()}


def _plain(asked: Asked) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in ("model", "own", *Sizes._fields)}
