"""Queries and keys of every attention layer as the model runs, and their decomposition by position.

transformers passes q and k to the attention function that its configuration names. Ours passes them
to a callback and continues with attention under the layer's own mask, so nothing is stored. BLOOM,
MPT and Falcon call no such function: there a hook reads the fused projection.

Under absolute positions the score of the first layer has four terms: with x the embedding of a
token, p that of its position, q_i = W_q(x_i + p_i) and k_j = W_k(x_j + p_j), q_i·k_j is the sum of

    x_i W x_j  content–content      x_i W p_j  content–position
    p_i W x_j  position–content     p_i W p_j  position–position       W = W_qᵀ W_k

None is a function of i - j unless W commutes with a shift of positions. A LayerNorm stands between:
(x + p - mean) / σ is linear in x and p for a fixed σ. So the model runs twice up to its first
attention, the second time without positions and with every norm's σ of the first run; q and k
differ by what position contributes. Constants (biases, segments) count as content, and the terms
add up to the score exactly. From the second layer on, content and position can't be separated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.part import Region
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.families import family_of
from longitude.hf.families.learned import LEARNED, tables
from longitude.hf.layer import padding_mask
from longitude.hf.probe import attention_implementation, probe_layers, rotary_owners
from longitude.inspection.rows import HeadTerms, QKTerms, Term
from longitude.ops.attention import attention
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

ATTENTION = "longitude-qk-hooks"  # the name under which the attention function is registered
PROJECTIONS = ("query_key_value", "Wqkv")  # fused projections of BLOOM, Falcon and MPT
TERMS = ("content–content", "content–position", "position–content", "position–position")
QK = tuple[Float[Tensor, "h n d"], Float[Tensor, "h n d"]]


@dataclass(frozen=True, eq=False)
class LayerQK:
    """Queries and keys of one layer, post-RoPE where the layer has RoPE."""

    layer: int
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b hkv n d"]
    own: Scheme
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None
    bias_scale: float = 1.0  # Falcon-RW scales its bias with the scores
    before: int = 0  # dimensions of a head before the rotary ones
    unsupported_reason: str | None = None  # why the rotation can't be inverted, if it can't

    def pre_rope(self) -> tuple[Float[Tensor, "b h n r"], Float[Tensor, "b hkv n r"]] | None:
        """The rotary dimensions of queries and keys before rotation; None if there are none."""
        rope = self.own.rotary
        if rope is None or self.unsupported_reason:
            return None
        d, n = self.q.shape[-1], self.q.shape[2]
        like = {"dtype": torch.float32, "device": self.q.device}
        cos, sin = cos_sin(rope, Region(), "k", range(n), d, n, **like)
        gain, width = rope.frequencies.gain(n) ** 0.5, rope.dim(d)
        q, k = (x[..., self.before : self.before + width].float() for x in (self.q, self.k))
        q, k = (apply_rotary(x, cos / gain, -sin / gain, rope.pairs) for x in (q, k))
        return q, k


OnLayer = Callable[[LayerQK], None]


class StopCapture(Exception):
    """Raised by a callback that needs no further layer."""


@torch.no_grad()
def capture_qk(model: Any, ids: Int[Tensor, " n"], on_layer: OnLayer) -> None:
    """Run a model on a text from its beginning; `on_layer` gets each layer in turn."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__} reads with one half and writes with the other: scores can be "
            f"read of models of one half only."
        )
    calls = 0

    def counted(layer: LayerQK) -> None:
        nonlocal calls
        calls += 1
        on_layer(layer)

    family = family_of(model)
    own = None if family is None else family.scheme(model)
    hooked = _attention_function if own is None or family is LEARNED else _projections
    base = getattr(model, "base_model", model)  # without the head: nobody reads its logits
    more = {"use_cache": False} if "use_cache" in inspect.signature(base.forward).parameters else {}
    with hooked(model, counted, own):  # type: ignore[arg-type]
        try:
            base(input_ids=ids[None].to(model.get_input_embeddings().weight.device), **more)
        except StopCapture:
            pass
    if not calls:
        kind = type(model).__name__
        raise UserError(f"no attention of {kind} could be hooked: it calls a function of its own.")


