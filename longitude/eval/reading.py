"""The loss of every token of a long text, given all before it, from a live model.

Nats a token. One reading gives the loss at every position, so at every shorter length too: the mean
of its first n. Logits are made over stretches and are gone before the next: memory grows with the
length, never with length × vocabulary.
"""

from __future__ import annotations

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.eval.prefill import head_of, place_of, reads, stretch_for
from longitude.fields import Mistake, shown

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
        raise Mistake(
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
        raise Mistake(f"a loss takes 2 tokens or more, but got {len(ids)}: give more text.")
    head, stretch = head_of(model), stretch_for(model)
    targets: Tensor = ids[1:].to(place_of(model))
    found: list[Tensor] = []
    for read in reads(model, ids[None, :-1], chunk=chunk, head=head):
        hidden = read.hidden[0, max(0, skipped - read.first) :]
        if not len(hidden):
            continue
        past = read.first + read.hidden.shape[1]
        wanted = targets[past - len(hidden) : past]
        for x, y in zip(hidden.split(stretch), wanted.split(stretch), strict=True):
            found.append(F.cross_entropy(head(x), y.to(x.device), reduction="none"))
    return torch.cat([part.cpu() for part in found])
