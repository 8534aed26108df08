"""Naive Bayes context extension (NBCE): every window answers in a row of its own; at each token the
window with the lowest entropy decides.

Su 2023, kexue.fm 9617. With windows S_1 … S_n and the continuation T, Bayes' rule yields, if the
windows are independent given T,

    log p(T | S_1 … S_n) = (β + 1) · P[log p(T | S)] - β · log p(T) + constant,

where naive Bayes has β = n - 1 and P (pooling) is the mean over windows. In practice P is the
window of lowest entropy and β = 0.25. Every row is cut to its top-p nucleus, whose entropy is
compared, less η for the window chosen last; for tokens in the nucleus of the row without context, β
times their log-probability is subtracted. With one window β = n - 1 = 0: the model's own answer.
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
MIN_LOG = -100.0  # a log-probability below this counts as outside the nucleus


@dataclass(frozen=True)
class Nbce:
    """How rows are pooled. `max` is for greedy decoding only: samples from it are unreadable."""

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
    """Pool the logits of all windows, and of the row without context if given. Return the logits,
    each window's entropy, and the window of lowest entropy. `last` is the window chosen for the
    previous token. The mean is over full rows: a token outside of one window's nucleus may be
    likely in another."""
    log_probs = rows.log_softmax(-1)
    kept = nucleus(log_probs, how.top_p)
    # -Σ p log p in nats; p isn't renormalised, as in the paper's code
    entropies = -(kept.exp() * kept.clamp(MIN_LOG, 0)).sum(-1)
    adjusted = entropies.clone()
    if last is not None:
        adjusted[last] -= how.eta
    window = int(adjusted.argmin())
    if len(rows) == 1:
        return rows[0], entropies, window
    poolings = {"entropy": kept[window], "mean": log_probs.mean(0), "max": kept.amax(0)}
    pooled = poolings[how.pooling]
    if empty is not None:
        prior = empty.log_softmax(-1)
        prior = prior if how.pooling == "mean" else nucleus(prior[None], how.top_p)[0]
        merged = (1 + how.beta) * pooled - how.beta * prior
        pooled = torch.where(prior > MIN_LOG, merged, pooled)
    return pooled, entropies, window


def nucleus(logs: Float[Tensor, "rows v"], top_p: float) -> Float[Tensor, "rows v"]:
    """Keep the log-probabilities of the fewest tokens that sum to `top_p` or more; -∞ elsewhere."""
    ordered, tokens = logs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    beyond = probs.cumsum(-1) - probs >= top_p  # sum before each token: the first always stays
    return logs.masked_fill(beyond.scatter(-1, tokens, beyond), -torch.inf)


class NbceSource:
    """A `Source` of pooled rows, with the window chosen for each token."""

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
    """Answer with each window of the text in a row of its own. `at_once` tokens of rows are
    prefilled together; rows whose caches exceed `room` bytes are prefilled again for every token.
    Options are those of `generate.answer_by`."""
    build = partial(NbceSource, model, how=how or Nbce(), at_once=at_once, room=room)
    return answer_by("nbce", build, model, tokenizer, windows, question, **options)
