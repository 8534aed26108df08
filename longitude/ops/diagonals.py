"""Biases on a CPU: SDPA in blocks of queries, under masks that are views, with exact gradients.

A bias by distance needs no dense mask: with the keys in reverse order, the bias of every pair of a
block is a view of a table of its distances (`along_diagonals`). Score gradients are written through
the same view of an empty table, and summing its overlapping rows gives the table's gradient.
A block's weights are recomputed from its log-sum-exp, so that memory stays linear.

Where all biases become constant with distance, blocks have only the near keys. Far ones are plain
causal attention, with a vector added to its queries and a number per query to its log-sum-exp.
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
from longitude.ops.lse_merge import (
    OPERATORS,
    MergeOneByOne,
    TileBatch,
    add_tiles,
    cpu_flash,
    tile_gradients,
)
from longitude.ops.passes import accum_dtype, batches, dense, make_passes, tiles
from longitude.ops.plan import CallSpec, Kernel, Plan
from longitude.parts.distance_bias import (
    Addend,
    ByDiagonals,
    ByDistance,
    DistanceTable,
    along_diagonals,
    term_type,
)

BLOCK_QUERIES = (64, 256)  # few, so that little is computed beyond a causal mask
BLOCKS = 16  # per call, within these bounds
LEAST_FAR = 3  # least ratio of all keys to a block's near ones for which far tiles pay off
LEAST_QUERIES = 32  # of a block in the backward, however many heads there are
NEGLIGIBLE = -64.0  # a log-weight below which it is zero


def fits_diagonals(call: CallSpec) -> bool:
    """Whether every block's mask is a view of tables of distances: on a CPU, whose kernel takes any
    strides, for one band of distances in which each query sees a key."""
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


@torch.autocast("cpu", enabled=False)  # which would round tables to 8 bits
def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Compute attention block by block, with the keys in reverse order."""
    (area,), dtype, q_pos, k_pos = p.scheme.areas(), accum_dtype(p.q), p.q_pos, p.k_pos
    assert isinstance(q_pos, range) and isinstance(k_pos, range)
    p = replace(p, q=p.q.to(dtype), k=p.k.to(dtype))
    (q, k), group = make_passes(p)[0].rotated(), p.q.shape[1] // p.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, p.v.to(dtype)))
    terms: list[Any] = sorted(p.terms().values(), key=lambda term: type(term) is not ByDistance)
    for n, term in enumerate(terms):
        if isinstance(term, ByDistance):
            table = term.table(q.shape[1], q_pos, k_pos).to(dtype)
            terms[n] = DistanceTable(table, q_pos[0] - k_pos[-1])
    call = _Call(terms, *_near_and_far(p, area), q_pos, k_pos, p.scale)
    sources = [x.to(dtype) for term in terms for x in term.sources]
    return _Diagonals.apply(call, *dense(q, k, v), *sources).to(p.v.dtype)  # type: ignore[no-any-return]


Far = list[tuple[bool, list[TileBatch]]]  # (whether keys lie ahead of queries, their tiles)


def _near_and_far(p: AttentionInputs, area: Area) -> tuple[Area, Far]:
    """Return the area where biases change with distance, and the tiles of the rest. There are no
    tiles if the rest is small, if queries may be far from all keys, if biases read other keys than
    the kernel (pre-RoPE ones), or in a forward whose masks are cheap views of small tables."""
    q, k, ends = p.q_pos, p.k_pos, [part.flat_beyond for part in p.scheme.bias]
    assert isinstance(q, range) and isinstance(k, range)
    within = k[0] <= q[0] and q[-1] <= k[-1] and area in (Area(), Area(lo=0))
    cheap = not p.needs_grad and all(term_type(part) is ByDistance for part in p.scheme.bias)
    flat = max(end or len(k) for end in ends)
    little = LEAST_FAR * (flat + BLOCK_QUERIES[1]) > len(k)
    if not within or p.scheme.rotary is not None or cheap or little:
        return area, []
    far = []
    for ahead, where in ((False, Area(lo=flat)), (True, Area(hi=1 - flat))):
        cut = batches(tiles((area & where,), q, k))
        corners = [([t.top for t in b], [t.left for t in b]) for b in cut]
        op = OPERATORS[Kernel.CPU_FLASH]
        parts = [TileBatch(op, 0, b[0], *at, 0, 0) for b, at in zip(cut, corners, strict=True)]
        far += [(ahead, parts)] if parts else []
    return area & Area(lo=1 - flat, hi=flat), far


