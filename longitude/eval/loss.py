"""Loss by position: how well each token is predicted, given all the text before it.

Nats a token. One forward over a text gives the loss at every position, binned on a log scale, and
the mean of its last tokens. Scoring the same last tokens with ever more text before them (Su,
kexue.fm 9708) tells whether more context helps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

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
