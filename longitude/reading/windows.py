"""Parallel context windows: the windows of a text side by side, the question after all of them.

Ratner et al. 2022, "Parallel Context Windows for Large Language Models", arXiv:2212.10947. Windows
are read apart, all at the same positions; their keys and values are put end to end, one beginning
for all (a second first token does harm); the question and the answer stand after the longest window
and see everything. Nothing stands further apart than window, question and answer are long, and
nothing is trained. Windows shorter than the longest begin together (`left`, the paper's) or end
together (`right`, right before the question). With one window it is the model as it is.

A window's mass is the share of attention its keys get from the token that says the next one, the
mean over heads and layers; what is missing to 1 is on the question, the answer and the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import chunk_for, input_device, lm_head
from longitude.hf.patch import trained_length
from longitude.reading import forward as place
from longitude.reading.answer import Answer, Tell, said
from longitude.reading.attention_recorder import Watch
from longitude.reading.forward import fresh, joined, local, movable, repeated, taken
from longitude.reading.kv_rows import AT_ONCE
from longitude.reading.prompt import Prompt, all_spelled, check_fits, prompt

ALIGNS = ("left", "right")


class Source:
    """One row that sees all windows at once, token by token."""

    def __init__(
        self,
        model: nn.Module,
        layout: Prompt,
        windows: Sequence[Sequence[int]],
        *,
        align: str = "left",
        at_once: int = AT_ONCE,
    ) -> None:
        check(model, len(windows), align)
        self.model, self.layout, self.at_once = model, layout, at_once
        self.place = input_device(model)
        self.windows = [list(window) for window in windows]
        self.longest = max(map(len, self.windows))
        start = len(layout.head)
        self.starts = [start + _shift(w, self.longest, align) for w in self.windows]
        self.next_at = start + self.longest
        self.keys = list(range(start))  # the position of each key
        self.masses: list[tuple[float, ...]] = []
        self.cache: Any = None

    def first(self) -> Float[Tensor, " v"]:
        """Read everything, and say what follows."""
        self.cache = self._joined()
        for first, window in zip(self.starts, self.windows, strict=True):
            self.keys += range(first, first + len(window))
        *before, last = self.layout.tail
        if before:
            ids, at, keys = self._placed(before)
            place.read(self.model, ids, at, self.cache, keys=keys)
        return self.next(last)

    def next(self, token: int) -> Float[Tensor, " v"]:
        """What follows one token more."""
        ids, at, keys = self._placed([token])
        with Watch(len(self.keys)) as watch:
            out = place.logits(self.model, ids, at, self.cache, keys=keys)[0]
        self.masses.append(self._mass(watch.shares()))
        return out

    def seen(self, index: int) -> dict[str, Any]:
        """What a step tells of the windows: where most of the attention was, and all of it."""
        mass = self.masses[index]
        return {"window": mass.index(max(mass)) if mass else None, "mass": mass}

    def _placed(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """These tokens, their positions, and those of all keys once they are read."""
        at = list(range(self.next_at, self.next_at + len(tokens)))
        self.next_at += len(tokens)
        self.keys += at
        ids, positions, keys = (
            torch.tensor([x], device=self.place) for x in (tokens, at, self.keys)
        )
        return ids, positions, keys

    def _mass(self, shares: Tensor | None) -> tuple[float, ...]:
        if shares is None:
            return ()
        ends = list(accumulate(map(len, self.windows), initial=len(self.layout.head)))
        return tuple(float(shares[a:b].sum()) for a, b in pairwise(ends))

    # the windows

    def _joined(self) -> Any:
        head = [*self.layout.head]
        cache, parts = None, []
        if head:
            cache = fresh(self.model)
            self._read([head], [0], cache)
            parts = taken(cache, [(0, 0, len(head))])
        found: dict[int, Any] = {}
        for group in self._groups():
            found |= zip(group, self._window_group(group, cache), strict=True)
        return joined([*parts, *(found[index] for index in range(len(self.windows)))])

    def _groups(self) -> list[list[int]]:
        """Windows that are read together: of like length, `at_once` tokens at most."""
        order = sorted(range(len(self.windows)), key=lambda i: -len(self.windows[i]))
        many = max(1, self.at_once // self.longest) if not place.alone(self.model) else 1
        return [order[first : first + many] for first in range(0, len(order), many)]

    def _window_group(self, group: list[int], head: Any) -> list[Any]:
        """Keys and values of some windows, read beside each other behind the beginning."""
        start, windows = len(self.layout.head), [self.windows[index] for index in group]
        cache = fresh(self.model) if head is None else repeated(head, len(group))
        widest = max(map(len, windows))
        # padding comes last, where a causal model does not see it
        rows = [window + window[-1:] * (widest - len(window)) for window in windows]
        self._read(rows, [self.starts[index] for index in group], cache, start)
        return taken(cache, [(row, start, start + len(w)) for row, w in enumerate(windows)])

    def _read(self, rows: list[list[int]], starts: list[int], cache: Any, before: int = 0) -> None:
        """Read rows that begin at these positions, as many tokens at a time as fit."""
        ids = torch.tensor(rows, device=self.place)
        at = torch.tensor(starts, device=self.place)[:, None] + torch.arange(
            ids.shape[1], device=self.place
        )
        head = torch.arange(before, device=self.place).expand(len(rows), -1)
        chunk = chunk_for(self.model, *ids.shape, lm_head(self.model))  # type: ignore[misc]
        for first in range(0, ids.shape[1], chunk):
            piece = slice(first, first + chunk)
            keys = torch.cat([head, at[:, : piece.stop]], 1)
            place.read(self.model, ids[:, piece], at[:, piece], cache, keys=keys)


def check(model: nn.Module, windows: int, align: str) -> None:
    """Raise where windows can't stand side by side."""
    name = type(model).__name__
    if align not in ALIGNS:
        raise UserError(
            f"windows align 'left' or 'right', but got {shown(align)}: use one of them."
        )
    if not movable(model):
        raise UserError(
            f"windows are joined in a cache of keys and values as {name} makes them, and this one "
            f"is patched or keeps more than those: read it with nbce, or leave the patch."
        )
    if windows > 1 and local(model):
        raise UserError(
            f"layers of {name} see the last tokens only, so most windows would be hidden from the "
            f"question: read it with nbce."
        )
    place.check(model)


def _shift(window: Sequence[int], longest: int, align: str) -> int:
    return 0 if align == "left" else longest - len(window)


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    align: str = "left",
    chat: bool | None = None,
    tell: Tell | None = None,
    at_once: int = AT_ONCE,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """What a model answers, the windows of the text side by side before it.

    Args:
        align: where windows shorter than the longest stand: with their beginnings or their ends.
        chat: use the tokenizer's chat template; without a word, if there is one.
        tell: called with each step as it comes.
        at_once: tokens of windows that are read together.
        options: transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    layout, ids = prompt(tokenizer, question, chat=chat), all_spelled(tokenizer, windows)
    check_fits(layout, ids, max_new_tokens, trained_length(model))
    source = Source(model, layout, ids, align=align, at_once=at_once)
    options |= {"max_new_tokens": max_new_tokens}
    return said("windows", model, tokenizer, source, layout, len(ids), tell, options)
