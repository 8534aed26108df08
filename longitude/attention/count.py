"""What is counted before attention: the keys each query may see, and each sequence's length.

Both go by positions, not by what a cache happens to hold, so that decoding counts as prefill does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longitude.attention.problem import Length, Problem, weights_of
from longitude.part import Mistake
from longitude.region import FAR


def scaled(p: Problem) -> Tensor:
    """q times every factor of site ④, rounded once."""
    q_pos, seen = p.q_rows, _seen(p)
    factor = torch.ones((), dtype=torch.float64, device=p.q.device)
    for part in p.scheme.scale:
        factor = factor * part.scale(q_pos, seen, weights_of(part.name, p.weights))
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return (p.q.to(wide) * factor[..., None].to(wide)).to(p.q.dtype)


def _seen(p: Problem) -> Tensor:
    """How many keys each query's mask lets it see, by positions: an evicted key still counts."""
    q_pos = p.q_rows
    most = torch.full_like(q_pos, FAR) if p.scheme.causal else _keys(p).to(q_pos.dtype)
    total = torch.zeros_like(q_pos)
    for area in p.scheme.areas():
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
