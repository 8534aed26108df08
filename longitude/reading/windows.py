"""Parallel context windows: the windows of a text side by side, the question after all of them.

Ratner et al. 2022, "Parallel Context Windows for Large Language Models", arXiv:2212.10947. Windows
are prefilled separately, all at the same positions; their keys and values are concatenated after
one head, the start of the prompt (a second first token does harm); question and answer come after
the longest window and attend to everything. No distance exceeds the length of window, question and
answer, and nothing is trained. Shorter windows are aligned at their beginnings (`left`, the
paper's) or their ends (`right`, next to the question). One window equals the unmodified model.

A window's mass is the share of attention that its keys get from the last token, the mean over heads
and layers; the remaining share is on question, answer and head.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import input_device
from longitude.hf.families import family_of
from longitude.hf.families.alibi import MPT
from longitude.reading import forward as kv
from longitude.reading.generate import Answer, Prompt, answer_by

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class WindowsSource:
    """A `Source` with one row, which attends to all windows at once."""

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
        self.model, self.layout, self.windows = model, layout, windows
        # MPT has one bias for all rows, so rows at different positions can't be read together
        self.max_tokens = 1 if family_of(model) is MPT else at_once
        start, longest = len(layout.head), max(map(len, windows))
        right = align == "right"
        self.starts = [start + (longest - len(w) if right else 0) for w in windows]
        self.next_position = start + longest
        self.positions = list(range(start))  # of each key in the cache
        self.cache: Any = None

    def __call__(self, token: int | None) -> tuple[Float[Tensor, " v"], dict[str, Any]]:
        """Return the logits, the window with most of the attention, and the share of each."""
        tokens = self.layout.tail if token is None else (token,)
        if token is None:
            self.cache = self._read_windows()
            for start, window in zip(self.starts, self.windows, strict=True):
                self.positions += range(start, start + len(window))
        if len(tokens) > 1:
            self._read(tokens[:-1])
        with AttentionRecorder(len(self.positions) + 1) as recorder:
            logits = self._read(tokens[-1:], head=True)
        shares, mass = recorder.shares(), ()
        if shares is not None:
            ends = accumulate(map(len, self.windows), initial=len(self.layout.head))
            mass = tuple(float(shares[a:b].sum()) for a, b in pairwise(ends))
        return logits[0], {"window": mass.index(max(mass)) if mass else None, "mass": mass}

    def _read(self, tokens: Sequence[int], head: bool = False) -> Tensor:
        """Run the model on these tokens at the next positions."""
        span = range(self.next_position, self.next_position + len(tokens))
        self.next_position = span.stop
        self.positions += span
        device, rows = input_device(self.model), (tokens, span, self.positions)
        ids, positions, keys = (torch.tensor([[*row]], device=device) for row in rows)
        return kv.forward(self.model, ids, positions, self.cache, keys=keys, head=head)

    def _read_windows(self) -> Any:
        """Return the cache of one row with the head and all windows, prefilled in groups."""
        head, start, parts = None, len(self.layout.head), {}  # layers by window; the head is -1
        if start:
            head = kv.prefill(self.model, [self.layout.head], [0])
            parts[-1] = [(layer.keys, layer.values) for layer in head.layers]
        for group in kv.group_rows(self.windows, self.max_tokens):
            rows, starts = [self.windows[n] for n in group], [self.starts[n] for n in group]
            cache = kv.prefill(self.model, rows, starts, head)
            for row, n in enumerate(group):
                window = (slice(row, row + 1), slice(None), slice(start, start + len(rows[row])))
                parts[n] = [
                    (x.keys[window].clone(), x.values[window].clone()) for x in cache.layers
                ]
        cache = DynamicCache()
        for index, layer in enumerate(zip(*(parts[n] for n in sorted(parts)), strict=True)):
            keys, values = (torch.cat(each, 2) for each in zip(*layer, strict=True))
            cache.update(keys, values, index)
        return cache


def check(model: nn.Module, windows: int, align: str) -> None:
    """Raise if the model can't attend to windows side by side."""
    name = type(model).__name__
    if align not in ("left", "right"):
        raise UserError(
            f"windows align 'left' or 'right', but got {shown(align)}: use one of them."
        )
    if not kv.movable(model):
        raise UserError(
            f"windows are joined in a cache of keys and values as {name} computes them, and this "
            f"one is patched or keeps more than those: read it with nbce, or remove the patch."
        )
    if windows > 1 and DynamicSlidingWindowLayer in kv.layer_types(model):
        raise UserError(
            f"layers of {name} see the last tokens only, so most windows would be hidden from the "
            f"question: read it with nbce."
        )
    takes = inspect.signature(model.forward).parameters
    if family_of(model) not in kv.ALIBI and "position_ids" not in takes:
        raise UserError(
            f"{name} counts its tokens itself, so windows can't stand side by side in it: read it "
            f"with nbce."
        )


class AttentionRecorder(TorchFunctionMode):
    """Records the last query's attention weights on `keys` keys in row 0, the mean over heads and
    layers. It intercepts every `softmax` and `scaled_dot_product_attention` of a model and changes
    nothing: softmax returns the weights; for the other they are recomputed from its arguments.
    Kernels that call neither (flash, flex) leave nothing to record."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys, self.layers = keys, 0
        self.total: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out, weights = func(*args, **(kwargs or {})), None
        if func is F.scaled_dot_product_attention:
            weights = _last_weights(*args, **(kwargs or {}))
        elif func in SOFTMAX and isinstance(out, Tensor) and out.dim() == 4:
            weights = out[0, :, -1]
        if weights is not None and weights.shape[-1] - self.keys in (0, 1):  # 1: a sink's column
            mean = weights[..., : self.keys].float().mean(0)
            self.total = mean if self.total is None else self.total + mean.to(self.total.device)
            self.layers += 1
        return out

    def shares(self) -> Float[Tensor, " keys"] | None:
        """Return the mean weight of each key, or None if no attention was recorded."""
        return None if self.total is None else self.total / self.layers


def _last_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return the last query's attention weights (h, keys) in row 0."""
    q, k = query[0, :, -1:].float(), key[0].float()
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = (q @ k.mT)[:, 0] * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        mask = attn_mask.expand(query.shape[0], query.shape[1], -1, -1)[0, :, -1]
        is_boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask.float()
    return scores.softmax(-1)


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    align: str = "left",
    at_once: int = kv.MAX_TOKENS,
    **options: Any,
) -> Answer:
    """Answer with the windows of the text side by side before the question. Shorter windows are
    aligned at their beginnings (left) or ends (right); `at_once` tokens of windows are prefilled
    together. Options are those of `generate.answer_by`."""
    build = partial(WindowsSource, model, align=align, at_once=at_once)
    return answer_by("windows", build, model, tokenizer, windows, question, **options)
