"""Decoding of a patched model by CUDA graphs: a token without Python's and the launches' time.

A step of one token is captured once and replayed for the tokens after it, while its caches stay
where they are in memory. What changes from step to step is read from memory that the captured
kernels know: the token, its position, the slot of its key and value, and the decoding kernel's plan
(`DecodePlan.renew`). The host notes each token in the caches, as if they had been given it.

A step that a graph can't take runs as without: a prompt, padding, positions that differ between
sequences, schemes that the decoding kernel does not support or whose queries are scaled by their
position. So does one in which a cache grows or evicts; the step after it captures anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError, short
from longitude.hf.cache_adapter import CacheLayer
from longitude.hf.layer import LAYER_STATE
from longitude.hf.probe import replaced
from longitude.ops.kernels.launch import triton_available

# arguments of a forward that change nothing in a step of one token without padding
UNNEEDED = ("attention_mask", "cache_position", "use_cache", "return_dict", "logits_to_keep")


@dataclass(eq=False)
class _Step:
    """A captured step: its inputs and output in memory, and where its caches were."""

    graph: torch.cuda.CUDAGraph
    where: list[Any]
    inputs: dict[str, Any]
    slots: Tensor  # a row per layer, whose windows may differ
    out: Any = None

    def write(self, ids: Tensor, position: int, stores: list[Any]) -> None:
        """The inputs of a step, in the memory that the graph reads."""
        self.inputs["input_ids"].copy_(ids)
        self.inputs["position_ids"].fill_(position)
        slots = torch.tensor([[len(store) - 1] for store in stores]).pin_memory()
        self.slots.copy_(slots, non_blocking=True)


class CudaGraphs:
    """The forward of a patched model, by graphs where it can be."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.eager = model, model.forward
        self.step: _Step | None = None
        self.last: list[Any] = []  # where the caches were after the last step
        self.captured = self.replayed = 0  # steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        layers = [] if args or torch.is_grad_enabled() else _cache_layers(kwargs)
        stores = [layer.store for layer in layers]
        where = [store.where for store in stores]
        if not layers or where != self.last:  # a graph of caches that move would not serve twice
            out = self.eager(*args, **kwargs)
            self.last = [store.where for store in stores]
            return out
        ids, position = kwargs["input_ids"], stores[0].next_position
        for store in stores:
            store.advance(range(position, position + 1))
        cache = kwargs["past_key_values"]
        if self.step is None or self.step.where != where or not _renewed(stores, position):
            return self._capture(layers, ids, cache, position)
        self.step.write(ids, position, stores)
        self.step.graph.replay()
        self.replayed += 1
        logits = self.step.out.logits.clone()  # the next replay writes over them
        return type(self.step.out)(logits=logits, past_key_values=cache)

    def _capture(self, layers: list[Any], ids: Tensor, cache: Any, position: int) -> Any:
        """Run a step, which warms up all that it launches, and capture it for those after it."""
        stores, state = [layer.store for layer in layers], layers[0].layer.model
        inputs = {"input_ids": ids.clone(), "position_ids": torch.empty_like(ids)}
        inputs |= {"past_key_values": cache, "use_cache": True, "return_dict": True}
        slots = torch.empty(len(stores), 1, dtype=torch.int64, device=ids.device)
        step = _Step(torch.cuda.CUDAGraph(), self.last, inputs, slots)
        step.write(ids, position, stores)
        state.pos = range(position, position + 1)
        for store, slot in zip(stores, slots, strict=True):
            store.slot, store.planned = slot, None
        try:
            out = self.eager(**inputs)
            if all(store.planned for store in stores):
                self._record(step)
        finally:
            state.pos = None
            for store in stores:
                store.slot = None
        return out

    def _record(self, step: _Step) -> None:
        try:
            with torch.cuda.graph(step.graph):
                step.out = self.eager(**step.inputs)
        except RuntimeError as error:
            raise UserError(
                f"no CUDA graph can be captured of {type(self.model).__name__} "
                f"({short(str(error), 120)}): a forward that waits for the GPU, as a mixture of "
                f"experts may, decodes without cuda_graphs."
            ) from error
        self.step, self.captured = step, self.captured + 1


def _cache_layers(given: dict[str, Any]) -> list[Any]:
    """The layers of the cache of a step that a graph can take; none of any other forward."""
    ids, cache, pos = (given.get(x) for x in ("input_ids", "past_key_values", "position_ids"))
    known = ("input_ids", "past_key_values", "position_ids", *UNNEEDED)
    more = [x for name, x in given.items() if name not in known]
    if ids is None or ids.shape[1] != 1 or any(isinstance(x, Tensor) or x for x in more):
        return []
    layers = getattr(cache, "layers", [])
    if not layers or not all(isinstance(layer, CacheLayer) and layer.store for layer in layers):
        return []
    state, positions = layers[0].layer.model, {layer.store.next_position for layer in layers}
    mine = all(layer.layer.model is state and layer.layer.active for layer in layers)
    if not mine or state.ranks is not None or len(positions) > 1 or None in positions:
        return []
    asked = positions if pos is None else {*pos.flatten().tolist()}
    return layers if asked == positions and (pos is None or pos.dim() == 2) else []


def _renewed(stores: list[Any], position: int) -> bool:
    """Have the plans of a captured step become those of the next one; False where they can't."""
    done = set()  # layers share their plans
    for store in stores:
        if store.planned is None:
            return False
        q, plan = store.planned
        if id(plan) in done:
            continue
        later = store.plan(q, range(position, position + 1))
        if later is None:
            return False
        done.add(id(plan))
        try:
            plan.renew(later)
        except UserError:  # it has more segments, or longer tables
            return False
    return True


@contextmanager
def cuda_graphs(model: nn.Module) -> Iterator[CudaGraphs]:
    """Decode by CUDA graphs inside a with block, in which the model is patched:

    with lh.patched(model, "rope(remap=rerope(4096))"), lh.cuda_graphs(model):
        model.generate(**prompt)
    """
    if not any(hasattr(module, LAYER_STATE) for module in model.modules()):
        raise UserError(
            "CUDA graphs replay our own attention, which this model does not run: patch it first, "
            "with a scheme that changes more than frequencies."
        )
    device = next(model.parameters()).device
    if not triton_available(device):
        raise UserError(f"CUDA graphs need a CUDA device and Triton, but the model is on {device}.")
    graphs = CudaGraphs(model)

    @wraps(model.forward)  # `generate` looks at its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        return graphs.forward(*args, **kwargs)

    with replaced(model, "forward", forward):
        yield graphs
