"""Extrapolation: what a query meets past the trained length that training never showed.

From a trained length L: which tokens have a code at all; the largest distance that the rotation
uses; how many rotary pairs meet angles that L tokens never showed them (a pair that completed one
rotation in training has seen them all); and novelty: the maximum over the last query's keys j of
the distance from the code of (n-1, j) to the nearest code of a pair within L tokens, for each site
alone and without factors on whole scores. Training is assumed to lack the parts that only extend a
trained model (`as_trained`). Codes and their distances are those of score_variance.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude import parts
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.inspection.catalogue import named_trained_length
from longitude.inspection.curves import sample
from longitude.inspection.rows import Extrapolation
from longitude.inspection.score_variance import ScoreModel, visible_keys

ALL_TOKENS = 65_536  # up to this length every token is used, beyond it a sample
KEYS, QUERIES = 256, 8  # keys whose novelty is computed; queries of training apart from its last
BLOCK = 4096
ROUNDING = 1e-9


def trained_length(scheme: Scheme) -> int | None:
    """The trained length that a scheme names, if any; the length of its table counts, too."""
    named = named_trained_length(scheme)
    return named or getattr(scheme.embed, "length", None) or getattr(scheme.positions, "mean", None)


def embedded_length(model: ScoreModel) -> tuple[int, str | None]:
    """How many tokens have a code at the input, and the error for the next token."""
    if model.scheme.embed is None:
        return model.length, None
    low, high, error = 0, model.length, None  # the full length is tried first
    while low < high:
        middle = high if error is None else (low + high + 1) // 2
        try:
            model.embedding(torch.tensor([middle - 1]))
            low = middle
        except UserError as refused:
            high, error = middle - 1, str(refused)
    return low, error


def extrapolation(
    model: ScoreModel, trained: int, reach: int, refused: str | None
) -> Extrapolation:
    """What the last query meets at this length that no query met in training; `reach` and `refused`
    are the model's `embedded_length`."""
    scheme, n = model.scheme, model.length
    rope = scheme.rotary
    if rope and isinstance(rope.remap, parts.InverseLeaky):  # a remap for training only
        model = ScoreModel(replace(scheme, rotary=replace(rope, remap=None)), n, model.dims)
    known = ScoreModel(*as_trained(scheme, trained), model.dims)
    last, keys = torch.tensor([n - 1]), _keys(model)
    seen = model.visible(last, keys)
    hidden = 1 - float(seen.double().mean())
    if n > ALL_TOKENS and scheme.positions == parts.Sequential():  # keys are a sample: count all
        hidden = 1 - float(visible_keys(model.scheme, n, last)[0]) / n
    distance = unseen = None
    if rope:  # its largest distance, and the pairs that meet untrained angles
        angles, largest = [], []
        for m, k, beyond in ((model, keys[seen], 0), (known, _keys(known), 1)):
            remapped = m.remapped_distance(torch.tensor(m.length - 1), k).abs()
            m_rope = m.scheme.rotary
            assert m_rope is not None, "training had a rotation, too"
            largest.append(float(remapped[~remapped.isnan()].max()))
            # for training, the first angle that it did not show
            theta = m_rope.inv_freq(m_rope.dim(m.dims.head_dim), m.length)
            angles.append((largest[-1] + beyond) * theta)
        untrained = (angles[1] < 2 * torch.pi) & (angles[0] > angles[1] * (1 + ROUNDING))
        distance, unseen = largest[0], int(untrained.sum())
    return Extrapolation(
        trained=trained,
        length=n,
        reach=reach,
        refused=refused,
        believed=distance,
        unseen=unseen,
        pairs=rope.dim(model.dims.head_dim) // 2 if rope else None,
        novelty={} if refused else _novelty(model, known, keys[seen]),
        scale=float(model.scale(last)[0]) * (rope.frequencies.gain(n) if rope else 1.0),
        hidden=hidden,
    )


