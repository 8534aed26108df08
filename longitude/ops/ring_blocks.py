"""One block of keys against one rank's queries: its share of a softmax, and its own backward.

A block of a few runs of contiguous positions becomes tiles of plain kernels; any other is the score
matrix in blocks of queries, whose gradients are those of
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
    """The results of the merged softmax that the backward of every block needs."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor  # grad·out of each query


class Piece(NamedTuple):
    """A slice of queries over a slice of keys: tiles, or the score matrix if there is no plan."""

    rows: slice
    inputs: AttentionInputs
    plan: Any  # of tiles, or None


def pieces(p: AttentionInputs, of_runs: tuple[Runs, Runs], backend: str) -> list[Piece]:
    """Cut a block into tiles of plain kernels if its tokens are a few runs, each document's queries
    over its own keys; else into blocks of queries."""
    if p.empty:
        return []
    q_runs, k_runs = of_runs
    if backend != "eager" and q_runs is not None and k_runs is not None:
        tiled = [_piece(p, q, k) for q in q_runs for k in k_runs if q.segment == k.segment]
        if all(isinstance(piece.plan, Plan) for piece in tiled):
            return tiled
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
    """Merge a block's output; return what the backward of each piece needs."""
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
    """Return the gradients of a block for each of the tensors that it was built from."""
    needed = [n for n, x in enumerate(leaves) if x.requires_grad]
    totals = [zeros_for(x) for x in leaves]
    with torch.enable_grad():
        parts = pieces(p, of_runs, backend)
    for (rows, part, plan), extra in zip(parts, extras, strict=True):
        here = Merged(*(x[:, :, rows] for x in merged))
        outs, d_outs = _score_loss(part, here) if plan is None else _tiles(part, plan, extra, here)
        grads = torch.autograd.grad(outs, [leaves[n] for n in needed], d_outs, allow_unused=True)
        for n, more in zip(needed, grads, strict=True):
            if more is not None:
                totals[n] += more
    return totals


def _tiles(p: AttentionInputs, plan: Plan, extra: list[Any], merged: Merged) -> Any:
    """Return the values and rotated q and k of a piece, with the gradients of each."""
    with torch.enable_grad():
        tiles, rotated = tile_batches(p, plan)
    if not tiles:
        return [p.v], [torch.zeros_like(p.v)]
    grad, out, lse, _ = merged
    gradients = tile_gradients(tiles, p.scale, grad, (out, lse, extra), p.v, rotated)
    return [p.v, *rotated], gradients


@torch.enable_grad()
def _score_loss(p: AttentionInputs, merged: Merged) -> Any:
    """Return the loss whose gradients are those of the scores, the values and their inputs."""
    grad, _, lse, delta = merged
    weights, _ = _weights(p, lse)
    loss = (grad * eager.values(p, weights)).sum() - (delta * weights.sum(-1)).sum()
    return [loss], None


def _weights(p: AttentionInputs, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return exp(scores - LSE) of every pair, with the scores' own log-sum-exp or a given one."""
    s = eager.scores(p)
    total = s.total.masked_fill(~s.visible, float("-inf"))
    lse = total.logsumexp(-1) if lse is None else lse
    return (total - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp(), lse


def zeros_for(x: Tensor) -> Tensor:
    """Return zeros in which to sum gradients of x, in float32 at least."""
    return torch.zeros_like(x, dtype=accum_dtype(x) if x.is_floating_point() else x.dtype)
