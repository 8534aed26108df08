"""A band of distances, with a bias that depends on the distance alone or none: the values that its
kernel takes, and its twin in plain torch.

score(i, j) = scale · q_i·k_j + table[h, i - j] for lo <= i - j < hi, with i and j indices. A
softmax over several bands is made part after part: what stands so far is an output and its
log-sum-exp, from which the next part starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEGLIGIBLE = 22.0  # nats: a weight below 2^-32 of its row's largest is no weight
Outs = Float[Tensor, "b h n dv"]
Sums = Float[Tensor, "b h n"]


class Band(NamedTuple):
    """The pairs of indices with lo <= i - j < hi."""

    lo: int
    hi: int

    def within(self, n: int, m: int) -> Band:
        """The same pairs of n rows and m columns, with bounds no larger than these."""
        lo, hi = max(self.lo, 1 - m), min(self.hi, n)
        return Band(lo, hi) if lo < hi else Band(0, 0)


class Chunk(NamedTuple):
    """The pairs whose chunks of `size` positions lie lo <= row's - column's < hi apart, where the
    first row and the first column stand at these positions."""

    size: int
    lo: int
    hi: int
    row: int
    column: int

    def seen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether each pair of indices is such a pair."""
        apart = (rows + self.row) // self.size - (columns + self.column) // self.size
        return (apart >= self.lo) & (apart < self.hi)


class Bias(NamedTuple):
    """table[h, r - first] at distance r; its last entry holds at every distance beyond. `ahead` are
    the largest entries from each on, where they are known."""

    table: Tensor
    first: int
    ahead: Tensor | None = None

    @property
    def flat(self) -> int:
        """The distance of the last entry."""
        return self.first + self.table.shape[1] - 1


class Start(NamedTuple):
    """A softmax so far, of the rows from `top` on: its output and log-sum-exp."""

    out: Tensor
    lse: Tensor
    top: int = 0


class Part(NamedTuple):
    """One band of a softmax: its tensors, how far each head of each sequence reaches in it, and
    which of its pairs count by their chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    band: Band
    scale: float
    reach: Tensor | None = None
    chunk: Chunk | None = None


class Gradients(NamedTuple):
    """Of q, k, v and, where it was wanted, of the bias's table; its last entry is unsaid where the
    band goes on beyond it."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None


class Way(NamedTuple):
    """forward(part, start) gives output and log-sum-exp, maybe written over the start's;
    backward(part, grad, out, lse, table, wide) the gradients, of the table if asked; in float32
    where wide."""

    forward: Callable[[Part, Start | None], tuple[Tensor, Tensor]]
    backward: Callable[[Part, Tensor, Tensor, Tensor, bool, bool], Gradients]


def eager(part: Part, start: Start | None = None) -> tuple[Outs, Sums]:
    """The twin: output and log-sum-exp of a band, the whole score matrix at once."""
    scores, v = scores_of(part), part.v
    lse = scores.logsumexp(-1)
    out = weights(scores, lse) @ _for_each(part.q, v).to(lse.dtype)
    if start is not None:
        more = torch.full_like(lse, float("-inf"))
        more[:, :, start.top :] = start.lse
        so_far = torch.zeros_like(out)
        so_far[:, :, start.top :] = start.out
        total = torch.logaddexp(lse, more)
        share, rest = (torch.where(total == -torch.inf, 0, (x - total).exp()) for x in (lse, more))
        out, lse = out * share[..., None] + so_far * rest[..., None], total
    return out.to(v.dtype), lse


def scores_of(part: Part) -> Float[Tensor, "b h n m"]:
    """Every score in float32 at least, -inf outside the band and out of reach."""
    q, k, bias, band = part.q, part.k, part.bias, part.band
    wide = torch.promote_types(q.dtype, torch.float32)
    content = q.to(wide) @ _for_each(q, k).to(wide).mT * part.scale
    away = _away(q, k)
    seen = (away >= band.lo) & (away < band.hi)
    if part.reach is not None:
        seen = seen & (away < part.reach[..., None, None])
    if part.chunk is not None:
        rows, columns = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        seen = seen & part.chunk.seen(rows[:, None], columns)
    scores = content if bias is None else content + bias.table.to(wide)[:, _entries(away, bias)]
    return scores.masked_fill(~seen, float("-inf"))


def _away(q: Tensor, k: Tensor) -> Tensor:
    rows = torch.arange(q.shape[2], device=q.device)
    return rows[:, None] - torch.arange(k.shape[2], device=q.device)


def _entries(away: Tensor, bias: Bias) -> Tensor:
    return (away - bias.first).clamp(0, bias.table.shape[1] - 1)


def _for_each(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated for every query head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """e^(score - lse), and nothing where nothing is seen."""
    lse = lse.to(scores.dtype)[..., None]
    return torch.where(scores == -torch.inf, 0, (scores - lse).exp())


def reach_of(part: Part) -> Int[Tensor, "b h"] | None:
    """For each head the distance from which on no weight counts, or None where none can be told.

    A score is at most |q||k| scale plus the largest bias still to come, and the largest of its row
    at least -|q||k| scale plus the bias of its nearest key, which every row must see. Where the
    first falls short of the second by `NEGLIGIBLE`, the weight is below 2^-32 of the largest.
    """
    q, k, _, bias, band, scale, *_ = part
    assert bias is not None
    if band.lo > 0 or q.shape[2] - band.lo > k.shape[2]:  # some row's nearest key is not there
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    longest = [torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(-1) for x in (q, k)]
    largest = longest[0] * _for_each(q, longest[1]) * abs(scale)
    ahead = bias.table.flip(1).cummax(1).values.flip(1) if bias.ahead is None else bias.ahead
    nearest = max(band.lo - bias.first, 0)
    least = bias.table[:, nearest, None] - 2 * largest[..., None] - NEGLIGIBLE  # (b h 1)
    counts = ahead >= least
    reach = counts.sum(-1, dtype=torch.int32) + bias.first
    return torch.where(counts[..., -1], 2**30, reach).to(torch.int32)


def backward_eager(part: Part, grad: Outs, out: Outs, lse: Sums) -> Gradients:
    """The twin of the gradients, given the output and log-sum-exp of the softmax that the band is
    a part of; the table's last entry gets what lies beyond it, too."""
    wide = torch.promote_types(part.q.dtype, torch.float32)
    q, k, v, grad, out = (x.to(wide) for x in (*part[:3], grad, out))
    bias, group = part.bias, q.shape[1] // k.shape[1]
    p = weights(scores_of(part), lse)
    ds = p * (grad @ _for_each(q, v).mT - (grad * out).sum(-1, keepdim=True))
    dq = ds @ _for_each(q, k) * part.scale
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q * part.scale, p.mT @ grad))
    if bias is None:
        return Gradients(dq, dk, dv, None)
    entries = _entries(_away(q, k), bias).flatten()
    d_table = torch.zeros_like(bias.table, dtype=wide).index_add(1, entries, ds.sum(0).flatten(1))
    return Gradients(dq, dk, dv, d_table)


def _backward(
    part: Part, grad: Tensor, out: Tensor, lse: Tensor, table: bool, wide: bool
) -> Gradients:
    made = backward_eager(part, grad, out, lse)
    return made if table else made._replace(table=None)


TWIN = Way(eager, _backward)
