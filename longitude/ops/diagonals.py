"""Biases on a CPU: SDPA in blocks of queries, under masks that are views, with exact gradients.

A bias by distance needs no dense mask: with the keys in reverse order, the bias of every pair of a
block is a view of a table of its distances (`along_diagonals`). The same view of an empty table
takes the gradients of the scores, and adding up what lies over one another is the table's gradient.
A block's weights are computed again from its log-sum-exp, so that memory stays linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longitude.core.region import Area
from longitude.ops.inputs import BLOCK_SCORES, AttentionInputs
from longitude.ops.lse_merge import cpu_flash
from longitude.ops.passes import accum_dtype, dense, make_passes
from longitude.ops.plan import CallSpec, Plan, term_type
from longitude.parts.distance_bias import (
    Addend,
    ByDiagonals,
    ByDistance,
    DistanceTable,
    along_diagonals,
)

BLOCK_QUERIES = (64, 256)  # few enough that little is computed beyond a causal mask
BLOCKS = 16  # of a call, between these
LEAST_QUERIES = 32  # of a block whose gradients are computed, however many heads there are
NEGLIGIBLE = -64.0  # a weight's logarithm


def fits_diagonals(call: CallSpec) -> bool:
    """Whether tables of distances give the mask of every block as a view: on a CPU, whose kernel
    takes any strides, for one band of distances in which each query sees a key."""
    (area, *others), bias = call.scheme.areas(), call.scheme.bias
    if others or area != Area(area.lo, area.hi) or not bias or call.options:
        return False
    if not all(hasattr(term_type(part), "table") for part in bias):
        return False
    if call.device.type != "cpu" or call.value_dim != call.head_dim:
        return False
    if call.q_pos is None or call.k_pos is None or call.queries < 2:
        return False
    sees_first = area.lo is None or call.q_pos[0] - area.lo >= call.k_pos[0]
    return sees_first and (area.hi is None or call.q_pos[-1] - area.hi < call.k_pos[-1])


@torch.autocast("cpu", enabled=False)  # it would round tables to 8 bits
def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Attention, block after block; the keys in reverse order."""
    (area,), wide, q_pos, k_pos = p.scheme.areas(), accum_dtype(p.q), p.q_pos, p.k_pos
    assert isinstance(q_pos, range) and isinstance(k_pos, range)
    p = replace(p, q=p.q.to(wide), k=p.k.to(wide))
    (q, k), group = make_passes(p)[0].rotated(), p.q.shape[1] // p.k.shape[1]
    k, v = (x.flip(2).repeat_interleave(group, 1) for x in (k, p.v.to(wide)))
    terms: list[Any] = sorted(p.terms().values(), key=lambda term: type(term) is not ByDistance)
    away = torch.arange(q_pos[0] - k_pos[-1], q_pos[-1] - k_pos[0] + 1)
    for n, term in enumerate(terms):
        if isinstance(term, ByDistance):
            table = term.table(q.shape[1], q_pos, k_pos).to(wide)
            if n == 0:
                table = table.masked_fill(~area.visible(away, away.new_zeros(())), -inf)
            terms[n] = DistanceTable(table, q_pos[0] - k_pos[-1])
    call = _Call(terms, area, q_pos, k_pos, p.scale)
    sources = [x.to(wide) for term in terms for x in term.sources]
    return _Diagonals.apply(call, *dense(q, k, v), *sources).to(p.v.dtype)  # type: ignore[no-any-return]


class _Block(NamedTuple):
    """Some queries: their positions and rows; of the keys that they see the positions, and the
    columns, the last first."""

    q_pos: range
    k_pos: range
    rows: slice
    columns: slice


