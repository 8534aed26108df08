"""Decoding of a patched model by CUDA graphs, without the overhead of Python and kernel launches.

A step of one token is captured once and replayed for later tokens, as long as the caches stay in
the same memory. What changes from step to step is read from fixed buffers: the token, its position,
the slot of its key and value, and the decoding kernel's plan (`DecodePlan.renew`). The host records
each token in the caches, as if they had been updated normally.

Steps that a graph can't run are run eagerly: prompts, padding, positions that differ between
sequences, and schemes that the decoding kernel does not support or whose query factors its plan
can't hold (learned ones, or in heads with unrotated dimensions). So are steps in which a cache
grows or evicts; the step after such a step is captured anew.

On request, torch compiles the code between attention calls: a norm, an MLP's activation or a sum
becomes one kernel instead of several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError, short
from longitude.hf.cache_adapter import CacheLayer
from longitude.hf.layer import LAYER_STATE
from longitude.hf.patch import patch_of
from longitude.hf.probe import replaced
from longitude.ops.kernels.launch import triton_available

# arguments of a forward that change nothing in a step of one token without padding
UNNEEDED = ("attention_mask", "cache_position", "use_cache", "return_dict", "logits_to_keep")
RECOMPILES = 1024  # limit for a layer's code


@dataclass(eq=False)
class _Step:
    """A captured step: its input and output buffers, and the addresses of its caches."""

    graph: torch.cuda.CUDAGraph
    stores: list[Any]
    where: list[Any]
    inputs: dict[str, Any]
    slots: Tensor  # one row per layer, since windows may differ
    out: Any = None
    position: int = 0
    state: list[Any] | None = None  # of the caches that the written inputs continue

    def write(self, position: int) -> None:
        """Write the position and slots of the next token into the buffers that the graph reads."""
        self.position = position
        self.inputs["position_ids"].fill_(position)
        slots = torch.tensor([[len(store)] for store in self.stores])
        self.slots.copy_(slots, non_blocking=True)

    def prepare(self) -> bool:
        """Write all inputs of the next step but its token; False if it needs another graph."""
        self.state, positions = None, {store.next_position for store in self.stores}
        position = positions.pop()
        if positions or position is None:  # one layer's cache may fill up before another's
            return False
        renewed = set()  # layers share their plans
        for store in self.stores:
            if store.planned is None:
                return False
            q, plan = store.planned
            if id(plan) in renewed:
                continue
            new_plan = store.plan_next(q, position)
            if new_plan is None:
                return False
            renewed.add(id(plan))
            try:
                plan.renew(new_plan)
            except UserError:  # the new plan has more segments or longer tables
                return False
        self.write(position)
        self.state = _state(self.stores)
        return True

    def is_next(self, given: dict[str, Any]) -> bool:
        """Whether this forward is the step that was prepared."""
        layers = given["past_key_values"].layers
        stores = [layer.store for layer in layers if isinstance(layer, CacheLayer)]
        if self.state is None or stores != self.stores or len(layers) != len(stores):
            return False
        if not all(a is b for a, b in zip(self.state, _state(stores), strict=True)):
            return False
        return _at(given.get("position_ids"), self.position) and layers[0].layer.active


class CudaGraphs:
    """The forward of a patched model, replayed from a CUDA graph where possible."""

    def __init__(self, model: nn.Module, compiled: bool = False) -> None:
        self.model, self.eager, self.compiled = model, model.forward, compiled
        self.step: _Step | None = None
        self.last: list[Any] = []  # addresses of the caches after the last step
        self.captured = self.replayed = 0  # numbers of steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward: replay, capture or run it eagerly."""
        single = not args and not torch.is_grad_enabled() and _one_token(kwargs)
        if single and self.step is not None and self.step.is_next(kwargs):
            return self._replay(self.step, kwargs)
        layers = _cache_layers(kwargs) if single else []
        stores = [layer.store for layer in layers]
        where = [store.where for store in stores]
        if not layers or where != self.last:  # a graph of caches that move can't be replayed
            out = self.eager(*args, **kwargs)
            self.last = [store.where for store in stores]
            return out
        step = self.step
        if step is None or (step.stores, step.where) != (stores, where) or not step.prepare():
            return self._capture(layers, kwargs["input_ids"], kwargs["past_key_values"])
        return self._replay(step, kwargs)

    def _replay(self, step: _Step, given: dict[str, Any]) -> Any:
        step.inputs["input_ids"].copy_(given["input_ids"])
        step.graph.replay()
        self.replayed += 1
        logits = step.out.logits.clone()  # the next replay overwrites them
        for store in step.stores:
            store.advance(range(step.position, step.position + 1))
        step.prepare()  # while the GPU is busy: its copies are queued after the graph
        return type(step.out)(logits=logits, past_key_values=given["past_key_values"])

    def _capture(self, layers: list[Any], ids: Tensor, cache: Any) -> Any:
        """Run a step eagerly, which warms up its kernels, and capture it for later steps."""
        stores, state = [layer.store for layer in layers], layers[0].layer.model
        inputs = {"input_ids": ids.clone(), "position_ids": torch.empty_like(ids)}
        inputs |= {"past_key_values": cache, "use_cache": True, "return_dict": True}
        slots = torch.empty(len(stores), 1, dtype=torch.int64, device=ids.device)
        step = _Step(torch.cuda.CUDAGraph(), stores, self.last, inputs, slots)
        step.write(stores[0].next_position)
        state.pos = range(step.position, step.position + 1)
        for store, slot in zip(stores, slots, strict=True):
            store.advance(state.pos)
            store.slot, store.planned = slot, None
        try:
            with _compiled(self.model) if self.compiled else nullcontext():
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