def as_trained(scheme: Scheme, trained: int) -> tuple[Scheme, int]:
    """The scheme that a model under this one was trained with, and the length that training
    covered. Frequencies are unscaled, distances true, slopes ALiBi's, embeddings the table's own
    rows; positions that training draws from a longer range cover that range."""
    rope: Any = scheme.rotary
    embed: Any = scheme.embed
    if rope is not None:
        remap = rope.remap if isinstance(rope.remap, parts.InverseLeaky) else None
        own = rope.frequencies
        plain = replace(own, factor=1) if isinstance(own, parts.Proportional) else parts.Unscaled()
        rope = replace(rope, remap=remap, frequencies=plain)
    if isinstance(embed, parts.Hierarchical | parts.LearnedInterpolated | parts.LearnedTiled):
        embed = parts.Learned(embed.length, embed.offset)  # type: ignore[abstract]
    scaled = (parts.AlibiInterpolated, parts.NtkAlibi)
    alibi: Any = parts.Alibi()  # type: ignore[abstract]
    bias: Any = tuple(alibi if isinstance(b, scaled) else b for b in scheme.bias)
    covered = {parts.Randomized: "max", parts.Pose: "target"}.get(type(scheme.positions))
    length = getattr(scheme.positions, covered) if covered else trained
    length = min(length, getattr(embed, "length", length))  # a table ends where it ends
    return Scheme(embed=embed, rotary=rope, bias=bias, mask=scheme.mask), length


def _novelty(model: ScoreModel, known: ScoreModel, keys: Int[Tensor, " n"]) -> dict[str, float]:
    """By site, the largest distance of the last query's codes from those of training."""
    spread = torch.linspace(0, len(keys) - 1, KEYS).long()
    near = len(keys) - 1 - torch.tensor(sample(len(keys), even=False))
    keys = keys[torch.cat([spread, near]).unique()]
    last = torch.full_like(keys, model.length - 1)
    distance = model.remapped_distance(last[0], keys)
    distance = torch.cat([distance.floor().long(), distance.ceil().long(), last - keys]).unique()
    # pairs that training showed: all keys of its last query (or a sample, and the keys at these
    # distances), and fewer keys of some earlier queries
    end = known.length - 1
    extra = end - distance[(distance >= 0) & (distance <= end)]
    dense, sparse = torch.cat([_tokens(end + 1), extra]).unique(), torch.tensor(sample(end + 1))
    trained = [(end, dense), *([] if known.scheme.causal else [(0, dense)])]
    trained += [(end * n // QUERIES, sparse) for n in range(1, QUERIES)]
    i = torch.cat([torch.full_like(k, query) for query, k in trained])
    j = torch.cat([k for _, k in trained])
    seen = known.visible(i, j)
    i, j = i[seen], j[seen]
    novelty: dict[str, float] = {}
    if model.scheme.rotary:
        codes = model.rotation_code(last, keys, factors=False)
        novelty["rotation"] = _farthest(codes, known.rotation_code(i, j, factors=False))
    if model.scheme.bias:
        novelty["bias"] = _farthest(model.bias_code(last, keys), known.bias_code(i, j))
    if model.scheme.embed:
        rows = torch.cat([_tokens(known.length), keys[keys < known.length]]).unique()
        farthest = _farthest(model.embedding(keys), known.embedding(rows))
        novelty["embedding"] = farthest / model.dims.dim**0.5
    return novelty


def _tokens(length: int) -> Int[Tensor, " n"]:
    """All tokens; beyond ALL_TOKENS a sample, denser at both ends."""
    if length <= ALL_TOKENS:
        return torch.arange(length)
    sampled = torch.tensor(sample(length))
    return torch.cat([sampled, length - 1 - sampled]).unique()


def _keys(model: ScoreModel) -> Int[Tensor, " n"]:
    """Keys of the last query: all, or a sample that includes the ends of what it sees."""
    keys, last = _tokens(model.length), torch.tensor([model.length - 1])
    if len(keys) == model.length or model.scheme.positions != parts.Sequential():
        return keys
    ends = [e for area in model.scheme.areas() for e in area.interval(last)]
    ends = torch.cat([e - past for e in ends for past in (0, 1)]).clamp(0, model.length - 1)
    return torch.cat([keys, ends]).unique()


def _farthest(codes: Float[Tensor, "n f"], trained: Float[Tensor, "m f"]) -> float:
    """The largest distance from one of these codes to the nearest trained one."""
    distance = torch.full((len(codes),), torch.inf, dtype=torch.float64)
    for block in trained.split(BLOCK):
        nearest = block[torch.cdist(codes, block).argmin(1)]
        distance = torch.minimum(distance, (codes - nearest).norm(dim=1))  # cdist alone would round
    largest = float(distance.max())
    return largest if largest > ROUNDING else 0.0
