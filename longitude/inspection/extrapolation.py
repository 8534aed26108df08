"""Extrapolation: what a query meets past the trained length that training never showed.

From a trained length L: which tokens have a code at all; the largest distance that the rotation is
told; how many rotary pairs meet angles that L tokens never showed them (a pair that turned once in
training has seen them all); and novelty, max over the last query's keys j of the distance from the
code of (n-1, j) to the nearest that a pair within L tokens had, each site by itself and without the
factors on whole scores. Training is taken to have been without what is put on only to read further
(`as_trained`). Codes and their distances are those of field.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.inspection import lengths
from longitude.inspection.curves import believed, positions, sample
from longitude.inspection.rows import Extrapolation
from longitude.inspection.score_variance import Field
from longitude.inspection.terms import count_seen
from longitude.parts import (
    Alibi,
    AlibiInterpolated,
    Hierarchical,
    InverseLeaky,
    Learned,
    LearnedInterpolated,
    LearnedTiled,
    NtkAlibi,
    Pose,
    Proportional,
    Randomized,
    Sequential,
    Unscaled,
)

EVERY = 65_536  # tokens that are all looked at; of more, some
KEYS, WAYS = 256, 8  # keys whose codes are asked about, and queries of training besides its last
BLOCK = 4096
ROUNDING = 1e-9
FULL_TURN = 2 * torch.pi
Pairs = tuple[Int[Tensor, " n"], Int[Tensor, " n"]]


def trained_length(scheme: Scheme) -> int | None:
    """The length a scheme was trained at, as far as it names one: a table's rows count too."""
    named = lengths.trained(scheme)
    return named or getattr(scheme.embed, "length", None) or getattr(scheme.positions, "mean", None)


def reached(field: Field) -> tuple[int, str | None]:
    """How many of the tokens have a code at the input, and the sentence about the next one."""
    if field.scheme.embed is None:
        return field.length, None
    low, high, refused = 0, field.length, None  # high tokens are tried first
    while low < high:
        middle = high if refused is None else (low + high + 1) // 2
        try:
            field.codes(torch.tensor([middle - 1]))
            low = middle
        except UserError as mistake:
            high, refused = middle - 1, str(mistake)
    return low, refused


def extrapolation(field: Field, trained: int) -> Extrapolation:
    """What the last query meets at this length that no query met in training."""
    reach, refused = reached(field)
    scheme, n = field.scheme, field.length
    read = field if as_read(scheme) == scheme else Field(as_read(scheme), n, field.dims)
    known = Field(*as_trained(scheme, trained), field.dims)
    last = torch.tensor([n - 1])
    keys = _keys(read)
    seen = read.seen(last, keys)
    told, unseen = _angles(read, known, keys[seen]) if scheme.rotary else (None, None)
    return Extrapolation(
        trained=trained,
        length=n,
        reach=reach,
        refused=refused,
        believed=told,
        unseen=unseen,
        pairs=scheme.rotary.dim(field.dims.head_dim) // 2 if scheme.rotary else None,
        novelty={} if refused else _novelty(read, known, keys[seen]),
        scale=float(field.scale(last)[0]) * _gain(scheme, n),
        hidden=_hidden(read, float(seen.double().mean())),
    )


def as_read(scheme: Scheme) -> Scheme:
    """The scheme at test: a remap that is made for training is gone."""
    rope = scheme.rotary
    if rope and isinstance(rope.remap, InverseLeaky):
        return replace(scheme, rotary=replace(rope, remap=None))
    return scheme


def as_trained(scheme: Scheme, trained: int) -> tuple[Scheme, int]:
    """The scheme a model of this one was trained with, and the length that training covered.

    Frequencies are those of the base, distances true ones, slopes ALiBi's, rows the table's own;
    positions that training draws from a longer range cover that range.
    """
    rope: Any = scheme.rotary
    embed: Any = scheme.embed
    if rope is not None:
        remap = rope.remap if isinstance(rope.remap, InverseLeaky) else None
        own = rope.frequencies
        plain = replace(own, factor=1) if isinstance(own, Proportional) else Unscaled()
        rope = replace(rope, remap=remap, frequencies=plain)
    if isinstance(embed, Hierarchical | LearnedInterpolated | LearnedTiled):
        embed = Learned(embed.length, embed.offset)
    scaled = (AlibiInterpolated, NtkAlibi)
    bias: Any = tuple(Alibi() if isinstance(b, scaled) else b for b in scheme.bias)
    drawn: Any = scheme.positions
    covered = {Randomized: "max", Pose: "target"}.get(type(drawn))
    length = getattr(drawn, covered) if covered else trained
    length = min(length, getattr(embed, "length", length))  # a table ends where it ends
    return Scheme(embed=embed, rotary=rope, bias=bias, mask=scheme.mask), length


def _gain(scheme: Scheme, length: int) -> float:
    return scheme.rotary.frequencies.gain(length) if scheme.rotary else 1.0