def _one_token(given: dict[str, Any]) -> bool:
    """Whether a forward has one token per sequence, a cache and no other relevant arguments."""
    ids, cache = given.get("input_ids"), given.get("past_key_values")
    known = ("input_ids", "past_key_values", "position_ids", *UNNEEDED)
    others = [x for name, x in given.items() if name not in known]
    if ids is None or ids.shape[1] != 1 or any(isinstance(x, Tensor) or x for x in others):
        return False
    return bool(getattr(cache, "layers", []))


def _at(pos: Tensor | None, position: int) -> bool:
    """Whether all position ids, if there are any, are this one."""
    return pos is None or (pos.dim() == 2 and {*pos.flatten().tolist()} == {position})


def _cache_layers(given: dict[str, Any]) -> list[Any]:
    """Return the cache layers of a step that a graph can run; [] if it can't run the step."""
    layers, pos = given["past_key_values"].layers, given.get("position_ids")
    if not all(isinstance(layer, CacheLayer) and layer.store for layer in layers):
        return []
    state, positions = layers[0].layer.model, {layer.store.next_position for layer in layers}
    ours = all(layer.layer.model is state and layer.layer.active for layer in layers)
    if not ours or state.ranks is not None or len(positions) > 1 or None in positions:
        return []
    return layers if _at(pos, positions.pop()) else []


def _state(stores: list[Any]) -> list[Any]:
    return [x for store in stores for x in store.state]


@contextmanager
def _compiled(model: nn.Module) -> Iterator[None]:
    """Compile the layers, except their attention, inside a with block."""
    import torch._dynamo.config as config  # it takes seconds to import
    from torch._dynamo.exc import TorchDynamoException

    modules = model.named_modules()
    names = {name: x for name, x in modules if getattr(x, LAYER_STATE, None) is not None}
    layers = [model.get_submodule(parent) for parent in {x.rpartition(".")[0] for x in names}]
    with ExitStack() as stack:
        for attention in names.values():
            eager = torch.compiler.disable(attention.forward)
            stack.enter_context(replaced(attention, "forward", eager))
        for layer in layers:
            stack.enter_context(replaced(layer, "forward", torch.compile(layer.forward)))
        # for many models and batch sizes: past this limit torch would no longer compile layers
        limits = {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": RECOMPILES}
        stack.enter_context(config.patch(limits))
        try:
            yield
        except TorchDynamoException as error:
            raise UserError(
                f"torch can't compile the layers of {type(model).__name__} "
                f"({short(str(error), 120)}): use cuda_graphs without compiled=True."
            ) from error


@contextmanager
def cuda_graphs(model: nn.Module, *, compiled: bool = False) -> Iterator[CudaGraphs]:
    """Decode by CUDA graphs inside a with block, in which the model is patched:

    with lh.patched(model, "rope(remap=rerope(4096))"), lh.cuda_graphs(model):
        model.generate(**prompt)

    With `compiled`, torch compiles the layers except their attention, which takes some seconds: a
    token of a small model then takes a fifth to three tenths less time. Sums are rounded
    differently, so of two almost equally likely tokens the other one may be chosen.
    """
    patch = patch_of(model)
    if patch is None or not any(hasattr(module, LAYER_STATE) for module in model.modules()):
        raise UserError(
            "CUDA graphs replay our own attention, which this model does not run: patch it first, "
            "with a scheme that changes more than frequencies."
        )
    device = next(model.parameters()).device
    if not triton_available(device):
        raise UserError(f"CUDA graphs need a CUDA device and Triton, but the model is on {device}.")
    graphs = CudaGraphs(model, compiled)

    @wraps(model.forward)  # `generate` inspects its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return graphs.forward(*args, **kwargs)

    with replaced(model, "forward", forward):
        yield graphs
