"""What a model does with positions, found by watching it: no model's name is known here.

Two short forwards, with an attention that gives zeros: once the model turns queries and keys
itself, once its rotary embedding turns nothing. Zeros make hidden states the same in both, so
whatever differs between the queries that arrive is the rotation of that layer: which of the
configuration's rotations, in which layout, in which dimensions of the head, or none. The mask
function that transformers would have used tells the layer's mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.part import Region
from longitude.core.region import meet, visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.layer import NAME, RECORDER, register
from longitude.hf.model_state import ModelState, identity_rotation
from longitude.hf.rope_config import ropes
from longitude.parts import Bidirectional, Causal, Chunked, Rope, Window
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

TOKENS = 24
TARGETS = 17  # of an encoder-decoder: so that its cross-attention can be told from its own
LAYOUTS = ("half", "adjacent")


@dataclass(frozen=True, eq=False)
class ProbedLayer:
    """One attention module: the scheme it has, and where in its heads the rotary part stands."""

    module: nn.Module
    trunk: ModelState
    layer: int
    scheme: Scheme
    kind: str | None = None  # the configuration's name for its rotation
    before: int = 0
    width: int = 0
    kept: bool = False  # whether a cache holds the very keys and values that attention gets
    odd: str | None = None  # why the model's rotation can't be done in its place, if it can't


@dataclass(eq=False)
class _Call:
    query: Tensor
    key: Tensor
    mask: Any
    kept: bool
    eps: float  # of the numbers it came in


@torch.no_grad()
def probe_layers(model: nn.Module, trunks: list[ModelState]) -> list[ProbedLayer]:
    """Every self-attention module of these trunks, in the order of their layers."""
    register()
    turned = _watch(model, trunks, still=False)
    plain = _watch(model, trunks, still=True)
    try:
        kept = _watch(model, trunks, still=True, cache=_spy(model))
    except Exception:  # a model with a cache of its own kind, or none: it keeps that
        kept = plain
    owner = {module: trunk for trunk in trunks for module in trunk.module.modules()}
    found = []
    for index, (module, call) in enumerate(turned.items()):
        if module not in owner or call.query.shape[2] != call.key.shape[2]:
            continue  # another part of the model, or cross-attention
        layer = getattr(module, "layer_idx", None)
        layer = index if layer is None else int(layer)
        one = _seen(module, owner[module], layer, plain[module], call)
        found.append(replace(one, kept=module in kept and kept[module].kept))
    if not found:
        raise UserError(
            f"no attention of {type(model).__name__} goes through transformers' attention "
            f"interface: longitude can't patch it."
        )
    return found


def _watch(
    model: nn.Module, trunks: list[ModelState], still: bool, cache: Any = None
) -> dict[nn.Module, _Call]:
    """The calls of attention in one forward."""
    calls: dict[nn.Module, _Call] = {}

    def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        asked = None if mask is None else getattr(mask, "shape_asked", (None, None))
        kept = any(key is k and value is v for k, v in cache.handed) if cache else False
        eps = torch.finfo(query.dtype).eps
        calls[module] = _Call(query.float(), key.float(), asked, kept, eps)
        return query.new_zeros(*query.shape[:3], value.shape[-1])

    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        for trunk in trunks:
            stack.enter_context(attention_implementation(NAME, trunk))
            for rotary in trunk.rotaries if still else ():
                stack.enter_context(replaced(rotary, "forward", identity_rotation(rotary, trunk)))
        token = RECORDER.set(watch)
        stack.callback(RECORDER.reset, token)
        forward(model, cache=cache)
    return calls


def _spy(model: nn.Module) -> Any:
    """A cache that remembers what it handed out."""
    from transformers import DynamicCache

    class Spy(DynamicCache):
        def __init__(self) -> None:
            super().__init__(config=model.config)  # type: ignore[arg-type]
            self.handed: list[Any] = []

        def update(self, *args: Any, **kwargs: Any) -> Any:
            self.handed.append(super().update(*args, **kwargs))
            return self.handed[-1]

    return Spy()


def forward(model: nn.Module, positions: Tensor | None = None, cache: Any = None) -> Any:
    """One forward over a few tokens, of any kind of text model."""
    device = next(model.parameters()).device
    words = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = (torch.arange(TOKENS, device=device) * 7 % max(1, words - 3) + 3)[None] % words
    given: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    given |= {} if cache is None else {"past_key_values": cache}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids[:, :TARGETS]
    if positions is not None:
        given |= {"position_ids": positions.to(device), "attention_mask": torch.ones_like(ids)}
    names = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return model(**{name: x for name, x in given.items() if name in names or open_ended})


def _seen(
    module: nn.Module, trunk: ModelState, layer: int, plain: _Call, turned: _Call
) -> ProbedLayer:
    masks = _masks(turned.mask, module)
    eps = turned.eps
    if _alike(plain.query, turned.query, eps) and _alike(plain.key, turned.key, eps):
        return ProbedLayer(module, trunk, layer, Scheme(mask=masks))
    kinds = _kinds(trunk, layer)
    size, n = plain.query.shape[-1], plain.query.shape[2]
    for kind, rope in kinds.items():
        width = rope.dim(size)
        for layout in LAYOUTS:
            mine = replace(rope, pairs=layout)
            for before in dict.fromkeys((0, size - width)):
                pairs = ((plain.query, turned.query), (plain.key, turned.key))
                if all(_alike(_turned(x, mine, before, n), y, eps) for x, y in pairs):
                    scheme = Scheme(rotary=mine, mask=masks)
                    return ProbedLayer(module, trunk, layer, scheme, kind, before, width)
    kind, rope = next(iter(kinds.items()))
    odd = (
        f"{type(module).__name__} does more with its queries than turn them as its configuration "
        f"says ({rope})"
    )
    return ProbedLayer(module, trunk, layer, Scheme(rotary=rope, mask=masks), kind, odd=odd)


def _kinds(trunk: ModelState, layer: int) -> dict[str | None, Rope]:
    """The configuration's rotations, the one of this layer's type first."""
    found = {kind: rope for kind, rope in ropes(trunk.config).items() if rope is not None}
    types = getattr(trunk.config, "layer_types", None) or []
    own = types[layer] if layer < len(types) else None
    return dict(sorted(found.items(), key=lambda item: item[0] != own))


def _turned(x: Tensor, rope: Rope, before: int, n: int) -> Tensor:
    """Heads turned as transformers does: queries and keys alike, each by the root of the gain."""
    gain = rope.frequencies.gain(n) ** 0.5
    pos = range(x.shape[2])
    cos, sin = cos_sin(rope, Region(), "k", pos, x.shape[-1], n, dtype=x.dtype, device=x.device)
    width = 2 * cos.shape[-1]
    part = apply_rotary(x[..., before : before + width], cos * gain, sin * gain, rope.pairs)
    return torch.cat([x[..., :before], part, x[..., before + width :]], -1)


def _alike(a: Tensor, b: Tensor, eps: float) -> bool:
    """Equal but for rounding: in bfloat16 the angles, each product and their sum round."""
    return bool((a - b).abs().max() <= max(1e-2, 8 * eps) * a.abs().max()) and bool(
        (a - b).norm() <= max(3e-3, eps) * a.norm() + 1e-30
    )


def _masks(asked: Any, module: nn.Module) -> tuple[Any, ...]:
    """The masks of a layer, from the function transformers would have made its mask with."""
    if asked is None:
        return (Causal(),) if getattr(module, "is_causal", False) else (Bidirectional(),)
    function, size = asked
    if function is None:
        raise UserError(
            f"{type(module).__name__} makes a mask of its own: longitude can't patch it."
        )
    local = [
        one
        for n in (() if size is None else (size, size + 1, size // 2 + 1, size // 2))
        if n > 0
        for one in (Window(n), Chunked(n))
    ]
    for masks in [(way, *more) for more in [(), *((one,) for one in local)] for way in _WAYS]:
        if _same_shape(function, masks, size or 8):
            return masks
    raise UserError(
        f"{type(module).__name__} has a mask that is neither causal, bidirectional, a window nor "
        f"chunks: longitude can't patch it."
    )


_WAYS = (Causal(), Bidirectional())


def _same_shape(function: Any, masks: tuple[Any, ...], size: int) -> bool:
    """Whether a mask function shows the same pairs, looked at around its size."""
    edges = {0, 1, *(m * size + d for m in (1, 2, 3) for d in (-1, 0, 1))}
    i = torch.tensor(sorted(e for e in edges if e >= 0))[:, None]
    j = torch.arange(3 * size + 3)[None]
    zero = torch.tensor(0)
    theirs = torch.as_tensor(function(zero, zero, i, j)).expand(i.shape[0], j.shape[1]).cpu()
    return torch.equal(theirs.bool(), visible(meet(*(m.areas() for m in masks)), i, j))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attention_implementation(name: str, trunk: ModelState) -> Iterator[None]:
    """Have a trunk's modules call the attention of this name."""
    configs = {id(m.config): m.config for m in trunk.module.modules() if hasattr(m, "config")}
    key = "_attn_implementation_internal"
    before = {i: getattr(config, key, None) for i, config in configs.items()}
    try:
        for config in configs.values():
            object.__setattr__(config, key, name)
        yield
    finally:
        for i, config in configs.items():
            object.__setattr__(config, key, before[i])


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of one object put in another's place, and taken out again."""
    had, before = name in vars(thing), vars(thing).get(name)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if had:
            object.__setattr__(thing, name, before)
        else:
            object.__delattr__(thing, name)
