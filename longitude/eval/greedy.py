"""What a model says next: its likeliest token, and again, until it ends or has said enough.

The same tokens as `generate(do_sample=False)` gives, without a generation config that could ask for
more than that (a repetition penalty, a minimal length). The prompt is read as reading.py reads its
text. Prompts of one length go through the model together: a small model is fast in batches alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import Read, forward, head_of, reads

AT_ONCE = 2**15  # tokens of a batch, prompts and answers together


def said(
    model: nn.Module, prompt: Int[Tensor, " n"], new: int, stop: Collection[int] | None = None
) -> list[int]:
    """The `new` likeliest tokens after a prompt, or those before the first that is in `stop`: the
    tokens that end a text; without it, the model's own."""
    return said_all(model, [prompt], new, stop)[0]


def said_all(
    model: nn.Module,
    prompts: Sequence[Int[Tensor, " _"]],
    new: int,
    stop: Collection[int] | None = None,
) -> list[list[int]]:
    """`said` of every prompt, in their order."""
    if new < 1 or not all(len(prompt) for prompt in prompts):
        raise UserError(
            f"an answer is 1 token or more behind a prompt of 1 or more, but got {shown(new)} and "
            f"prompts of {shown([len(prompt) for prompt in prompts])}: give more."
        )
    ends = ends_of(model) if stop is None else set(stop)
    found: dict[int, list[int]] = {}
    for places in _batches([len(prompt) for prompt in prompts], new):
        batch = torch.stack([prompts[place] for place in places])
        found |= zip(places, _greedy(model, batch, new, ends), strict=True)
    return [found[place] for place in range(len(prompts))]


def ends_of(model: nn.Module) -> set[int]:
    """The tokens with which a model ends a text."""
    settings = getattr(model, "generation_config", None) or getattr(model, "config", None)
    ends = getattr(settings, "eos_token_id", None)
    return {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}


def _batches(lengths: list[int], new: int) -> list[list[int]]:
    """The places of prompts that run together: of one length, and not too many tokens."""
    alike: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        alike.setdefault(length, []).append(place)
    return [
        places[first : first + rows]
        for length, places in alike.items()
        for rows in [max(1, AT_ONCE // (length + new))]
        for first in range(0, len(places), rows)
    ]


@torch.no_grad()
def _greedy(model: nn.Module, batch: Tensor, new: int, ends: set[int]) -> list[list[int]]:
    """Rows of a batch go on together until each has ended."""
    *_, read = reads(model, batch, keep=True)
    tokens, ended = [], torch.zeros(len(batch), dtype=torch.bool)
    while True:
        tokens.append(read.said.argmax(-1))
        ended |= torch.isin(tokens[-1].cpu(), torch.tensor(sorted(ends), dtype=torch.long))
        if len(tokens) == new or ended.all():
            rows = torch.stack(tokens, 1).tolist()
            return [list(takewhile(lambda token: token not in ends, row)) for row in rows]
        read = step(model, tokens[-1], read)


def step(model: nn.Module, token: Int[Tensor, " b"], read: Read) -> Read:
    """Read one token more of each row."""
    return forward(model, token[:, None], head_of(model), cache=read.cache)
