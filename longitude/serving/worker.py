"""A vLLM worker that installs a scheme in the model it has loaded.

Nothing is assumed: each attention layer is run on a few tokens, once with its rotation and once
without, with an attention that records its queries and keys. It is served only if those with the
rotation equal those without it, rotated as the configuration says. A model that processes queries
further, or rotates elsewhere, is refused by name. All layers are checked before any is changed.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.families.alibi import LINEAR, slopes
from longitude.hf.probe import nearly_equal, replaced, rotate_heads
from longitude.parts import Window
from longitude.serving.backend import backend
from longitude.serving.schemes import DYNAMIC, layer_schemes, on_heads, own_schemes
from longitude.serving.settings import Settings

TOKENS = 24
INPUTS = {"positions": 0, "position_ids": 0, "hidden_states": 1, "hidden": 1, "x": 1}


def __getattr__(name: str) -> Any:
    """Provide `Worker`, the name that vLLM imports: a subclass of the device's stock worker."""
    if name == "Worker":
        return _worker()
    raise AttributeError(name)


@cache
def _worker() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Stock
    else:
        from vllm.v1.worker.gpu_worker import Worker as Stock

    class Worker(Stock):
        def load_model(self, *args: Any, **kwargs: Any) -> None:
            super().load_model(*args, **kwargs)
            install(self.get_model(), self.vllm_config)

    Worker.__module__, Worker.__qualname__ = __name__, "Worker"
    return Worker


class Unrotated(nn.Module):
    """Replaces a rotary embedding, and returns queries and keys unchanged."""

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return query, key


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer of a loaded model, and the module that holds it and its rotation."""

    parent: nn.Module
    attention: Any  # vLLM's Attention
    rotaries: tuple[str, ...]  # names of the parent's attributes

    @property
    def index(self) -> int:
        """The number of the layer in the model."""
        numbers = [int(name) for name in self.attention.layer_name.split(".") if name.isdecimal()]
        if len(numbers) != 1:
            raise UserError(
                f"the attention {self.attention.layer_name} has no unique layer index in its "
                f"name: longitude can't tell which layer it is."
            )
        return numbers[0]

    @contextmanager
    def unrotated(self) -> Iterator[None]:
        """Disable the layer's rotation inside a with block."""
        before = {name: getattr(self.parent, name) for name in self.rotaries}
        try:
            self.remove_rotation()
            yield
        finally:
            for name, rotary in before.items():
                setattr(self.parent, name, rotary)

    def remove_rotation(self) -> None:
        """Put `Unrotated` in place of the parent's rotary embedding. The embedding itself, which
        other layers may share, is not changed."""
        for name in self.rotaries:
            setattr(self.parent, name, Unrotated())


def install(model: nn.Module, vllm_config: Any) -> None:
    """Install the scheme of the engine's settings in a loaded model."""
    from vllm.distributed import get_tp_group
    from vllm.logger import init_logger

    settings, config = Settings.of(vllm_config), vllm_config.model_config.hf_text_config
    rank, ranks = get_tp_group().rank_in_group, get_tp_group().world_size
    own, schemes = own_schemes(config), layer_schemes(config, settings.scheme, settings.force)
    layers = find_layers(model, vllm_config)
    factors = {}
    for layer in layers:
        if layer.index not in own:
            raise UserError(
                f"the configuration has no attention in layer {layer.index}, but vLLM's model "
                f"does: longitude can't serve {type(model).__name__}."
            )
        check_layer(layer, own[layer.index], settings.to, config.hidden_size)
        factors[layer.index] = bias_factor(layer, own[layer.index], rank, ranks)
    for layer in layers:
        heads, n = layer.attention.num_heads, layer.index
        scheme = on_heads(schemes[n], rank * heads, heads, ranks * heads, factors[n])
        replace_attention(layer, scheme, settings.to)
    if rank == 0:
        changed = [layer for layer in layers if schemes[layer.index] != own[layer.index]]
        attention = (changed or layers)[0].attention
        device = next(model.parameters()).device
        declined = attention.impl.declined(torch.empty(0, dtype=attention.dtype, device=device))
        init_logger("vllm.longitude").info(
            "longitude serves %s up to %d tokens: %d of %d layers changed, decoding by %s",
            *(settings.scheme, settings.to, len(changed), len(layers)),
            "the Triton kernel" if declined is None else f"PyTorch (the kernel: {declined})",
        )


