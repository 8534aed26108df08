"""The model during fine-tuning: its trainable parameters, and shifted sparse attention.

LoRA (Hu et al. 2021, arXiv:2106.09685): W + (α/r)·B·A, with B initialised to zero. For longer
contexts embeddings and norms must be trained as well (LongLoRA). peft creates and stores adapters.
Trainable weights are kept in float32: an update is often smaller than half a bfloat16 step.

Shifted sparse attention (Chen et al. 2023, LongLoRA, arXiv:2309.12307), for training only:
positions are cut into groups of G; half the heads attend within them, the others within groups
shifted by G/2. Both use the library's `chunked(G)` mask. For the second half, positions start at
G/2, so that its first and last groups are half as long. The paper rolls the sequence instead; there
the first tokens share a group with the last ones and attend to tokens that they have to predict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.part import Pos
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.hf.layer import LAYER_STATE, LayerState
from longitude.hf.model_state import forward_state

LORA, FULL = "lora", "full"
ALPHA = 2  # times the rank


def check_peft(trained: str) -> None:
    if trained == LORA and find_spec("peft") is None:
        raise UserError(
            "LoRA needs the package peft: pip install longitude[tune], or train --full."
        )


def make_trainable(model: Any, trained: str, rank: int) -> Any:
    """Prepare a model for training in place; return the model to save (with LoRA, peft's)."""
    saved = model
    if trained == LORA:
        from peft import LoraConfig, get_peft_model

        embeddings_and_norms = {
            path.rpartition(".")[2]: None  # an ordered set
            for path, module in model.named_modules()
            if module is model.get_input_embeddings()
            or ("norm" in type(module).__name__.lower() and [*module.parameters(recurse=False)])
        }
        config = LoraConfig(
            r=rank,
            lora_alpha=ALPHA * rank,
            target_modules="all-linear",
            modules_to_save=[*embeddings_and_norms],
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
            ensure_weight_tying=bool(getattr(model.config, "tie_word_embeddings", False)),
        )
        saved = get_peft_model(model, config)
    else:
        model.requires_grad_(True)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.float32)
    return saved


def grouped_scheme(scheme: Scheme | Layers, size: int) -> str:
    """Add groups of this size to a scheme; raises if shifted positions would change more."""
    from longitude.extension.candidates import by_length

    for layer in scheme.schemes:
        if layer.scale or (layer.rotary and layer.rotary.remap) or by_length(scheme):
            raise UserError(
                f"shifted groups train schemes of distances alone, but got {shown(scheme)}: use "
                f"linear(…), yarn(…) or another base, without remaps and scales."
            )
    if size < 2 or size % 2:
        raise UserError(
            f"groups have an even number of tokens, but got {size}: give another length."
        )
    grouped: Any = [parse(f"{dump(layer)} + chunked({size})") for layer in scheme.schemes]
    per_layer = isinstance(scheme, Layers)
    return dump(replace(scheme, schemes=tuple(grouped)) if per_layer else grouped[0])


@contextmanager
def shifted_groups(model: nn.Module, size: int) -> Iterator[None]:
    """Shift the groups of half the heads of a patched model by half a group, inside the block."""
    states = [getattr(module, LAYER_STATE, None) for module in model.modules()]
    layers = [state for state in states if isinstance(state, LayerState) and state.active]
    for layer in layers:
        vars(layer)["attend"] = partial(_attend_in_halves, layer, size // 2)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("attend", None)


def _attend_in_halves(
    layer: LayerState, by: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor:
    """Compute attention of one layer, half of its heads at a time, the second half shifted."""
    state, half, sinks = layer.model.forward, q.shape[1] // 2, options.get("sink_logits")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))

    def shifted(pos: Pos) -> Pos:
        if isinstance(pos, range):
            return range(pos.start + by, pos.stop + by, pos.step)
        return pos + by

    def attend(heads: slice) -> Tensor:
        half_options = {**options, "sink_logits": None if sinks is None else sinks[heads]}
        return LayerState.attend(layer, q[:, heads], k[:, heads], v[:, heads], half_options)

    unshifted = attend(slice(half))
    runs = state.runs and [replace(run, pos=shifted(run.pos)) for run in state.runs]
    with forward_state(layer.model, replace(state, pos=shifted(state.pos), runs=runs)):
        return torch.cat([unshifted, attend(slice(half, None))], 1)
