"""Four properties of a position encoding, as numbers, for any scheme.

Scores s(i, j) of random content and distances between their codes are those of score_variance.py;
tokens count from 0, n is the length and the last query is n - 1.

- Uniqueness: min |s(n-1, j) - s(n-1, j')| over keys j ≠ j' that the last query sees. 0 means that
  two keys have the same position code.
- Extrapolation: extrapolation.py.
- Relativity: the distance from s(i, j) to the nearest function of i - j, which is the root of its
  mean variance among pairs of one distance. Below 1e-9 it is rounding and counts as 0.
- Decay: a key's score by its distance r from the last query, with remaps, frequencies, xPos and
  position policies in r θ_t as the scheme has them:
  rotation: the mean cosine (1/h) Σ_t cos(r θ_t) over h rotary pairs, the score of equal content
  relative to r = 0; bound: the mean of |S_1|, …, |S_h| with S_j = Σ_(t<j) e^(i r θ_t), which by
  Abel's transformation bounds the score of pairs h_t = q_t k*_t by max |h_(t+1) - h_t| times their
  sum (Su et al. 2021, section 3.4.3); bias: its mean over heads for zero content; embedding: the
  cosine between the vectors of two positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Layers, Scheme, scheme_of
from longitude.core.validate import UserError
from longitude.inspection import catalogue
from longitude.inspection.curves import between, notes, number, sample
from longitude.inspection.extrapolation import embedded_length, extrapolation, trained_length
from longitude.inspection.rows import Curve, Properties, Relativity, SchemeProperties, Uniqueness
from longitude.inspection.score_variance import CONTENTS, MAX_TABLE, SEED, ScoreModel
from longitude.parts import Multiplicative, Rerope, Streaming
from longitude.parts.remaps import LLAMA3
from longitude.presets import PRESETS

LENGTH, TRAINED, LAYERS = 4096, 1024, 4  # for the comparison of presets
MAX_COMPARED = 4096  # keys at most whose codes are compared with each other
BLOCK = 512
QUERIES, DISTANCES = 16, 32  # at which relativity is computed
ALL_DISTANCES = 65_536  # up to this length every distance is computed, beyond it a sample
DECAY_BLOCK = 8192
FLAT = 1e-6  # share of a curve's range: this close to its minimum, a curve has reached it
ROUNDING = 1e-9
# presets whose factor is not the ratio of lengths: the call's length or the paper's rule decides
OWN_FACTOR = ("dynamic_ntk_llama", "su_leaky_rerope")


def check(
    scheme: Scheme | Layers,
    *,
    dim: int | None = None,
    heads: int = 8,
    length: int | None = None,
    trained: int | None = None,
) -> SchemeProperties:
    """The properties of a scheme, or of each of its distinct layers. The default length is 4,096,
    or one that shows all lengths the scheme names; the default trained length is the one that the
    scheme names, or a quarter of the length; the default head size is 64, or what the scheme's
    list of factors needs."""
    layers = catalogue.distinct_layers(scheme)
    dim = max(map(catalogue.default_dim, layers)) if dim is None else dim
    if length is None:
        named = [s for s in layers if catalogue.named_trained_length(s)]
        length = max(LENGTH, *(catalogue.default_length(s) for s in named), 0)
    catalogue.check_sizes(length, dim, heads)
    if trained is not None and trained < 2:
        raise UserError(f"a trained length of {trained} tokens has no distance: give 2 or more.")
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    sheets = []
    for layer, used in layers.items():
        grows = [p for p in layer.bias if getattr(p, "grows", False)]
        if grows and length > MAX_TABLE:
            raise UserError(
                f"{grows[0]} keeps a number for every distance: give a length of at most "
                f"{MAX_TABLE}."
            )
        model = ScoreModel(layer, length, dims)
        reach, refused = embedded_length(model)
        lines = notes(layer, length, dims, f"measured over {CONTENTS} drawn queries and keys")
        if layer.embed and model.input_weights:
            lines.append(f"{layer.embed.name} is learned: its weights are drawn (seed {SEED}).")
        trained_at = trained or trained_length(layer) or max(2, length // 4)
        sheets.append(
            Properties(
                written=str(layer),
                layers=used,
                uniqueness=uniqueness(model, reach),
                extrapolation=extrapolation(model, trained_at, reach, refused),
                relativity=relativity(model, reach),
                decay=decay(model, reach),
                notes=tuple(lines),
            )
        )
    return SchemeProperties(str(scheme), length, dim, heads, tuple(sheets))


def compare(
    *, length: int = LENGTH, trained: int = TRAINED, dim: int = 64, heads: int = 8,
    names: Collection[str] = (),
) -> Iterator[SchemeProperties]:  # fmt: skip
    """The properties of each preset, in the order of the table of presets, or of those named."""
    if not 2 <= trained <= length:
        raise UserError(
            f"schemes are compared from a trained length to a longer one, but got {trained} and "
            f"{length}: give --trained below --length."
        )
    factor = length / trained
    values: dict[str, Any] = {  # of presets' parameters, by name
        **dict.fromkeys(("train", "original", "length", "mean", "chunk"), trained),
        "target": length,
        "max": 4 * length,
        "factor": factor,
        "window": max(2, trained // 4),
        "local": max(1, trained // 64),
        "groups": LLAMA3[: dim // 2],
        "layers": LAYERS,
        "near": scheme_of(Streaming(4, max(1, trained // 2 - 4))),
        "far": scheme_of(Rerope(max(1, trained // 8))),
        "short": (1.0,) * (dim // 2),
        "long": (factor,) * (dim // 2),
    }
    for name in names or PRESETS:
        scheme = name  # shown if the preset can't be built
        parameters = values.keys() & inspect.signature(PRESETS[name]).parameters.keys()
        parameters -= {"factor"} if name in OWN_FACTOR else set()
        try:
            built = PRESETS[name](**{p: values[p] for p in parameters})
            scheme = str(built)
            properties = check(built, dim=dim, heads=heads, length=length, trained=trained)
            yield replace(properties, name=name)
        except UserError as error:
            yield SchemeProperties(scheme, length, dim, heads, (), name, str(error))


def uniqueness(model: ScoreModel, reach: int) -> Uniqueness:
    """The smallest distance between two codes that the last query sees."""
    keys = torch.arange(reach)
    if reach > MAX_COMPARED:  # a quarter each from both ends, the rest evenly between
        quarter = MAX_COMPARED // 4
        between = (quarter, reach - quarter - 1, 2 * quarter)
        middle = torch.linspace(*between, dtype=torch.float64).long()
        keys = torch.cat([keys[:quarter], middle, keys[-quarter:]]).unique()
    keys = keys[model.visible(torch.tensor([reach - 1]), keys)]
    if len(keys) < 2:
        return Uniqueness(None, None, 0, len(keys))
    i = torch.full_like(keys, reach - 1)
    codes = [model.rotation_code(i, keys)]
    codes += [model.bias_code(i, keys)] if model.scheme.bias else []
    if model.scheme.embed:
        query_code, *_ = code = model.embedding(torch.cat([i[:1], keys]))
        # the mean square of a query's embedding with its position: 1 + |p|²/D, or |1 + p|²/D
        size = query_code.square().mean() + (not isinstance(model.scheme.embed, Multiplicative))
        codes.append(code[1:] * (size / model.dims.dim) ** 0.5)
    code = torch.cat(codes, -1)
    square, nearest_rows = code.square().sum(-1), []
    for rows in torch.arange(len(keys)).split(BLOCK):  # the nearest other code of each key
        squared = square[rows, None] + square - 2 * code[rows] @ code.T
        squared[torch.arange(len(rows)), rows] = torch.inf
        nearest_rows.append(squared.argmin(-1))
    nearest = torch.cat(nearest_rows)
    distance = (code - code[nearest]).norm(dim=-1)
    distance = distance.where(distance > ROUNDING, 0.0)
    closest = int(distance.argmin())
    a, b = sorted((int(keys[closest]), int(keys[nearest[closest]])))
    return Uniqueness(float(distance[closest]), (a, b), int((distance == 0).sum()), len(keys))


# relativity


def relativity(model: ScoreModel, reach: int) -> Relativity:
    """How far scores are from a function of i - j."""
    queries = torch.linspace(0, reach - 1, min(QUERIES, reach)).round().long()
    distances = sample(reach)
    step = max(1, len(distances) // DISTANCES)
    r = torch.cat([torch.tensor(distances[::step]), queries]).unique()  # and distances to key 0
    r = r if model.scheme.causal else torch.cat([-r[1:].flip(0), r])
    i, j = torch.broadcast_tensors(queries, queries - r[:, None])
    exists = (j >= 0) & (j < reach)
    j = j.clamp(0, reach - 1)
    seen = exists & model.visible(i, j)
    # the mean variance among pairs of one distance (a row of i and j): that of m values is the sum
    # of their squared differences, each pair once, over m²
    first, second = torch.triu_indices(i.shape[1], i.shape[1], 1)
    row, pair = (seen[:, first] & seen[:, second]).nonzero(as_tuple=True)
    within = 0.0
    if len(row):
        a, b = first[pair], second[pair]
        squared = model.squared_distance(i[row, a], j[row, a], i[row, b], j[row, b])
        sums = torch.zeros(len(i), dtype=torch.float64).index_add(0, row, squared)
        within = float((sums / seen.sum(1).clamp(min=1)).sum() / seen.sum())
    spread = within**0.5 if within > ROUNDING**2 else 0.0
    share = 0.0
    if spread:  # over the total variance, from drawn pairs
        rng = torch.Generator().manual_seed(SEED)
        a, b = torch.randint(int(seen.sum()), (2, 2048), generator=rng)
        qi, kj = i[seen], j[seen]
        total = float(model.squared_distance(qi[a], kj[a], qi[b], kj[b]).mean() / 2)
        share = min(1.0, spread / total**0.5)
    return Relativity(
        spread=spread,
        share=share,
        uneven=float((seen.any(1) & ~(seen == exists).all(1)).double().mean()),
        inner=_inner_products(model, i, j, exists) if model.scheme.embed else None,
    )


def _inner_products(model: ScoreModel, i: Tensor, j: Tensor, exists: Tensor) -> float:
    """`Relativity.share` for the inner products of an embedding's vectors alone."""
    tokens, where = torch.stack([i, j]).unique(return_inverse=True)
    code = model.embedding(tokens)
    value = (code[where[0]] * code[where[1]]).sum(-1)
    count = exists.sum(1, keepdim=True).clamp(min=1)
    mean = value.where(exists, 0).sum(1, keepdim=True) / count
    within = (value - mean).where(exists, 0).square().sum() / exists.sum()
    total = value[exists].var(correction=0)
    return float((within / total).sqrt()) if within > ROUNDING**2 * total else 0.0


