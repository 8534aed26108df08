"""Parallel context windows: the windows of a text side by side, the question after all of them.

Ratner et al. 2022, "Parallel Context Windows for Large Language Models", arXiv:2212.10947. Windows
are read separately, all at the same positions; their keys and values are concatenated behind one
head (a second first token does harm); question and answer are positioned after the longest window
and see everything. No distance exceeds window, question and answer, and nothing is trained. Shorter
windows align at their beginnings (`left`, the paper's) or their ends (`right`, next to the
question). With one window it is the unmodified model.

A window's mass is the share of attention its keys get from the token that predicts the next one,
the mean over heads and layers; the rest of 1 is on question, answer and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import input_device
from longitude.hf.families import family_of
from longitude.hf.families.alibi import MPT
from longitude.hf.patch import trained_length
from longitude.reading import forward as kv
from longitude.reading.generate import (
    Answer,
    Prompt,
    Tell,
    encode_windows,
    generate_answer,
    prompt,
)

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class Source:
    """One row that sees all windows at once, token by token."""

    def __init__(
        self,
        model: nn.Module,
        layout: Prompt,
        windows: Sequence[Sequence[int]],
        *,
        align: str = "left",
        at_once: int = kv.MAX_TOKENS,
    ) -> None:
        check(model, len(windows), align)
        self.model, self.layout = model, layout
        # MPT has one bias for all rows, so rows at different positions can't be read together
        self.max_tokens = 1 if family_of(model) is MPT else at_once
        self.windows = [list(window) for window in windows]
        start, longest = len(layout.head), max(map(len, self.windows))
        right = align == "right"
        self.starts = [start + (longest - len(w) if right else 0) for w in self.windows]
        self.next_position = start + longest
        self.positions = list(range(start))  # of each key
        self.masses: list[tuple[float, ...]] = []
        self.cache: Any = None

    def first(self) -> Float[Tensor, " v"]:
        """Read everything: the logits after the question."""
        self.cache = self._read_windows()
        for start, window in zip(self.starts, self.windows, strict=True):
            self.positions += range(start, start + len(window))
        *before, last = self.layout.tail
        if before:
            ids, at, keys = self._place(before)
            kv.forward(self.model, ids, at, self.cache, keys=keys)
        return self.next(last)

    def next(self, token: int) -> Float[Tensor, " v"]:
        """The logits after one more token."""
        ids, at, keys = self._place([token])
        with AttentionRecorder(len(self.positions)) as recorder:
            logits = kv.forward(self.model, ids, at, self.cache, keys=keys, head=True)
        assert logits is not None
        shares, mass = recorder.shares(), ()
        if shares is not None:
            ends = accumulate(map(len, self.windows), initial=len(self.layout.head))
            mass = tuple(float(shares[a:b].sum()) for a, b in pairwise(ends))
        self.masses.append(mass)
        return logits[0]

    def trace(self, index: int) -> dict[str, Any]:
        """The window with most of the attention, and the share of each."""
        mass = self.masses[index]
        return {"window": mass.index(max(mass)) if mass else None, "mass": mass}

    def _place(self, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """These tokens, their positions, and those of all keys once they are read."""
        at = list(range(self.next_position, self.next_position + len(tokens)))
        self.next_position += len(tokens)
        self.positions += at
        device = input_device(self.model)
        rows = (tokens, at, self.positions)
        ids, positions, keys = (torch.tensor([x], device=device) for x in rows)
        return ids, positions, keys

    def _read_windows(self) -> Any:
        """One row with the head and all windows, read in groups behind the head."""
        head, parts, start = None, [], len(self.layout.head)
        if start:
            head = kv.empty_cache(self.model)
            kv.prefill(self.model, [self.layout.head], [0], head)
            parts.append(kv.taken(head, 0, 0, start))
        read: dict[int, Any] = {}
        for group in kv.group_rows(self.windows, self.max_tokens):
            cache = kv.empty_cache(self.model)
            if head is not None:
                cache = kv.repeated(head, len(group))
            rows, starts = [self.windows[n] for n in group], [self.starts[n] for n in group]
            kv.prefill(self.model, rows, starts, cache, start)
            for row, n in enumerate(group):
                read[n] = kv.taken(cache, row, start, start + len(self.windows[n]))
        return kv.joined([*parts, *(read[n] for n in range(len(self.windows)))])


def check(model: nn.Module, windows: int, align: str) -> None:
    """Raise where windows can't stand side by side."""
    name = type(model).__name__
    if align not in ("left", "right"):
        raise UserError(
            f"windows align 'left' or 'right', but got {shown(align)}: use one of them."
        )
    if not kv.movable(model):
        raise UserError(
            f"windows are joined in a cache of keys and values as {name} computes them, and this "
            f"one is patched or keeps more than those: read it with nbce, or leave the patch."
        )
    if windows > 1 and kv.has_local_layers(model):
        raise UserError(
            f"layers of {name} see the last tokens only, so most windows would be hidden from the "
            f"question: read it with nbce."
        )
    kv.check_takes_positions(model)


class AttentionRecorder(TorchFunctionMode):
    """Sums the attention weights of the last query of row 0 over `keys` keys, heads and layers.

    Sees every `softmax` and `scaled_dot_product_attention` that a model calls, and changes nothing:
    the first returns the weights, from the second's arguments they are computed once more. Kernels
    that call neither (flash, flex) leave nothing to record.
    """

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys, self.layers = keys, 0
        self.total: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._add(_last_weights(*args, **kwargs))
        elif func in SOFTMAX and isinstance(out, Tensor) and out.dim() == 4:
            self._add(out[0, :, -1])
        return out

    def shares(self) -> Float[Tensor, " keys"] | None:
        """The mean weight of each key, or None if no attention was seen."""
        return None if self.total is None else self.total / self.layers

    def _add(self, weights: Tensor) -> None:
        if weights.shape[-1] - self.keys not in (0, 1):  # one more: a sink that is no token
            return
        mean = _at_least_float32(weights[..., : self.keys]).mean(0)
        self.total = mean if self.total is None else self.total + mean.to(self.total.device)
        self.layers += 1


def _last_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last query's weights (h, keys) in row 0."""
    q, k = _at_least_float32(query[0, :, -1:]), _at_least_float32(key[0])
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = (q @ k.mT)[:, 0] * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        mask = attn_mask.expand(query.shape[0], query.shape[1], -1, -1)[0, :, -1]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + _at_least_float32(mask)
    return scores.softmax(-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    align: str = "left",
    chat: bool | None = None,
    tell: Tell | None = None,
    at_once: int = kv.MAX_TOKENS,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """Answer with the windows of the text side by side before the question.

    Args:
        align: where windows shorter than the longest align: at their beginnings or their ends.
        chat: use the tokenizer's chat template; by default if there is one.
        tell: called with each step as it comes.
        at_once: tokens of windows that are read together.
        options: transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    layout = prompt(tokenizer, question, chat=chat)
    ids = encode_windows(tokenizer, windows, layout, max_new_tokens, trained_length(model))
    source = Source(model, layout, ids, align=align, at_once=at_once)
    options |= {"max_new_tokens": max_new_tokens}
    return generate_answer("windows", model, tokenizer, source, layout, len(ids), tell, options)