def _angles(read: Field, known: Field, keys: Int[Tensor, " n"]) -> tuple[float, int]:
    """The largest distance that the rotation is told, and the pairs that meet unseen angles."""
    rope, base = read.scheme.rotary, known.scheme.rotary
    assert rope is not None and base is not None, "only asked where there is a rotation"
    dim = rope.dim(read.dims.head_dim)
    most = [_largest(f, k) for f, k in ((read, keys), (known, _keys(known)))]
    now = most[0] * rope.frequencies.inv_freq(dim, rope.base, read.length)
    then = (most[1] + 1) * base.frequencies.inv_freq(dim, base.base, known.length)
    unseen = (then < FULL_TURN) & (now > then * (1 + ROUNDING))
    return most[0], int(unseen.sum())


def _largest(field: Field, keys: Int[Tensor, " n"]) -> float:
    """The largest distance, ahead or behind, that the last query believes."""
    last = torch.tensor(field.length - 1)
    i, j = (positions(field.scheme, field.length, tokens) for tokens in (last, keys))
    told = believed(field.scheme, i, j).abs()
    return float(told[~told.isnan()].max())


def _novelty(read: Field, known: Field, keys: Int[Tensor, " n"]) -> dict[str, float]:
    """By site, how far the strangest of the last query's codes lies from those of training."""
    some = torch.linspace(0, len(keys) - 1, KEYS).long()
    near = len(keys) - 1 - torch.tensor(sample(len(keys), even=False))
    asked = keys[torch.cat([some, near]).unique()]
    pairs = (torch.full_like(asked, read.length - 1), asked)
    seen = _trained_pairs(known, _told(read, asked))
    found: dict[str, float] = {}
    if read.scheme.rotary:
        found["rotation"] = _strangest(
            read.waves(*pairs, tempered=False), known.waves(*seen, tempered=False)
        )
    if read.scheme.bias:
        found["bias"] = _strangest(read.added(*pairs), known.added(*seen))
    if read.scheme.embed:
        rows = torch.cat([_tokens(known.length), asked[asked < known.length]]).unique()
        found["embedding"] = _strangest(read.codes(asked), known.codes(rows))
        found["embedding"] /= read.dims.dim**0.5
    return found


def _told(read: Field, keys: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Whole distances next to those that the last query is told, and the true ones."""
    last = torch.tensor(read.length - 1)
    i, j = (positions(read.scheme, read.length, tokens) for tokens in (last, keys))
    told = believed(read.scheme, i, j)
    return torch.cat([told.floor().long(), told.ceil().long(), last - keys]).unique()


def _tokens(length: int) -> Int[Tensor, " n"]:
    """All tokens; of very many some, more of the first and of the last."""
    if length <= EVERY:
        return torch.arange(length)
    some = torch.tensor(sample(length))
    return torch.cat([some, length - 1 - some]).unique()


def _keys(field: Field) -> Int[Tensor, " n"]:
    """Keys of the last query: all, or of very many some, with the first and last that it sees."""
    keys, last = _tokens(field.length), torch.tensor([field.length - 1])
    if len(keys) == field.length or field.scheme.positions != Sequential():
        return keys
    ends = [e for area in field.scheme.areas() for e in area.interval(last)]
    ends = torch.cat([e - past for e in ends for past in (0, 1)]).clamp(0, field.length - 1)
    return torch.cat([keys, ends]).unique()


def _hidden(field: Field, seen: float) -> float:
    """The share of keys that the last query doesn't see, `seen` being that of those looked at."""
    if field.length <= EVERY or field.scheme.positions != Sequential():
        return 1 - seen
    count = count_seen(field.scheme, field.length, torch.tensor([field.length - 1]))
    return 1 - float(count[0]) / field.length


def _trained_pairs(known: Field, away: Int[Tensor, " m"]) -> Pairs:
    """Pairs that training showed: every key of its last query, or where those are very many some
    and the keys of these distances; fewer of some queries before it."""
    last = known.length - 1
    asked = last - away[(away >= 0) & (away <= last)]
    keys = torch.cat([_tokens(known.length), asked]).unique()
    ways = [last, *([] if known.scheme.causal else [0])]
    few = torch.tensor(sample(known.length))
    i = [torch.full_like(keys, way) for way in ways]
    j = [keys for _ in ways]
    for way in range(1, WAYS):
        i.append(torch.full_like(few, last * way // WAYS))
        j.append(few)
    i, j = torch.cat(i), torch.cat(j)
    seen = known.seen(i, j)
    return i[seen], j[seen]


def _strangest(now: Float[Tensor, "n f"], then: Float[Tensor, "m f"]) -> float:
    """The largest distance from one of these codes to the nearest of those."""
    least = torch.full((len(now),), torch.inf, dtype=torch.float64)
    for part in then.split(BLOCK):
        nearest = part[torch.cdist(now, part).argmin(1)]
        least = torch.minimum(least, (now - nearest).norm(dim=1))  # cdist itself rounds
    worst = float(least.max())
    return worst if worst > ROUNDING else 0.0
