"""The four things that one asks of an encoding of positions, as numbers, for any scheme.

Scores s(i, j) of random content, and distances between them, are those of field.py; tokens are
counted from 0, n is the length and the last query stands at n - 1.

- Uniqueness: min |s(n-1, j) - s(n-1, j')| over keys j ≠ j' that the last query sees. 0 says that
  two keys can't be told apart by where they stand.
- Extrapolation: further.py.
- Relativity: the distance from s(i, j) to the nearest function of i - j, which is the root of its
  mean variance among pairs of one distance. Rounding below 1e-9 counts as none.
- Decay: falling.py.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.inspection import lengths
from longitude.inspection.curves import sample
from longitude.inspection.decay import decay
from longitude.inspection.extrapolation import extrapolation, reached, trained_length
from longitude.inspection.page import distinct, notes
from longitude.inspection.rows import Checked, Properties, Relativity, Uniqueness
from longitude.inspection.score_variance import CONTENTS, Field
from longitude.inspection.terms import SEED
from longitude.parts import Multiplicative

USUAL = 4096
COMPARED = 4096  # keys whose codes are all compared with each other
BLOCK = 512
QUERIES, DISTANCES = 16, 32  # at which relativity is looked at
ROUNDING = 1e-9


def check(
    scheme: Scheme | Layers,
    *,
    dim: int | None = None,
    heads: int = 8,
    length: int | None = None,
    trained: int | None = None,
) -> Checked:
    """The properties of a scheme, or of each of its distinct layers.

    Without a length it is 4,096, or what shows all the lengths that the scheme names. Without a
    trained length it is the one that the scheme names, or a quarter of the length. Heads have 64
    dimensions, or as many as a scheme's own list of factors asks for.
    """
    each = distinct(scheme)
    dim = max(map(lengths.default_dim, each)) if dim is None else dim
    if length is None:
        length = max(USUAL, *(_named_length(s) for s in each))
    lengths.check_length(length)
    if dim < 1 or heads < 1:
        raise UserError(f"{heads} heads of {dim} dimensions can't be checked: give at least one.")
    if trained is not None and trained < 2:
        raise UserError(f"a trained length of {trained} tokens shows no distance: give 2 or more.")
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    sheets = tuple(_sheet(s, length, dims, trained, used) for s, used in each.items())
    return Checked(str(scheme), length, dim, heads, sheets)


def _named_length(scheme: Scheme) -> int:
    """A length that shows what the scheme names; 0 where it names none."""
    named = lengths.trained(scheme)
    return lengths.default_length(scheme) if named else 0


def _sheet(
    scheme: Scheme, length: int, dims: Dims, trained: int | None, layers: tuple[int, ...]
) -> Properties:
    field = Field(scheme, length, dims)
    reach, _ = reached(field)
    known = trained or trained_length(scheme) or max(2, length // 4)
    return Properties(
        written=str(scheme),
        layers=layers,
        uniqueness=uniqueness(field, reach),
        extrapolation=extrapolation(field, known),
        relativity=relativity(field, reach),
        decay=decay(field, reach),
        notes=tuple(_notes(field)),
    )


def _notes(field: Field) -> list[str]:
    """What the numbers don't say by themselves."""
    read = "The bias depends on content"
    given = notes(field.scheme, field.length, field.dims)
    drawn = f"{read}: measured over {CONTENTS} drawn queries and keys."
    said = [drawn if note.startswith(read) else note for note in given]
    if field.scheme.embed and field.input_weights:
        said.append(f"{field.scheme.embed.name} is learned: its weights are drawn (seed {SEED}).")
    return said


# uniqueness


def uniqueness(field: Field, reach: int) -> Uniqueness:
    """The smallest distance between two codes that the last query sees."""
    keys = _compared(reach)
    keys = keys[field.seen(torch.tensor([reach - 1]), keys)]
    if len(keys) < 2:
        return Uniqueness(None, None, 0, len(keys))
    codes = _key_codes(field, reach - 1, keys)
    nearest = torch.cat([_nearest(codes, rows) for rows in torch.arange(len(keys)).split(BLOCK)])
    apart = (codes - codes[nearest]).norm(dim=-1)
    apart = apart.where(apart > ROUNDING, 0.0)
    least = int(apart.argmin())
    a, b = sorted((int(keys[least]), int(keys[nearest[least]])))
    return Uniqueness(float(apart[least]), (a, b), int((apart == 0).sum()), len(keys))