class _Call(NamedTuple):
    """What a call computes, but for its tensors."""

    terms: list[ByDiagonals]
    area: Area
    q_pos: range
    k_pos: range
    scale: float

    def with_sources(self, sources: Sequence[Tensor]) -> _Call:
        """The same of terms with these sources."""
        rest = iter(sources)
        own = (tuple(islice(rest, len(term.sources))) for term in self.terms)
        terms = [term.with_sources(one) for term, one in zip(self.terms, own, strict=True)]
        return self._replace(terms=terms)

    def blocks(self, largest: int = BLOCK_QUERIES[1]) -> Iterator[_Block]:
        """The last has the largest tables: it comes first, and the others reuse its memory."""
        q, k, (lo, hi) = self.q_pos, self.k_pos, (self.area.lo, self.area.hi)
        size = min(largest, max(BLOCK_QUERIES[0], len(q) // BLOCKS))
        for start in reversed(range(0, len(q), size)):
            rows = q[start : start + size]
            first = 0 if hi is None else max(0, rows[0] - hi + 1 - k[0])
            stop = len(k) if lo is None else min(len(k), rows[-1] - lo + 1 - k[0])
            columns = slice(len(k) - stop, len(k) - first)
            yield _Block(rows, k[first:stop], slice(start, start + len(rows)), columns)

    def biases(self, block: _Block, heads: int) -> tuple[list[Tensor], list[Addend]]:
        """The tables of a block, -inf at distances outside the area, and what is added to them."""
        where = (block.q_pos, block.k_pos)
        tables = [term.table(heads, *where) for term in self.terms]
        if not isinstance(self.terms[0], DistanceTable):  # else its values are -inf there
            least, table = block.q_pos[0] - block.k_pos[-1], tables[0].detach()
            if self.area.lo is not None:
                table[..., : max(0, self.area.lo - least)] = -inf
            if self.area.hi is not None:
                table[..., max(0, self.area.hi - least) :] = -inf
        return tables, [addend for term in self.terms for addend in term.addends(*where)]


def _mask(tables: list[Tensor], addends: list[Addend], keys: int) -> Tensor:
    """The sum of all biases of each pair, on the first table's memory where that is possible."""
    first, *others = (along_diagonals(table.detach(), keys) for table in tables)
    mask = sum(others, first)
    for columns, numbers in addends:
        mask[..., columns] += numbers.detach()
    return mask


class _Diagonals(torch.autograd.Function):
    """apply(call, q, k, v, *sources of its terms), k and v with the last key first."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *sources: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        call = call.with_sources(sources)
        for block in call.blocks():
            rows, columns = block.rows, block.columns
            mask = _mask(*call.biases(block, q.shape[1]), len(block.k_pos))
            tensors = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
            mask = mask.expand(q.shape[0], -1, -1, -1)
            ran = cpu_flash(*tensors, 0.0, attn_mask=mask, scale=call.scale)
            out[:, :, rows], lse[:, :, rows] = ran
        # what terms hold beside their sources, which are saved as autograd wants them
        ctx.call = call.with_sources([x.new_empty(0) for x in sources])
        ctx.save_for_backward(q, k, v, out, lse, *sources)
        return out

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *sources = ctx.saved_tensors
        grad, scale, learned = grad_outputs[0], ctx.call.scale, ctx.needs_input_grad[4:]
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        along = (grad * out).sum(-1, keepdim=True)
        own = [x.detach().requires_grad_(one) for x, one in zip(sources, learned, strict=True)]
        wanted, call = [x for x in own if x.requires_grad], ctx.call.with_sources(own)
        sums = [torch.zeros_like(x) for x in wanted]
        fits = BLOCK_SCORES // (q.shape[0] * q.shape[1] * k.shape[2])
        for block in call.blocks(min(BLOCK_QUERIES[1], max(LEAST_QUERIES, fits))):
            rows, columns = block.rows, block.columns
            with torch.enable_grad():
                tables, addends = call.biases(block, q.shape[1])
            queries, keys, up = q[:, :, rows], k[:, :, columns], grad[:, :, rows]
            weights = (queries * scale) @ keys.mT
            weights += _mask(tables, addends, weights.shape[3])
            # what is lost in rounding is zero: products of the smallest numbers take a CPU long
            weights = torch.threshold_(weights.sub_(lse[:, :, rows, None]), NEGLIGIBLE, -inf).exp_()
            d_v[:, :, columns] += weights.mT @ up
            d_scores = (up @ v[:, :, columns].mT).sub_(along[:, :, rows])
            d_table = q.new_zeros(*weights.shape[:3], sum(weights.shape[2:]) - 1)
            d_scores = torch.mul(d_scores, weights, out=along_diagonals(d_table, weights.shape[3]))
            d_q[:, :, rows] = d_scores @ keys * scale
            d_k[:, :, columns] += d_scores.mT @ queries * scale
            made = [(x, d_table if x.dim() == 4 else d_table.sum((0, 2))) for x in tables]
            made += [(x, d_scores[..., some]) for some, x in addends]
            given = [(x, d.sum_to_size(x.shape)) for x, d in made if x.requires_grad]
            if given:
                outputs, up = zip(*given, strict=True)
                found = torch.autograd.grad(outputs, wanted, up, allow_unused=True)
                for total, one in zip(sums, found, strict=True):
                    if one is not None:
                        total += one
        rest = iter(sums)
        return None, d_q, d_k, d_v, *(next(rest) if one else None for one in learned)
