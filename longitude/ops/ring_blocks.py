"""One block of keys against one rank's queries: its share of a softmax, and its own backward.

A block over a few runs of contiguous positions is tiles of plain kernels; any other is the score
matrix in blocks of queries, whose gradient follows from
    L = Σ dout·(W v) - Σ (dout·out) W,    W = exp(scores - LSE),
differentiated with the merged out and LSE held fixed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.ops import eager
from longitude.ops.inputs import BLOCK_SCORES, AttentionInputs, cut_tokens
from longitude.ops.lse_merge import TileOutput, add_tiles, tile_batches, tile_gradients
from longitude.ops.passes import accum_dtype
from longitude.ops.plan import CallSpec, Plan, plan_tiles
from longitude.ops.shards import Run, Runs


class Merged(NamedTuple):
    """What the backward of every block needs of the merged softmax."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor  # grad·out of each query


class Piece(NamedTuple):
    """Some queries over some keys: by tiles, or by the score matrix where there is no plan."""

    rows: slice
    inputs: AttentionInputs
    plan: Any  # of its tiles


def pieces(p: AttentionInputs, of_runs: tuple[Runs, Runs], backend: str) -> list[Piece]:
    """A block as tiles of plain kernels where its tokens are a few runs, a document's queries over
    its keys; else in blocks of queries."""
    if p.empty:
        return []
    q_runs, k_runs = of_runs
    if backend != "eager" and q_runs is not None and k_runs is not None:
        found = [_piece(p, q, k) for q in q_runs for k in k_runs if q.segment == k.segment]
        if all(isinstance(piece.plan, Plan) for piece in found):
            return found
    return [Piece(rows, p.rows(rows), None) for rows in eager.query_blocks(p, BLOCK_SCORES)]


def _piece(p: AttentionInputs, q_run: Run, k_run: Run) -> Piece:
    rows, columns = q_run.tokens, k_run.tokens
    cut = replace(
        p.rows(rows), q_pos=q_run.pos, k_pos=k_run.pos, k=p.k[:, :, columns], v=p.v[:, :, columns],
        k_length=cut_tokens(p.k_length, columns), key_padding=None, segments=None,
    )  # fmt: skip
    return Piece(rows, cut, plan_tiles(CallSpec.of(cut)))


def forward_block(
    p: AttentionInputs, of_runs: tuple[Runs, Runs], backend: str, merging: Any
) -> list[Any]:
    """Merge what a block gives; returns what the backward of each piece needs."""
    extras = []
    for rows, part, plan in pieces(p, of_runs, backend):
        if plan is None:
            weights, lse = _weights(part, None)
            out = eager.values(part, weights)
            merging.add(TileOutput(out[None, :, :, None], lse[None, :, :, None], [rows.start]))
            extras.append([])
        else:
            tiles, rotated = tile_batches(part, plan)
            extras.append(add_tiles(merging, tiles, part.scale, part.v, rotated, rows.start))
    return extras


def backward_block(
    p: AttentionInputs, of_runs: tuple[Runs, Runs], backend: str, extras: list[Any],
    merged: Merged, leaves: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """The gradients of a block for each of the tensors that it was built from."""
    wanted = [n for n, x in enumerate(leaves) if x.requires_grad]
    totals = [zeros_for(x) for x in leaves]
    with torch.enable_grad():
        parts = pieces(p, of_runs, backend)
    for (rows, part, plan), extra in zip(parts, extras, strict=True):
        here = Merged(*(x[:, :, rows] for x in merged))
        ends, of_ends = _score_loss(part, here) if plan is None else _tiles(part, plan, extra, here)
        found = torch.autograd.grad(ends, [leaves[n] for n in wanted], of_ends, allow_unused=True)
        for n, more in zip(wanted, found, strict=True):
            if more is not None:
                totals[n] += more
    return totals


def _tiles(p: AttentionInputs, plan: Plan, extra: list[Any], merged: Merged) -> Any:
    """The values and the rotated queries and keys of a piece, with the gradients of each."""
    with torch.enable_grad():
        tiles, rotated = tile_batches(p, plan)
    if not tiles:
        return [p.v], [torch.zeros_like(p.v)]
    grad, out, lse, _ = merged
    made = tile_gradients(tiles, p.scale, grad, (out, lse, extra), p.v, rotated)
    return [p.v, *rotated], made


@torch.enable_grad()
def _score_loss(p: AttentionInputs, merged: Merged) -> Any:
    """The number whose gradient is that of the scores, the values and what they come from."""
    grad, _, lse, delta = merged
    weights, _ = _weights(p, lse)
    loss = (grad * eager.values(p, weights)).sum() - (delta * weights.sum(-1)).sum()
    return [loss], None


def _weights(p: AttentionInputs, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """exp(scores - LSE) of every pair, by their own log-sum-exp or a given one."""
    s = eager.scores(p)
    total = s.total.masked_fill(~s.visible, float("-inf"))
    lse = total.logsumexp(-1) if lse is None else lse
    return (total - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp(), lse


def zeros_for(x: Tensor) -> Tensor:
    """Zeros to add gradients of x to, in float32 at least."""
    return torch.zeros_like(x, dtype=accum_dtype(x) if x.is_floating_point() else x.dtype)
