"""What is counted before attention: the keys each query may see, and each sequence's length.

Both go by positions, not by what a cache happens to hold, so that decoding counts as prefill does.
What the factors of site ④ make of the first is multiplied into q; where they are known from
positions alone, into the tables that turn q (`rides`), which costs nothing and rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longitude.attention.problem import Length, Problem, weights_of
from longitude.part import Mistake, Weights
from longitude.region import FAR
from longitude.scheme import Scheme

FEW = 16  # queries up to which q is multiplied itself: a decoder's tables serve one step each


def scaled(p: Problem) -> Tensor:
    """q times every factor of site ④, rounded once."""
    most = None if p.scheme.causal else _keys(p)
    factor = factors(p.scheme, p.q_rows, most, p.weights)[..., None]
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return (p.q.to(wide) * factor.to(wide)).to(p.q.dtype)


def rides(p: Problem) -> bool:
    """Whether the factors are the same for all heads and known from positions alone, and every
    dimension of q turns: its tables then carry them. Biases would see a q without them."""
    scheme, rope = p.scheme, p.scheme.rotary
    if rope is None or scheme.bias or not scheme.causal or not isinstance(p.q_pos, range):
        return False
    learned = any(weights_of(part.name, p.weights) for part in scheme.scale)
    whole = rope.dim(p.q.shape[-1]) == p.q.shape[-1]
    return whole and not learned and p.q.shape[2] > FEW and not torch.compiler.is_compiling()


def factors(scheme: Scheme, q_pos: Tensor, most: Tensor | None, weights: Weights) -> Tensor:
    """The product of all factors (b|1, h|1, n), in float64; `most` keys can be seen at all."""
    seen = _seen(scheme, q_pos, most)
    factor = torch.ones((), dtype=torch.float64, device=q_pos.device)
    for part in scheme.scale:
        factor = factor * part.scale(q_pos, seen, weights_of(part.name, weights))
    return factor


def _seen(scheme: Scheme, q_pos: Tensor, most: Tensor | None) -> Tensor:
    """How many keys each query's mask lets it see, by positions: an evicted key still counts."""
    most = torch.full_like(q_pos, FAR) if most is None else most.to(q_pos.dtype)
    total = torch.zeros_like(q_pos)
    for area in scheme.areas():
        start, stop = area.interval(q_pos)
        total = total + (torch.minimum(stop, most) - start).clamp(min=0)
    return total


def _keys(p: Problem) -> Tensor:
    """How many keys there are for each query: unpadded, and of its own segment."""
    batch, nk = p.k.shape[0], p.k.shape[2]
    real = torch.ones(batch, nk, dtype=torch.int64, device=p.k.device)
    if p.key_padding is not None:
        real = (~p.key_padding).to(torch.int64)
    if p.segments is None:
        return real.sum(1, keepdim=True)
    return _by_segment(p.segments[0], p.segments[1], real, "sum")


def _by_segment(at: Tensor, ids: Tensor, values: Tensor, how: str) -> Tensor:
    """For each token of `at`, the sum or greatest of `values` over the tokens with the same id."""
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None]
    keys = torch.cat([torch.stack([batch.expand_as(x), x], -1).flatten(0, 1) for x in (ids, at)])
    _, index = keys.unique(dim=0, return_inverse=True)
    index, asked = index.split([ids.numel(), at.numel()])
    found = values.new_zeros(keys.shape[0])
    found = found.scatter_reduce(0, index, values.flatten(), how, include_self=True)
    return found[asked].view_as(at)


def lengths(p: Problem, length: int | Sequence[int] | Tensor | None) -> dict[str, Length]:
    """The length that frequencies see: as given, or each sequence's last position + 1."""
    if isinstance(length, int):
        return {"q_length": length, "k_length": length}
    if length is not None:
        given = torch.as_tensor(length, device=p.q.device).view(-1, 1)
        if given.shape[0] != p.q.shape[0]:
            raise Mistake(
                f"length must be one number, or one for each of {p.q.shape[0]} sequences."
            )
        return {"q_length": given, "k_length": given}
    if isinstance(p.k_pos, range) and not p.hides:
        last = (
            max(p.k_pos[-1], p.q_pos[-1] if isinstance(p.q_pos, range) else 0) + 1 if p.k_pos else 1
        )
        return {"q_length": last, "k_length": last}
    reach = p.k_rows.expand(p.k.shape[0], -1).ceil().to(torch.int64) + 1
    if p.key_padding is not None:
        reach = reach.masked_fill(p.key_padding, 1)
    if p.segments is None:
        last = reach.amax(1, keepdim=True)
        return {"q_length": last, "k_length": last}
    q, k = p.segments
    return {
        "q_length": _by_segment(q, k, reach, "amax"),
        "k_length": _by_segment(k, k, reach, "amax"),
    }
