"""Naive Bayes context extension: each window answers in a row of its own, the surest one is heard.

Su 2023, kexue.fm 9617. With windows S_1 … S_n and the words T to come, Bayes' rule and windows that
are independent given T make

    log p(T | S_1 … S_n) = (β + 1) · P[log p(T | S)] - β · log p(T) + constant,

where naive Bayes has β = n - 1 and P the mean over windows. What works is P = the window of least
entropy and β = 0.25: every row keeps the tokens of its top-p nucleus, the entropy is that of what
it kept, the window chosen last is η surer than it is, and where the row without a context keeps a
token, β of its logarithm is taken off. With one window there is nothing to extend: β = n - 1 = 0,
and the answer is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.hf.patch import trained_length
from longitude.reading.answer import Answer, Tell, said
from longitude.reading.kv_rows import AT_ONCE, Rows
from longitude.reading.prompt import Prompt, all_spelled, check_fits, prompt

POOLINGS = ("entropy", "mean", "max")
LEAST = -100.0  # a logarithm under which a token counts as left out


@dataclass(frozen=True)
class Nbce:
    """How rows become one. `max` is for greedy answers only: drawn from, it is unreadable."""

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
            raise UserError(
                f"top_p is a share, but got {shown(self.top_p)}: use 0.95, or 1 for all."
            )
        if self.pooling not in POOLINGS:
            raise UserError(
                f"rows are pooled by 'entropy', 'mean' or 'max', but got {shown(self.pooling)}: "
                f"use one of them."
            )


@dataclass(frozen=True, eq=False)
class Pooled:
    """One token's logits, and what was seen of the windows."""

    logits: Float[Tensor, " v"]
    entropies: Float[Tensor, " windows"]
    window: int  # of least entropy, the last one's counted η less


def pooled(
    rows: Float[Tensor, "windows v"],
    empty: Float[Tensor, " v"] | None,
    how: Nbce,
    last: int | None = None,
) -> Pooled:
    """Logits of all windows and of no context, as one.

    `last` is the window chosen for the token before. Without `empty` nothing is taken off. A mean
    takes rows whole: what one window leaves out of its nucleus, another may know.
    """
    logs = rows.log_softmax(-1)
    kept = nucleus(logs, how.top_p)
    entropies = entropy(kept)
    counted = entropies.clone()
    if last is not None:
        counted[last] -= how.eta
    window = int(counted.argmin())
    if len(rows) == 1:
        return Pooled(rows[0], entropies, window)
    if how.pooling == "mean":
        chosen = logs.mean(0)
    else:
        chosen = kept[window] if how.pooling == "entropy" else kept.amax(0)
    if empty is None:
        return Pooled(chosen, entropies, window)
    without = empty.log_softmax(-1)
    without = without if how.pooling == "mean" else nucleus(without[None], how.top_p)[0]
    merged = (1 + how.beta) * chosen - how.beta * without
    return Pooled(torch.where(without > LEAST, merged, chosen), entropies, window)


def nucleus(logs: Float[Tensor, "rows v"], top_p: float) -> Float[Tensor, "rows v"]:
    """Logarithms of the fewest tokens that sum to `top_p` or more; -∞ for the others."""
    ordered, tokens = logs.sort(dim=-1, descending=True, stable=True)
    shares = ordered.exp()
    beyond = shares.cumsum(-1) - shares >= top_p  # of the tokens before it: the first always stays
    return logs.masked_fill(beyond.scatter(-1, tokens, beyond), -torch.inf)


def entropy(logs: Float[Tensor, "rows v"]) -> Float[Tensor, " rows"]:
    """-Σ p log p of what is kept, in nats: shares are not scaled up to 1 again, as in the paper's
    code."""
    return -(logs.exp() * logs.clamp(LEAST, 0)).sum(-1)


@dataclass(eq=False)
class Source:
    """The pooled rows, token by token, and the windows that were chosen."""

    rows: Rows
    how: Nbce
    empty: bool  # whether row 0 has no context
    trace: list[Pooled] = field(default_factory=list)

    def first(self) -> Float[Tensor, " v"]:
        return self._pool(self.rows.first())

    def next(self, token: int) -> Float[Tensor, " v"]:
        return self._pool(self.rows.next(token))

    def seen(self, index: int) -> dict[str, Any]:
        """What a step tells of the windows."""
        one = self.trace[index]
        entropies = tuple(one.entropies.tolist())
        return {"window": one.window, "entropy": entropies[one.window], "entropies": entropies}

    def _pool(self, said: Tensor) -> Tensor:
        last = self.trace[-1].window if self.trace else None
        empty, rows = (said[0], said[1:]) if self.empty else (None, said)
        made = pooled(rows, empty, self.how, last)
        self.trace.append(Pooled(made.logits[:0], made.entropies, made.window))
        return made.logits


def source(
    model: nn.Module,
    layout: Prompt,
    windows: Sequence[Sequence[int]],
    how: Nbce,
    *,
    at_once: int = AT_ONCE,
    room: int | None = None,
) -> Source:
    """The rows of these windows, as tokens, ready to say what follows."""
    empty = len(windows) > 1 and how.beta != 0
    rows = [layout.row(()), *map(layout.row, windows)] if empty else [*map(layout.row, windows)]
    return Source(Rows(model, rows, at_once=at_once, room=room), how, empty)


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    how: Nbce | None = None,
    chat: bool | None = None,
    tell: Tell | None = None,
    at_once: int = AT_ONCE,
    room: int | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """What a model answers, each window of the text in a row of its own.

    Args:
        chat: use the tokenizer's chat template; without a word, if there is one.
        tell: called with each step as it comes.
        at_once: tokens of rows that are read together.
        room: bytes for caches; rows that find none are read again for every token.
        options: transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    layout, ids = prompt(tokenizer, question, chat=chat), all_spelled(tokenizer, windows)
    check_fits(layout, ids, max_new_tokens, trained_length(model))
    made = source(model, layout, ids, how or Nbce(), at_once=at_once, room=room)
    options |= {"max_new_tokens": max_new_tokens}
    return said("nbce", model, tokenizer, made, layout, len(ids), tell, options)