# decay


def abel_bound(model: ScoreModel, i: Tensor, j: Tensor) -> Tensor:
    """The mean absolute value of the partial sums S_j of Abel's transformation."""
    return torch.complex(*model.rotation(i, j)).cumsum(-1).abs().mean(-1)


CURVES: dict[str, tuple[str, Callable[[ScoreModel, Tensor, Tensor], Tensor]]] = {
    "rotation": ("rotary", lambda model, i, j: model.rotation(i, j)[0].mean(-1)),
    "bound": ("rotary", abel_bound),
    "bias": ("bias", lambda model, i, j: model.bias(i, j).mean(-1)),
    "embedding": (
        "embed",
        lambda model, i, j: torch.cosine_similarity(model.embedding(i), model.embedding(j), -1),
    ),
}


def decay(model: ScoreModel, reach: int) -> tuple[Curve, ...]:
    """A curve for each site that the scheme has, over the first `reach` tokens; None is hidden."""
    rows, last = sample(reach, even=False), torch.tensor([reach - 1])
    r = torch.arange(reach)
    if reach > ALL_DISTANCES:
        r = torch.tensor([distance for line in between(reach) for distance in line])
    seen = model.visible(last, reach - 1 - r)
    curves = []
    for name, (site, value_at) in CURVES.items():
        if getattr(model.scheme, site):
            blocks = r.split(DECAY_BLOCK)
            values = torch.cat([value_at(model, last, reach - 1 - block) for block in blocks])
            values = values.where(seen, torch.nan)
            shown, below = values[~values.isnan()], r[values < 0]
            steps = values.diff()[r.diff() == 1]
            minimum, span = float(shown.min()), float(shown.max() - shown.min())
            lowest = int((values <= minimum + FLAT * span).nonzero()[0])
            steps = steps[~steps.isnan()]
            at_rows = values[torch.searchsorted(r, torch.tensor(rows))]
            curves.append(
                Curve(
                    name=name,
                    rows=tuple(zip(rows, map(number, at_rows.tolist()), strict=True)),
                    start=float(shown[0]),
                    least=float(values[lowest]),
                    falls_to=int(r[lowest]),
                    last=float(shown[-1]),
                    negative=int(below[0]) if len(below) else None,
                    rises=float((steps > 0).double().mean()) if len(steps) else 0.0,
                )
            )
    return tuple(curves)
