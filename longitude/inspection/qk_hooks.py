"""What every attention of a model is given: its queries and keys, layer by layer, as it runs.

transformers hands them to the function that its configuration names; ours passes them on and goes
on with attention of the layer's own mask, one layer after the other, so nothing is kept. BLOOM, MPT
and Falcon call no such function: there the one projection that makes queries, keys and values is
overheard, and the model goes on by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.part import Region
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.families import family_of
from longitude.hf.families.learned import LEARNED
from longitude.hf.layer import padding_mask
from longitude.hf.model_state import ModelState, model_states
from longitude.hf.probe import ProbedLayer, attention_implementation, probe_layers
from longitude.ops.attention import attention
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

NAME = "longitude-ear"
EAR: ContextVar[_Ear | None] = ContextVar("EAR", default=None)


@dataclass(frozen=True, eq=False)
class Heard:
    """One layer's queries and keys, turned already where the layer turns them."""

    layer: int
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b hkv n d"]
    own: Scheme
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None
    bias_by: float = 1.0  # Falcon-RW scales its bias with the scores
    before: int = 0  # dimensions of a head before the rotary ones
    odd: str | None = None  # why the layer's rotation can't be undone, if it can't

    @property
    def left(self) -> Scheme:
        """What of the layer's scheme is still to be done."""
        return Scheme(bias=self.own.bias, mask=self.own.mask)

    def unturned(self) -> tuple[Float[Tensor, "b h n r"], Float[Tensor, "b hkv n r"]] | None:
        """The rotary dimensions of queries and keys before they were turned, where there are
        some."""
        rope = self.own.rotary
        if rope is None or self.odd:
            return None
        d, n = self.q.shape[-1], self.q.shape[2]
        wide = {"dtype": torch.float32, "device": self.q.device}
        cos, sin = cos_sin(rope, Region(), "k", range(n), d, n, **wide)
        gain, width = rope.frequencies.gain(n) ** 0.5, rope.dim(d)
        q, k = (x[..., self.before : self.before + width].float() for x in (self.q, self.k))
        return apply_rotary(q, cos / gain, -sin / gain, rope.pairs), apply_rotary(
            k, cos / gain, -sin / gain, rope.pairs
        )


Tell = Callable[[Heard], None]


@torch.no_grad()
def listen(model: Any, ids: Int[Tensor, " n"], tell: Tell) -> None:
    """Read a text from its beginning; `tell` gets each layer in turn, and may raise `Enough`."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__} reads with one half and writes with the other: scores can be read of "
            f"models of one half only."
        )
    with hearing(model, tell):
        trunk = getattr(model, "base_model", model)  # without the head, whose logits nobody asked
        names = inspect.signature(trunk.forward).parameters
        more = {"use_cache": False} if "use_cache" in names else {}
        try:
            trunk(input_ids=ids[None].to(model.get_input_embeddings().weight.device), **more)
        except Enough:
            pass


class Enough(Exception):
    """What a listener raises when it has heard all that it wants."""


@contextmanager
def hearing(model: nn.Module, tell: Tell) -> Iterator[None]:
    """Every layer's queries and keys are told, for as long as the context lasts."""
    family, heard = family_of(model), [0]

    def told(one: Heard) -> None:
        heard[0] += 1
        tell(one)

    with ExitStack() as stack:
        if family is None or family is LEARNED:
            own = None if family is None else family.scheme(model)
            stack.enter_context(_by_interface(model, told, own))
        else:
            stack.enter_context(_by_projection(model, told, family.scheme(model)))
        yield
    if not heard[0]:
        raise UserError(
            f"no attention of {type(model).__name__} could be overheard: it has its own way."
        )


# models that call transformers' attention functions


@dataclass(eq=False)
class _Ear:
    tell: Tell
    own: Scheme | None  # of every layer, where a family says so
    seen: dict[nn.Module, ProbedLayer]
    calls: int = 0

    def place(self, module: nn.Module) -> ProbedLayer | Scheme | None:
        return self.own or self.seen.get(module)


@contextmanager
def _by_interface(model: nn.Module, tell: Tell, own: Scheme | None) -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    found: dict[nn.Module, ProbedLayer] = {}
    if own is None:
        rotary = model_states(model)
        if not rotary:
            raise UserError(
                f"{type(model).__name__} has neither rotary embeddings that longitude knows nor a family "
                f"of its own in longitude.hf.families: its scores can't be read."
            )
        found = {seen.module: seen for seen in probe_layers(model, rotary)}
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, padding_mask)
    token = EAR.set(_Ear(tell, own, found))
    try:
        with attention_implementation(NAME, ModelState(model, [])):
            yield
    finally:
        EAR.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    ear = EAR.get()
    place = ear.place(module) if ear else None
    if ear is None or place is None or query.shape[2] != key.shape[2]:
        raise UserError(f"{type(module).__name__} is no self-attention: its scores can't be read.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, "layer_idx", None)
    heard = Heard(
        layer=ear.calls if layer is None else int(layer),
        q=query,
        k=key,
        own=place if isinstance(place, Scheme) else place.scheme,
        scale=scale,
        softcap=more.get("softcap"),
        sinks=more.get("s_aux"),
    )
    if isinstance(place, ProbedLayer):
        heard = replace(heard, before=place.before, odd=place.odd)
    ear.calls += 1
    ear.tell(heard)
    pos = range(query.shape[2])
    options: dict[str, Any] = {
        "scale": scale, "softcap": heard.softcap, "sink_logits": heard.sinks,
    }  # fmt: skip
    out = attention(Scheme(mask=heard.own.mask), query, key, value, pos, pos, **options)
    return out.transpose(1, 2).contiguous(), None


# models with one projection for queries, keys and values

PROJECTIONS = ("query_key_value", "Wqkv")


@contextmanager
def _by_projection(model: nn.Module, tell: Tell, own: Scheme) -> Iterator[None]:
    hooks = []
    parents = [m for m in model.modules() if any(hasattr(m, key) for key in PROJECTIONS)]
    for layer, parent in enumerate(parents):
        key = next(k for k in PROJECTIONS if hasattr(parent, k))
        hooks.append(
            getattr(parent, key).register_forward_hook(_overhear(layer, parent, tell, own))
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _overhear(layer: int, parent: Any, tell: Tell, own: Scheme) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, made: Tensor) -> None:
        q, k = _split(parent, made)
        falcon = hasattr(parent, "_split_heads")
        scale = getattr(parent, "softmax_scale", None) or q.shape[-1] ** -0.5
        tell(Heard(layer, q, k, own, scale, bias_by=scale if falcon else 1.0))

    return hook


def _split(parent: Any, made: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (b h n d) of what a fused projection made, as its own module parts them."""
    if hasattr(parent, "_reshape"):  # BLOOM
        return parent._reshape(made)[:2]
    if hasattr(parent, "_split_heads"):  # Falcon
        q, k = parent._split_heads(made)[:2]
        return q.transpose(1, 2), k.transpose(1, 2)
    clip = getattr(parent, "clip_qkv", None)  # MPT
    made = made.clamp(-clip, clip) if clip else made
    q, k = (x.unflatten(-1, (-1, parent.head_dim)) for x in made.chunk(3, dim=2)[:2])
    return q.transpose(1, 2), k.transpose(1, 2)
