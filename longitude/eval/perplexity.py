"""The loss of every token of a text, given all before it: nats per token.

One forward gives the loss at every position, so at every shorter length too, as the mean of the
first n. Logits are computed for a slice of tokens and dropped before the next slice: memory grows
with the length, never with length × vocabulary. In a process group each rank scores its own tokens,
and every rank gets all scores. Bins of positions are on a log scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import batch_rows, input_device, lm_head, logit_chunk, prefill
from longitude.hf.ranks import ranks_of
from longitude.ops.shards import gather_shards

Logits = Callable[[Tensor], Tensor]  # tokens (b n) to logits (b n vocabulary)
BATCH_TOKENS = 2**15  # tokens in one forward
FIRST_BIN, BINS_PER_OCTAVE = 8, 2  # positions of the first bin
# messages of CPUs, CUDA's libraries and MPS; an illegal memory access is a different error
OUT_OF_MEMORY = re.compile(r"out of memory|allocate memory|enough memory|ALLOC_FAILED", re.I)


@torch.no_grad()
def token_losses(logits: Logits, tokens: Int[Tensor, "b m"]) -> Float[Tensor, "b n"]:
    """The loss of every token but the first, which has no context; n = m - 1."""
    rows, parts = max(1, BATCH_TOKENS // tokens.shape[1]), []
    for batch in tokens.split(rows):
        scores = logits(batch[:, :-1]).float()
        targets = batch[:, 1:].to(scores.device)
        per_token = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(per_token.view_as(targets).cpu())
    return torch.cat(parts)


def edges(length: int) -> list[int]:
    """The edges of bins on a log scale: 0, 8, 11, 16, 23, 32, … length."""
    grid, k = [0], 0
    while (edge := round(FIRST_BIN * 2 ** (k / BINS_PER_OCTAVE))) < length:
        grid.append(edge)
        k += 1
    return [*grid, length]


def by_position(losses: Float[Tensor, "b n"]) -> tuple[tuple[int, int, float], ...]:
    """Bins of positions: first, past the last, mean loss."""
    doubles = losses.double()
    bins = pairwise(edges(losses.shape[1]))
    return tuple((a, b, float(doubles[:, a:b].mean())) for a, b in bins)


def tail(losses: Float[Tensor, "b n"], tokens: int) -> float:
    """The mean loss of the last tokens."""
    return float(losses[:, -tokens:].double().mean())


def losses(
    model: nn.Module, ids: Int[Tensor, " m"], *, chunk: int | None = None
) -> Float[Tensor, " n"]:
    """The loss of every token but the first, which has no context; n = m - 1.

    The model is any causal one of transformers, patched or not; frequencies that depend on the
    total length need `patched(model, scheme, length=…)`. `chunk` is the number of tokens per
    forward; without it, as many as fit.
    """
    if len(ids) < 2:
        raise UserError(f"a loss takes 2 tokens or more, but got {len(ids)}: give more text.")
    return token_scores(model, ids[None], chunk=chunk)[0][0]


def tail_losses(
    model: nn.Module, ids: Int[Tensor, "*b m"], scored: int, *, chunk: int | None = None
) -> Float[Tensor, "*b scored"]:
    """The loss of the last `scored` tokens of a text, or of several texts of one length, given all
    tokens before them. No other logits are computed."""
    rows, total = torch.atleast_2d(ids), ids.shape[-1]
    if not 1 <= scored < total:
        raise UserError(
            f"1 token or more is scored, with one at least before it, but got {shown(scored)} of "
            f"{total} tokens: give more text, or score less of it."
        )
    batches = rows.split(batch_rows(model, total))
    skipped = total - 1 - scored
    scores = torch.cat([token_scores(model, batch, skipped, chunk)[0] for batch in batches])
    return scores.view(*ids.shape[:-1], scored)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))


@torch.no_grad()
def token_scores(
    model: nn.Module, ids: Int[Tensor, "b m"], skipped: int = 0, chunk: int | None = None
) -> tuple[Float[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """The loss of each token after the first of every row, and whether the model ranks it first;
    the first `skipped` of these are left out."""
    head, at_once, ranks = lm_head(model), logit_chunk(model), ranks_of(model)
    targets: Tensor = ids[:, 1:].to(input_device(model))
    parts: list[list[Tensor]] = [[] for _ in ids]
    positions = []
    wanted = ids.shape[1] - 1 - skipped
    for out in prefill(model, ids[:, :-1], chunk=chunk, head=head, last=wanted):
        first = int((out.pos < skipped).sum())
        positions.append(out.pos[first:])
        expected = targets[:, positions[-1].to(targets.device)]
        for scored, hidden, row in zip(parts, out.hidden[:, first:], expected, strict=True):
            for x, y in zip(
                hidden.split(at_once), row.to(hidden.device).split(at_once), strict=True
            ):
                logits = head(x)
                hit = logits.argmax(-1) == y
                scored.append(torch.stack([F.cross_entropy(logits, y, reduction="none"), hit]))
    scores = torch.stack([torch.cat(scored, 1) for scored in parts], 1)
    scores = gather_shards(scores, torch.cat(positions), ranks and ranks.group, dim=2).cpu()
    return scores[0], scores[1].bool()