class _Block(NamedTuple):
    """A block of queries: their positions and rows, and the positions and columns of the keys that
    they see. Columns count from the last key."""

    q_pos: range
    k_pos: range
    rows: slice
    columns: slice


class _Call(NamedTuple):
    """All that a call needs besides its tensors."""

    terms: list[ByDiagonals]
    area: Area
    far: Far
    q_pos: range
    k_pos: range
    scale: float

    def with_sources(self, sources: Sequence[Tensor]) -> _Call:
        """Return the same call, with these sources for its terms."""
        remaining = iter(sources)
        by_term = (tuple(islice(remaining, len(term.sources))) for term in self.terms)
        terms = [term.with_sources(x) for term, x in zip(self.terms, by_term, strict=True)]
        return self._replace(terms=terms)

    def blocks(self, largest: int = BLOCK_QUERIES[1]) -> Iterator[_Block]:
        """Yield blocks, the last first: its tables are the largest, and others reuse its memory."""
        q, k, (lo, hi) = self.q_pos, self.k_pos, (self.area.lo, self.area.hi)
        size = min(largest, max(BLOCK_QUERIES[0], len(q) // BLOCKS))
        for start in reversed(range(0, len(q), size)):
            rows = q[start : start + size]
            first = 0 if hi is None else max(0, rows[0] - hi + 1 - k[0])
            stop = len(k) if lo is None else min(len(k), rows[-1] - lo + 1 - k[0])
            columns = slice(len(k) - stop, len(k) - first)
            yield _Block(rows, k[first:stop], slice(start, start + len(rows)), columns)

    def biases(self, block: _Block, heads: int) -> tuple[list[Tensor], list[Addend]]:
        """Return the tables of a block, and what is added to them."""
        where = (block.q_pos, block.k_pos)
        tables = [term.table(heads, *where) for term in self.terms]
        return tables, [addend for term in self.terms for addend in term.addends(*where)]

    def mask(self, block: _Block, tables: list[Tensor], addends: list[Addend]) -> Tensor:
        """Return the sum of all biases of each pair, -inf at distances outside the area, in the
        first table's memory where possible."""
        first, *others = (table.detach() for table in tables)
        first = first.clone() if first.dim() == 2 else first  # all blocks share it
        least = block.q_pos[0] - block.k_pos[-1]
        if self.area.lo is not None:
            first[..., : max(0, self.area.lo - least)] = -inf
        if self.area.hi is not None:
            first[..., max(0, self.area.hi - least) :] = -inf
        keys = len(block.k_pos)
        mask = sum((along_diagonals(x, keys) for x in others), along_diagonals(first, keys))
        for columns, numbers in addends:
            mask[..., columns] += numbers.detach()
        return mask

    def flat(self, ahead: bool, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return what far keys' biases add: a number per query (b|1 h n|1), and changed queries."""
        numbers, vectors = zip(*(term.far(ahead) for term in self.terms), strict=True)
        added = [x[:, None] / self.scale for x in vectors if x is not None]
        return sum(numbers, q.new_zeros(())), sum(added, q)


class _Diagonals(torch.autograd.Function):
    """apply(call, q, k, v, *sources of its terms)."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *sources: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        call, far = call.with_sources(sources), []
        reversed_kv = (k.flip(2), v.flip(2))
        for block in call.blocks():
            mask = call.mask(block, *call.biases(block, q.shape[1])).expand(q.shape[0], -1, -1, -1)
            tensors = (q[:, :, block.rows], *(x[:, :, block.columns] for x in reversed_kv))
            ran = cpu_flash(*tensors, 0.0, attn_mask=mask, scale=call.scale)
            out[:, :, block.rows], lse[:, :, block.rows] = ran
        for ahead, tile_batches in call.far:
            numbers, queries = call.flat(ahead, q)
            merging = MergeOneByOne(q.shape[:3], q)
            add_tiles(merging, tile_batches, call.scale, v, (queries, k))
            far += [merging.out, merging.lse.add_(numbers)]
            out.lerp_(far[-2], torch.sigmoid(far[-1] - lse)[..., None])
            lse = torch.logaddexp(lse, far[-1])
        # terms without their sources, which autograd saves
        ctx.call = call.with_sources([x.new_empty(0) for x in sources])
        ctx.save_for_backward(q, k, v, out, lse, *far, *sources)
        return out

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse, *rest = ctx.saved_tensors
        far, sources = rest[: 2 * len(ctx.call.far)], rest[2 * len(ctx.call.far) :]
        grad, scale, learned = grad_outputs[0], ctx.call.scale, ctx.needs_input_grad[4:]
        delta = (grad * out).sum(-1, keepdim=True)
        leaves = [x.detach().requires_grad_(one) for x, one in zip(sources, learned, strict=True)]
        targets, call = [x for x in leaves if x.requires_grad], ctx.call.with_sources(leaves)
        totals = [torch.zeros_like(x) for x in targets]

        def add_up(made: list[tuple[Tensor, Tensor]]) -> None:
            """Propagate gradients of the outputs of terms to their sources, and accumulate them."""
            given = [(x, d.sum_to_size(x.shape)) for x, d in made if x.requires_grad]
            if not given:
                return
            outputs, up = zip(*given, strict=True)
            results = torch.autograd.grad(outputs, targets, up, allow_unused=True)
            for total, one in zip(totals, results, strict=True):
                if one is not None:
                    total += one

        reversed_kv, d_q = (k.flip(2), v.flip(2)), torch.empty_like(q)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        widest = max(len(block.k_pos) for block in call.blocks())
        fits = BLOCK_SCORES // (q.shape[0] * q.shape[1] * widest)
        for block in call.blocks(min(BLOCK_QUERIES[1], max(LEAST_QUERIES, fits))):
            rows, columns = block.rows, block.columns
            with torch.enable_grad():
                tables, addends = call.biases(block, q.shape[1])
            queries, up = q[:, :, rows], grad[:, :, rows]
            keys, values = (x[:, :, columns] for x in reversed_kv)
            weights = (queries * scale) @ keys.mT
            weights += call.mask(block, tables, addends)
            # weights that rounding would lose are zeroed: products of denormals are slow on a CPU
            weights = torch.threshold_(weights.sub_(lse[:, :, rows, None]), NEGLIGIBLE, -inf).exp_()
            d_v[:, :, columns] += weights.mT @ up
            d_scores = (up @ values.mT).sub_(delta[:, :, rows])
            d_table = q.new_zeros(*weights.shape[:3], sum(weights.shape[2:]) - 1)
            d_scores = torch.mul(d_scores, weights, out=along_diagonals(d_table, weights.shape[3]))
            d_q[:, :, rows] = d_scores @ keys * scale
            d_k[:, :, columns] += d_scores.mT @ queries * scale
            made = [(x, d_table if x.dim() == 4 else d_table.sum((0, 2))) for x in tables]
            made += [(x, d_scores[..., some]) for some, x in addends]
            add_up(made)
        d_k, d_v = d_k.flip(2), d_v.flip(2)
        for (ahead, own_tiles), o, o_lse in zip(call.far, far[::2], far[1::2], strict=True):
            with torch.enable_grad():
                numbers, queries = call.flat(ahead, q)
            merged = (out, lse - numbers.detach(), [()] * len(own_tiles))
            more = tile_gradients(own_tiles, scale, grad, merged, v, (queries.detach(), k))
            for total, one in zip((d_v, d_q, d_k), more, strict=True):
                total += one
            d_numbers = (o_lse - lse).exp() * ((grad * o).sum(-1) - delta[..., 0])
            add_up([(numbers, d_numbers), (queries, more[1])])
        given = iter(totals)
        return None, d_q, d_k, d_v, *(next(given) if one else None for one in learned)