def find_layers(model: nn.Module, vllm_config: Any) -> list[Layer]:
    """Return all attention layers; raises for kinds that can't be served."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    context = vllm_config.compilation_config.static_forward_context
    for name, layer in context.items():
        if not isinstance(layer, AttentionLayerBase) or isinstance(layer, MambaBase):
            continue  # experts, or recurrent layers
        unsupported = type(layer) is not Attention
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        if unsupported or shares or getattr(layer, "use_alibi_sqrt", False):
            kind = "another layer's cache" if shares else type(layer).__name__
            raise UserError(f"longitude can't serve {type(model).__name__}: {name} has {kind}.")

    def rotaries(parent: nn.Module) -> tuple[str, ...]:
        children = ((n, type(child).__name__) for n, child in parent.named_children())
        return tuple(n for n, kind in children if "Rotary" in kind or kind == "Unrotated")

    return [
        Layer(parent, child, rotaries(parent))
        for parent in model.modules()
        for child in parent.children()
        if type(child) is Attention
    ]


def check_layer(layer: Layer, own: Scheme, length: int, width: int) -> None:
    """Raise unless a layer's window and rotation match the configuration."""
    kind = type(layer.parent).__name__
    window = next((mask.size for mask in own.mask if isinstance(mask, Window)), None)
    theirs = layer.attention.sliding_window  # one more than transformers' for Cohere 2
    if (window is None) != (theirs is None) or (window is not None and theirs < window):
        raise UserError(
            f"layer {layer.index} ({kind}) has a window of {theirs} in vLLM, but {window} by the "
            f"configuration: longitude can't serve it."
        )
    rotated = recorded(layer, width)
    with layer.unrotated():
        plain = recorded(layer, width)
    rope, eps = own.rotary, torch.finfo(rotated[0].dtype).eps
    if rope is not None and isinstance(rope.frequencies, DYNAMIC):
        return  # vLLM's are static; which ones does not matter, since ours replace them
    for before, after in zip(plain, rotated, strict=True):
        x = before.float()
        x = x if rope is None else rotate_heads(x, rope, 0, length)
        if not nearly_equal(x, after.float(), eps):
            raise UserError(
                f"{kind} in vLLM does something else with its queries than its configuration says "
                f"({own}): longitude can't serve it."
            )


@torch.no_grad()
def recorded(layer: Layer, width: int) -> tuple[Tensor, Tensor]:
    """Return the queries and keys (1 h n d) that reach attention, for a few random tokens."""
    weight = next(p for p in layer.parent.parameters() if p.is_floating_point())
    dtype = layer.attention.dtype
    calls = []

    def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((query.clone(), key.clone()))
        return query.new_zeros(len(query), layer.attention.num_heads * layer.attention.head_size)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, width, generator=generator).to(weight.device, dtype)
    inputs = (torch.arange(TOKENS, device=weight.device), hidden)
    names = inspect.signature(layer.parent.forward).parameters
    arguments = {name: inputs[INPUTS[name]] for name in names if name in INPUTS}
    kind = type(layer.parent).__name__
    with ExitStack() as stack:
        stack.enter_context(replaced(layer.attention, "forward", record))
        for name, child in [*layer.parent.named_children()]:  # bypass adapters, which need a batch
            if isinstance(bare := getattr(child, "base_layer", None), nn.Module):
                stack.callback(setattr, layer.parent, name, child)
                setattr(layer.parent, name, bare)
        try:
            layer.parent(**arguments)
        except Exception as error:  # of many kinds: each model has its own forward
            raise UserError(
                f"{kind} in vLLM can't be run by itself to see how it rotates "
                f"({type(error).__name__}: {error}): longitude can't serve it."
            ) from error
    if len(calls) != 1:
        raise UserError(f"{kind} in vLLM attends {len(calls)} times: longitude can't serve it.")
    size = layer.attention.head_size
    query, key = (x.reshape(1, TOKENS, -1, size).transpose(1, 2) for x in calls[0])
    return query, key


def bias_factor(layer: Layer, own: Scheme, rank: int, ranks: int) -> float:
    """Return the factor that vLLM applies to ALiBi's slopes; 1 if there are none."""
    given = getattr(layer.attention.impl, "alibi_slopes", None)
    part = next((bias for bias in own.bias if isinstance(bias, LINEAR)), None)
    if (given is None) != (part is None):
        raise UserError(
            f"layer {layer.index} has {'no' if given is None else 'an'} ALiBi bias in vLLM, unlike "
            f"its configuration ({own}): longitude can't serve it."
        )
    if given is None:
        return 1.0
    heads = layer.attention.num_heads
    theirs = torch.as_tensor(given, dtype=torch.float64, device="cpu").flatten()
    ratio = theirs / slopes(part, ranks * heads)[rank * heads : (rank + 1) * heads]
    if not torch.allclose(ratio, ratio[:1], rtol=1e-4):
        raise UserError(
            f"the slopes of layer {layer.index} in vLLM are not ALiBi's: longitude can't serve it."
        )
    factor = float(ratio[0])
    return 1.0 if abs(factor - 1) < 1e-4 else factor


def replace_attention(layer: Layer, scheme: Scheme, length: int) -> None:
    """Install our attention in a layer, and remove the rotation before it."""
    attention, ours = layer.attention, backend()
    window = next((mask for mask in scheme.mask if isinstance(mask, Window)), None)
    if window is None or window.size > (attention.sliding_window or 0) or window.sinks:
        attention.sliding_window = None  # older blocks are read: vLLM must keep them
    attention.impl = ours.get_impl_cls()(scheme, attention.impl, length)
    attention.attn_backend = ours
    layer.remove_rotation()
