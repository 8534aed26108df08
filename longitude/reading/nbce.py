"""Naive Bayes context extension (NBCE): every window answers in a row of its own; at each token the
window with the lowest entropy decides.

Su 2023, kexue.fm 9617. With windows S_1 … S_n and the text T to come, Bayes' rule and windows that
are independent given T make

    log p(T | S_1 … S_n) = (β + 1) · P[log p(T | S)] - β · log p(T) + constant,

where naive Bayes has β = n - 1 and P the mean over windows. In practice P = the window of lowest
entropy and β = 0.25: every row keeps its top-p nucleus, whose entropy counts, less η for the window
chosen last; where the row without context keeps a token, β times its log-probability is subtracted.
With one window β = n - 1 = 0, and the answer is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.reading.forward import MAX_TOKENS, Rows
from longitude.reading.generate import Answer, Prompt, answer_by

POOLINGS = ("entropy", "mean", "max")
MIN_LOG = -100.0  # a log-probability below this counts as left out


@dataclass(frozen=True)
class Nbce:
    """How rows are pooled. `max` is for greedy answers only: sampled from, it is unreadable."""

    beta: float = 0.25
    eta: float = 0.1
    top_p: float = 0.95
    pooling: str = "entropy"  # or "mean", "max"

    def __post_init__(self) -> None:
        if self.beta < -1:
            raise UserError(f"beta is -1 or more, but got {shown(self.beta)}: use 0.25.")
        if self.eta < 0:
            raise UserError(f"eta is 0 or more, but got {shown(self.eta)}: use 0.1.")
        if not 0 < self.top_p <= 1:
            given = shown(self.top_p)
            raise UserError(f"top_p is a share, but got {given}: use 0.95, or 1 for all.")
        if self.pooling not in POOLINGS:
            raise UserError(
                f"rows are pooled by 'entropy', 'mean' or 'max', but got {shown(self.pooling)}: "
                f"use one of them."
            )


def pool(
    rows: Float[Tensor, "windows v"],
    empty: Float[Tensor, " v"] | None,
    how: Nbce,
    last: int | None = None,
) -> tuple[Float[Tensor, " v"], Float[Tensor, " windows"], int]:
    """Pool the logits of all windows and of the row without context, if one is given: the logits,
    each window's entropy, and the window of lowest entropy. `last` is the window chosen for the
    token before. The mean is over whole rows: what one window leaves out of its nucleus, another
    may know."""
    logs = rows.log_softmax(-1)
    kept = nucleus(logs, how.top_p)
    # -Σ p log p in nats; p isn't normalised again, as in the paper's code
    entropies = -(kept.exp() * kept.clamp(MIN_LOG, 0)).sum(-1)
    counted = entropies.clone()
    if last is not None:
        counted[last] -= how.eta
    window = int(counted.argmin())
    if len(rows) == 1:
        return rows[0], entropies, window
    poolings = {"entropy": kept[window], "mean": logs.mean(0), "max": kept.amax(0)}
    chosen = poolings[how.pooling]
    if empty is not None:
        without = empty.log_softmax(-1)
        without = without if how.pooling == "mean" else nucleus(without[None], how.top_p)[0]
        merged = (1 + how.beta) * chosen - how.beta * without
        chosen = torch.where(without > MIN_LOG, merged, chosen)
    return chosen, entropies, window


def nucleus(logs: Float[Tensor, "rows v"], top_p: float) -> Float[Tensor, "rows v"]:
    """Log-probabilities of the fewest tokens that sum to `top_p` or more; -∞ for the others."""
    ordered, tokens = logs.sort(dim=-1, descending=True, stable=True)
    shares = ordered.exp()
    beyond = shares.cumsum(-1) - shares >= top_p  # of the tokens before it: the first always stays
    return logs.masked_fill(beyond.scatter(-1, tokens, beyond), -torch.inf)


class NbceSource:
    """The pooled rows, token by token, with the window that was chosen."""

    def __init__(
        self,
        model: nn.Module,
        layout: Prompt,
        windows: Sequence[Sequence[int]],
        how: Nbce,
        **options: Any,
    ) -> None:
        self.how, self.empty = how, len(windows) > 1 and how.beta != 0
        rows = [layout.row(window) for window in ([(), *windows] if self.empty else windows)]
        self.rows = Rows(model, rows, **options)
        self.last: int | None = None

    def __call__(self, token: int | None) -> tuple[Float[Tensor, " v"], dict[str, Any]]:
        rows = self.rows(token)
        empty, rows = (rows[0], rows[1:]) if self.empty else (None, rows)
        logits, entropies, window = pool(rows, empty, self.how, self.last)
        self.last, values = window, tuple(entropies.tolist())
        return logits, {"window": window, "entropy": values[window], "entropies": values}


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    how: Nbce | None = None,
    at_once: int = MAX_TOKENS,
    room: int | None = None,
    **options: Any,
) -> Answer:
    """Answer with each window of the text in a row of its own, `at_once` tokens of rows read
    together; rows whose caches pass `room` bytes are read again for every token. Options are those
    of `generate.answer_by`."""
    build = partial(NbceSource, model, how=how or Nbce(), at_once=at_once, room=room)
    return answer_by("nbce", build, model, tokenizer, windows, question, **options)