@contextmanager
def _attention_function(model: nn.Module, on_layer: OnLayer, own: Scheme | None) -> Iterator[None]:
    """Hook models that call transformers' attention functions; `own` is every layer's scheme, or
    None to probe each rotary layer for it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    layers: dict[nn.Module, Any] = {}
    if own is None:
        owners = rotary_owners(model)
        if not owners:
            raise UserError(
                f"{type(model).__name__} has neither rotary embeddings that longitude knows nor a "
                f"family of its own in longitude.hf.families: its scores can't be read."
            )
        layers = {probed.module: probed for probed in probe_layers(model, owners)}
    calls = 0

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, scaling: float | None = None,
        dropout: float = 0.0, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        nonlocal calls
        probed = layers.get(module)
        if (own is None and probed is None) or query.shape[2] != key.shape[2]:
            kind = type(module).__name__
            raise UserError(f"{kind} is no self-attention: its scores can't be read.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        index = getattr(module, "layer_idx", None)
        layer = LayerQK(
            layer=calls if index is None else int(index),
            q=query,
            k=key,
            own=own or layers[module].scheme,
            scale=scale,
            softcap=more.get("softcap"),
            sinks=more.get("s_aux"),
            before=probed.rotary_start if probed else 0,
            unsupported_reason=probed.unsupported_reason if probed else None,
        )
        calls += 1
        on_layer(layer)
        pos, options = range(query.shape[2]), {"softcap": layer.softcap, "sink_logits": layer.sinks}
        mask = Scheme(mask=layer.own.mask)
        out = attention(mask, query, key, value, pos, pos, scale=scale, **options)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, padding_mask)
    with attention_implementation(ATTENTION, model):
        yield


@contextmanager
def _projections(model: nn.Module, on_layer: OnLayer, own: Scheme) -> Iterator[None]:
    """Hook models with one projection for queries, keys and values, split as the module does."""

    def hook_for(index: int, parent: Any) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, projected: Tensor) -> None:
            if hasattr(parent, "_reshape"):  # BLOOM
                q, k = parent._reshape(projected)[:2]
            elif hasattr(parent, "_split_heads"):  # Falcon
                q, k = (x.transpose(1, 2) for x in parent._split_heads(projected)[:2])
            else:  # MPT
                clip = getattr(parent, "clip_qkv", None)
                projected = projected.clamp(-clip, clip) if clip else projected
                split = projected.unflatten(-1, (3, -1, parent.head_dim))
                q, k, _ = split.permute(2, 0, 3, 1, 4)
            scale = getattr(parent, "softmax_scale", None) or q.shape[-1] ** -0.5
            bias_scale = scale if hasattr(parent, "_split_heads") else 1.0
            on_layer(LayerQK(index, q, k, own, scale, bias_scale=bias_scale))

        return hook

    modules = [(m, key) for m in model.modules() for key in PROJECTIONS if hasattr(m, key)]
    hooks = [(getattr(m, key), hook_for(n, m)) for n, (m, key) in enumerate(modules)]
    with _forward_hooks(hooks):
        yield


@contextmanager
def _forward_hooks(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# the four terms


def qk_terms(model: Any, ids: Int[Tensor, " n"], rows: Int[Tensor, " m"]) -> QKTerms | None:
    """The terms of the first layer's scores for these queries; None without a learned table."""
    if family_of(model) is not LEARNED:
        return None
    first, total, content = split_by_position(model, ids)
    seen = visible(first.own.areas(), rows[:, None], torch.arange(len(ids)))
    q, k = ((c, t - c) for c, t in zip(content, total, strict=True))
    pairs = [(total[0], total[1]), *((a, b) for a in q for b in k)]
    scores = [a[:, rows] @ b.mT * first.scale for a, b in pairs]
    heads = []
    for h in range(len(scores[0])):
        terms = []
        for term, s in zip(("score", *TERMS), (each[h] for each in scores), strict=True):
            mean = (s * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
            sizes = (float(x[seen].square().mean() ** 0.5) for x in (s, s - mean))
            terms.append(Term(term, *sizes))
        heads.append(HeadTerms(head=h, terms=tuple(terms[1:]), whole=terms[0]))
    return QKTerms(layer=first.layer, pairs=int(seen.sum()), heads=tuple(heads))


def split_by_position(model: Any, ids: Int[Tensor, " n"]) -> tuple[LayerQK, QK, QK]:
    """The first layer; its queries and keys; and the part of them that content contributes."""
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    rms = [type(m).__name__ for m in model.modules() if "RMSNorm" in type(m).__name__]
    if rms:
        raise UserError(f"{rms[0]} can't be split into terms: the decomposition needs LayerNorm.")
    sigma: dict[nn.Module, Tensor] = {}

    def record(norm: Any, args: tuple[Any, ...], out: Tensor) -> None:
        sigma[norm] = (args[0].float().var(-1, correction=0, keepdim=True) + norm.eps).sqrt()

    def replay(norm: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x = args[0].float()
        x = (x - x.mean(-1, keepdim=True)) / sigma[norm]
        x = x if norm.weight is None else x * norm.weight.float()
        return (x if norm.bias is None else x + norm.bias.float()).to(out.dtype)

    def first_layer(hooks: list[tuple[nn.Module, Any]]) -> tuple[LayerQK, QK]:
        layers: list[LayerQK] = []

        def stop(layer: LayerQK) -> None:
            layers.append(layer)
            raise StopCapture

        with _forward_hooks(hooks):
            capture_qk(model, ids, stop)
        q, k = (x[0].double().cpu() for x in (layers[0].q, layers[0].k))
        return layers[0], (q, k.repeat_interleave(len(q) // len(k), 0))

    blank = [
        (each.table, lambda module, args, out: torch.zeros_like(out)) for each in tables(model)
    ]
    first, total = first_layer([(norm, record) for norm in norms])
    _, content = first_layer([*blank, *((norm, replay) for norm in norms)])
    return first, total, content
