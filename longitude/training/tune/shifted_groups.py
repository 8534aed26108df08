"""LongLoRA's shifted sparse attention: groups for training, full attention afterwards.

Chen et al. 2023, "LongLoRA", arXiv:2309.12307. Positions are cut into groups of G; half the heads
attend within them, the other half within groups moved on by G/2, so that what one half keeps apart
the other joins. Here both are the library's `chunked(G)` mask, for the second half on positions
counted from G/2: its first and last groups are half as long. The paper rolls the sequence instead;
there the first tokens share a group with the last ones, come after them, and see what they have to
foretell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.part import Pos
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.extension.candidates import Own, by_length
from longitude.hf.layer import LayerState
from longitude.training.tune.checkpointing import forward_state, layer_states


def grouped(scheme: Own, size: int) -> str:
    """A scheme with groups of this size; raises where moved positions would change more than the
    groups."""
    layers = [scheme.layer(i, len(scheme)) for i in range(len(scheme))]
    for one in layers:
        if one.scale or (one.rotary and one.rotary.remap) or by_length(scheme):
            raise UserError(
                f"shifted groups train schemes of distances alone, but got {shown(scheme)}: use "
                f"linear(…), yarn(…) or another base, without remaps and scales."
            )
    if size < 2 or size % 2:
        raise UserError(
            f"groups have an even number of tokens, but got {size}: give another length."
        )
    texts = [f"{dump(one)} + chunked({size})" for one in layers]
    parse(texts[0])
    return texts[0] if len(set(texts)) == 1 else f"layers({', '.join(texts)})"


@contextmanager
def shifted(model: nn.Module, size: int) -> Iterator[None]:
    """A model patched with groups, half of whose heads have theirs moved by half a group."""
    layers = layer_states(model)
    for layer in layers:
        vars(layer)["attend"] = _Halves(layer, size // 2)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("attend", None)


class _Halves:
    """Attention of one layer, half its heads at a time."""

    def __init__(self, layer: LayerState, by: int) -> None:
        self.layer, self.by = layer, by

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        state, half = self.layer.model, q.shape[1] // 2
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        near = self._of(slice(half), q, k, v, options)
        now = state.forward
        runs = now.runs and [replace(run, pos=_moved(run.pos, self.by)) for run in now.runs]
        moved = replace(now, pos=_moved(now.pos, self.by), runs=runs)
        with forward_state(state, moved):
            far = self._of(slice(half, None), q, k, v, options)
        return torch.cat([near, far], 1)

    def _of(self, heads: slice, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        sinks = options.get("sink_logits")
        options = {**options, "sink_logits": None if sinks is None else sinks[heads]}
        return LayerState.attend(self.layer, q[:, heads], k[:, heads], v[:, heads], options)


def _moved(pos: Pos, by: int) -> Pos:
    return range(pos.start + by, pos.stop + by, pos.step) if isinstance(pos, range) else pos + by