def _compared(reach: int) -> Int[Tensor, " n"]:
    """All tokens; of many, the first and the last quarter of as many as can be, and others
    evenly between."""
    if reach <= COMPARED:
        return torch.arange(reach)
    quarter = COMPARED // 4
    middle = torch.linspace(quarter, reach - quarter - 1, 2 * quarter, dtype=torch.float64).long()
    ends = torch.arange(quarter), torch.arange(reach - quarter, reach)
    return torch.cat([ends[0], middle, ends[1]]).unique()


def _key_codes(field: Field, query: int, keys: Int[Tensor, " n"]) -> Float[Tensor, "n f"]:
    """Codes of keys seen from one query, whose Euclidean distances are those between codes."""
    i = torch.full_like(keys, query)
    found = [field.waves(i, keys)]
    found += [field.added(i, keys)] if field.scheme.bias else []
    if field.scheme.embed:
        code = field.codes(torch.cat([torch.tensor([query]), keys]))
        width = field.dims.dim
        by = _own_size(field, code[0])
        found.append(code[1:] * (by / width) ** 0.5)
    return torch.cat(found, -1)


def _own_size(field: Field, code: Float[Tensor, " dim"]) -> float:
    """The mean square of a query's embedding with its position in: 1 + |p|²/D, or |1 + p|²/D."""
    size = float(code.square().mean())
    return size if isinstance(field.scheme.embed, Multiplicative) else 1 + size


def _nearest(codes: Float[Tensor, "n f"], rows: Int[Tensor, " m"]) -> Int[Tensor, " m"]:
    """The nearest other code of each of these rows."""
    size = codes.square().sum(-1)
    squared = size[rows, None] + size - 2 * codes[rows] @ codes.T
    squared[torch.arange(len(rows)), rows] = torch.inf
    return squared.argmin(-1)


# relativity


def relativity(field: Field, reach: int) -> Relativity:
    """How far scores are from a function of i - j."""
    queries = torch.linspace(0, reach - 1, min(QUERIES, reach)).round().long()
    behind = sample(reach)
    step = max(1, len(behind) // DISTANCES)
    away = torch.cat([torch.tensor(behind[::step]), queries]).unique()  # the first key of each too
    away = away if field.scheme.causal else torch.cat([-away[1:].flip(0), away])
    i, j = torch.broadcast_tensors(queries, queries - away[:, None])
    there = (j >= 0) & (j < reach)
    seen = there & field.seen(i, j.clamp(0, reach - 1))
    within = _within(field, i, j, seen)
    total = _whole(field, i[seen], j[seen])
    some, all_seen = seen.any(1), (seen == there).all(1)
    spread = within**0.5 if within > ROUNDING**2 else 0.0
    return Relativity(
        spread=spread,
        share=min(1.0, spread / total**0.5) if spread else 0.0,
        uneven=float((some & ~all_seen).double().mean()),
        inner=_inner(field, i, j, there) if field.scheme.embed else None,
    )


def _within(field: Field, i: Tensor, j: Tensor, seen: Tensor) -> float:
    """The mean variance among pairs of one distance."""
    count = seen.sum(1)
    first, second = torch.triu_indices(i.shape[1], i.shape[1], 1)
    both = seen[:, first] & seen[:, second]
    row, pair = both.nonzero(as_tuple=True)
    if not len(row):
        return 0.0
    a, b = first[pair], second[pair]
    squared = field.squared(i[row, a], j[row, a], i[row, b], j[row, b])
    # the variance of m values is the sum of their squared differences, each pair once, over m²
    sums = torch.zeros(len(i), dtype=torch.float64).index_add(0, row, squared)
    return float((sums / count.clamp(min=1)).sum() / count.sum())


def _whole(field: Field, i: Tensor, j: Tensor) -> float:
    """The variance of scores over all these pairs, from drawn pairs of them."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randint(len(i), (2, 2048), generator=rng)
    return float(field.squared(i[a], j[a], i[b], j[b]).mean() / 2)


def _inner(field: Field, i: Tensor, j: Tensor, there: Tensor) -> float:
    """The same share for the inner products of an embedding's vectors by themselves."""
    tokens, where = torch.stack([i, j.clamp(min=0, max=int(i.max()))]).unique(return_inverse=True)
    code = field.codes(tokens)
    value = (code[where[0]] * code[where[1]]).sum(-1)
    count = there.sum(1, keepdim=True).clamp(min=1)
    mean = value.where(there, 0).sum(1, keepdim=True) / count
    within = (value - mean).where(there, 0).square().sum() / there.sum()
    whole = value[there].var(correction=0)
    return float((within / whole).sqrt()) if within > ROUNDING**2 * whole else 0.0
