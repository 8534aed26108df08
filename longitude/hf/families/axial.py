"""Vision transformers with axial RoPE: the towers of Qwen2-VL to Qwen3.5, Pixtral and others.

A patch rotates by its row and its column (parts/axes.py); which frequencies each axis has is
measured on the model's rotary embedding. A scheme of other frequencies replaces them there, and the
model keeps its own attention. Under any other, the rotary embedding becomes the identity and
reports rows and columns, and attention is ours, image by image as the model calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families import Family
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.probe import attention_implementation, identity_rotation, replaced, rotary_owners
from longitude.ops.attention import attention
from longitude.parts import Axial, Bidirectional, Rope

NAME = "longitude_axial"
STATE = "_longitude_axial"


def claims(model: nn.Module) -> bool:
    """Whether a model is a vision tower whose configuration says that its rotation is axial."""
    rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    return rope.get("rope_type") == "axial" and len(rotary_owners(model)) == 1


def own_scheme(model: nn.Module) -> Scheme:
    """The rotation under which its rotary embedding moves by one row, and by one column."""
    rotary: Any = rotary_owners(model)[0].rotaries[0]
    ids = torch.eye(2, dtype=torch.long, device=rotary.inv_freq.device)
    x = torch.zeros(1, 1, device=ids.device)
    cos, sin = (t.float().reshape(2, -1) for t in type(rotary).forward(rotary, x, ids))
    angle = torch.atan2(sin, cos).cpu().double()  # (axes, dims): frequencies are at most 1
    first, second = angle.chunk(2, -1)
    pairs = "half" if torch.equal(first, second) else "adjacent"
    measured = first if pairs == "half" else angle[:, ::2]
    base = float(model.config.rope_parameters["rope_theta"])  # type: ignore[union-attr]
    for spectrum in ("shared", "alternating"):
        rope = Rope(base, pairs=pairs, axes=Axial(spectrum))
        if torch.allclose(spectrum_of(rope, angle.shape[1]), measured, rtol=1e-4, atol=1e-7):
            return Scheme.of(rope, Bidirectional())
    raise UserError(
        f"{type(rotary).__name__} rotates by rows and columns in another way than axial(): "
        f"{type(model).__name__} can't be patched."
    )


def spectrum_of(rope: Rope, dim: int) -> Tensor:
    """The frequencies (axes, pairs) of a fixed rotation."""
    assert rope.axes is not None
    return rope.axes.inv_freq(rope.frequencies, dim, rope.base, 1, {})[:, 0]


@contextmanager
def patch(model: nn.Module, scheme: Scheme | Layers, force: bool) -> Iterator[Scheme]:
    """The model under a scheme, completed from its own."""
    own = own_scheme(model)
    (full,) = merge_scheme(scheme, [own], None, force)
    old, new = own.rotary, full.rotary
    assert old is not None
    frequencies = new and replace(new, base=old.base, frequencies=old.frequencies) == old
    gain = new.frequencies.gain(1) if new else 1.0
    if frequencies and gain == 1 and replace(full, rotary=old) == own:
        with frequencies_replaced(model, old, new) if new != old else ExitStack():  # type: ignore[arg-type]
            yield full
    else:
        with attention_patched(model, full):
            yield full


@contextmanager
def frequencies_replaced(model: nn.Module, old: Rope, new: Rope) -> Iterator[None]:
    """The model with a rotation's frequencies in its rotary embedding."""
    rotary: Any = rotary_owners(model)[0].rotaries[0]
    before = rotary.inv_freq
    dim = before.numel() * (4 if old.axes == Axial() else 2)
    rates = spectrum_of(new, dim).sum(0)[: before.numel()]
    rotary._buffers["inv_freq"] = rates.to(before)
    try:
        yield
    finally:
        rotary._buffers["inv_freq"] = before


@contextmanager
def attention_patched(model: nn.Module, scheme: Scheme) -> Iterator[None]:
    """Our attention in every layer, by the rows and columns that the rotary embedding is given."""
    from transformers import AttentionInterface

    if getattr(model.config, "window_size", None):
        raise UserError(
            f"{type(model).__name__} reorders patches into windows after their positions are "
            f"known: give it other frequencies alone, such as rope(frequencies=linear(2))."
        )
    AttentionInterface.register(NAME, attend)
    state, rotary = _Forward(scheme), rotary_owners(model)[0].rotaries[0]
    with ExitStack() as stack:
        identity = identity_rotation(rotary, state.begin)
        stack.enter_context(replaced(rotary, "forward", identity))
        for module in model.modules():
            stack.enter_context(replaced(module, STATE, state))
        stack.enter_context(attention_implementation(NAME, model))
        yield


class _Forward:
    """What the layers of one forward share: the scheme and the positions of all patches."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.ids = scheme, torch.zeros(0, 2)
        self.done = Counter[nn.Module]()  # patches that each layer has attended

    def begin(self, ids: Tensor, rows: int) -> None:
        """Take the positions (n, 2) of a forward from the rotary embedding's call."""
        self.ids, self.done = ids.reshape(-1, 2), Counter()

    def positions(self, module: nn.Module, n: int) -> Tensor:
        """Of the next n patches of a layer, which calls once or image by image."""
        start = self.done[module]
        self.done[module] += n
        if start + n > len(self.ids):
            raise UserError(
                f"{type(module).__name__} attends over {start + n} tokens, but {len(self.ids)} "
                f"have a row and a column: it can't be patched."
            )
        return self.ids[start : start + n].T[:, None]


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None = None, scaling: float | None = None, dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The registered attention function: heads come in as (b h n d) and go out as (b n h d)."""
    state: _Forward = getattr(module, STATE)
    pos, segments = state.positions(module, query.shape[2]), None
    if attention_mask is not None:
        segments = images_of(attention_mask).expand(query.shape[0], -1)
    options: dict[str, Any] = {"scale": scaling, "dropout": dropout, "segments": segments}
    out = attention(state.scheme, query, key, value, pos, pos, **options)
    return out.transpose(1, 2).contiguous(), None


def images_of(mask: Tensor) -> Tensor:
    """Which image each patch belongs to (b n), from a mask (b 1 n n) that hides other images."""
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    ids = shown.int().argmax(-1)
    if not torch.equal(shown, ids[:, :, None] == ids[:, None]):
        raise UserError("a mask hides more than other images: patch the model without a mask.")
    return ids


AXIAL = Family("axial", claims, own_scheme, patch)
