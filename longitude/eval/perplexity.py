"""Loss by position: how well each token is predicted, given all the text before it.

Nats a token. One forward over a text gives the loss at every position, binned on a log scale, and
the mean of its last tokens. Scoring the same last tokens with ever more text before them (Su,
kexue.fm 9708) tells whether more context helps.

The loss of every token of a long text, given all before it, from a live model.

Nats a token. One reading gives the loss at every position, so at every shorter length too: the mean
of its first n. Logits are made over stretches and are gone before the next: memory grows with the
length, never with length × vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import input_device, lm_head, logit_chunk, prefill

Logits = Callable[[Tensor], Tensor]  # tokens (b n) to logits (b n vocabulary)
AT_ONCE = 2**15  # tokens of one forward
FIRST, AN_OCTAVE = 8, 2  # positions of the first bin, and bins from there to twice as far


@torch.no_grad()
def token_losses(logits: Logits, tokens: Int[Tensor, "b m"]) -> Float[Tensor, "b n"]:
    """The loss of every token but the first, which nothing stands before; n = m - 1."""
    rows = max(1, AT_ONCE // tokens.shape[1])
    return torch.cat([_losses(logits, part) for part in tokens.split(rows)])


def _losses(logits: Logits, tokens: Tensor) -> Tensor:
    said = logits(tokens[:, :-1]).float()
    targets = tokens[:, 1:].to(said.device)
    found = F.cross_entropy(said.flatten(0, 1), targets.flatten(), reduction="none")
    return found.view_as(targets).cpu()


def edges(length: int) -> list[int]:
    """Where bins on a log scale begin and end: 0, 8, 11, 16, 23, 32, … length."""
    grid, k = [0], 0
    while (edge := round(FIRST * 2 ** (k / AN_OCTAVE))) < length:
        grid.append(edge)
        k += 1
    return [*grid, length]


def by_position(losses: Float[Tensor, "b n"]) -> tuple[tuple[int, int, float], ...]:
    """Bins of positions: first, past the last, mean loss."""
    wide = losses.double()
    bins = pairwise(edges(losses.shape[1]))
    return tuple((a, b, float(wide[:, a:b].mean())) for a, b in bins)


def tail(losses: Float[Tensor, "b n"], tokens: int) -> float:
    """The mean loss of the last tokens."""
    return float(losses[:, -tokens:].double().mean())


# what CPUs, CUDA's libraries and MPS say; an illegal memory access is another matter
SHORT_OF_MEMORY = re.compile(r"out of memory|allocate memory|enough memory|ALLOC_FAILED", re.I)


def losses(
    model: nn.Module, ids: Int[Tensor, " m"], *, chunk: int | None = None
) -> Float[Tensor, " n"]:
    """The loss of every token but the first, which nothing stands before; n = m - 1.

    The model is any causal one of transformers, patched or not; frequencies that depend on the
    total length need `patched(model, scheme, length=…)`. `chunk` is how many tokens one forward
    reads; without it, all where they fit.
    """
    return _scored(model, ids, 0, chunk)


def tail_losses(
    model: nn.Module, ids: Int[Tensor, " m"], tail: int, *, chunk: int | None = None
) -> Float[Tensor, " tail"]:
    """The loss of the last `tail` tokens, given all before them: the head sees no others."""
    if not 1 <= tail < len(ids):
        raise UserError(
            f"a tail is 1 token or more, and one at least stands before it, but got a tail of "
            f"{shown(tail)} for {len(ids)} tokens: give more text, or ask for less of it."
        )
    return _scored(model, ids, len(ids) - 1 - tail, chunk)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SHORT_OF_MEMORY.search(str(error)))


@torch.no_grad()
def _scored(model: nn.Module, ids: Tensor, skipped: int, chunk: int | None) -> Tensor:
    """The losses but for the first `skipped`."""
    if len(ids) < 2:
        raise UserError(f"a loss takes 2 tokens or more, but got {len(ids)}: give more text.")
    head, stretch = lm_head(model), logit_chunk(model)
    targets: Tensor = ids[1:].to(input_device(model))
    found: list[Tensor] = []
    for read in prefill(model, ids[None, :-1], chunk=chunk, head=head):
        hidden = read.hidden[0, max(0, skipped - read.first) :]
        if not len(hidden):
            continue
        past = read.first + read.hidden.shape[1]
        wanted = targets[past - len(hidden) : past]
        for x, y in zip(hidden.split(stretch), wanted.split(stretch), strict=True):
            found.append(F.cross_entropy(head(x), y.to(x.device), reduction="none"))
    return torch.cat([part.cpu() for part in found])
