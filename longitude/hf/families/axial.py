"""Vision transformers with axial RoPE: towers of Qwen2-VL to Qwen3.5, Pixtral, DINOv3, Llama 4 ….

An image patch is rotated by its row and column (parts/axes.py); the frequencies of each axis are
measured on the model's rotary embedding. If only frequencies change, they are replaced there, and
the model keeps its own attention. Under any other scheme, the rotary embedding becomes the identity
and reports rows and columns, and attention is ours, image by image as the model calls it.

DINOv3 and Llama 4 compute positions inside their rotary embedding, from the image (`TOWERS`): for
DINOv3 the centre of each patch, -1 to 1 over the image, times 2π; for Llama 4 columns, then rows,
from 1 on. Tokens without a place, such as the class token, are at 0, which rotates nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.encoding_config import IMAGE_ROTARIES
from longitude.hf.families import Family
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.probe import attention_implementation, identity_rotation, replaced, rotary_owners
from longitude.ops.attention import attention
from longitude.parts import Axial, Bidirectional, Rope

NAME = "longitude_axial"
STATE = "_longitude_axial"


class Tower(NamedTuple):
    """A rotary embedding whose input is the image, and which computes its patches' positions."""

    pairs: Literal["half", "adjacent"]
    positions: Callable[[Any, Tensor], Tensor]  # of all tokens (n, 2), from its config and an image
    tables: Callable[[Any, Tensor], Any]  # what it returns, from its config and angles (n, pairs)


def _dinov3_positions(config: Any, image: Tensor) -> Tensor:
    size = config.patch_size
    sizes = size if isinstance(size, Iterable) else (size, size)
    counts = [side // patch for side, patch in zip(image.shape[-2:], sizes, strict=True)]
    centres = [(torch.arange(n, device=image.device) + 0.5) / n * 2 - 1 for n in counts]
    positions = torch.stack(torch.meshgrid(*centres, indexing="ij"), -1).flatten(0, 1)
    return pad(2 * math.pi * positions, (0, 0, 1 + config.num_register_tokens, 0))


def _dinov3_tables(config: Any, angles: Tensor) -> tuple[Tensor, Tensor]:
    angles = angles[1 + config.num_register_tokens :].tile(2)
    return angles.cos(), angles.sin()


def _llama4_positions(config: Any, image: Tensor) -> Tensor:
    side = config.image_size // config.patch_size
    at = torch.arange(side**2, device=image.device)
    return pad(torch.stack([at % side, at // side], -1).float() + 1, (0, 0, 0, 1))


def _llama4_tables(config: Any, angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)[:, None]


TOWERS = {  # by model type
    "dinov3_vit": Tower("half", _dinov3_positions, _dinov3_tables),
    "llama4_vision_model": Tower("adjacent", _llama4_positions, _llama4_tables),
}


def tower_of(model: nn.Module) -> tuple[Tower, nn.Module] | None:
    """Return a model's `Tower` and the rotary embedding itself; None for any other model."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    modules = [m for m in model.modules() if type(m).__name__ == IMAGE_ROTARIES.get(kind)]
    return (TOWERS[kind], modules[0]) if len(modules) == 1 else None


def rotated_by(tower: Tower, config: Any, rope: Rope | None, image: Tensor) -> Any:
    """Return what a tower's rotary embedding would return for an image under `rope` or none."""
    positions = tower.positions(config, image)
    dim = config.hidden_size // config.num_attention_heads
    freqs = spectrum_of(rope, dim).to(positions) if rope else positions.new_zeros(2, dim // 2)
    tables = tower.tables(config, positions @ freqs)
    if isinstance(tables, tuple):
        return tuple(table.to(image.dtype) for table in tables)
    return tables


def claims(model: nn.Module) -> bool:
    """Whether a model is a vision tower whose configuration says that its rotation is axial."""
    if tower_of(model) is not None:
        return True
    rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    return rope.get("rope_type") == "axial" and len(rotary_owners(model)) == 1


def own_scheme(model: nn.Module) -> Scheme:
    """Return the scheme, measured on the rotary embedding's angles for one row and one column. For
    a `Tower` it is the configuration's, checked against the tables of its rotary embedding."""
    config: Any = model.config
    if (pair := tower_of(model)) is not None:
        tower, module = pair
        stated = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
        rope = Rope(float(stated["rope_theta"]), pairs=tower.pairs, axes=Axial())
        size = config.image_size
        sizes = size if isinstance(size, Iterable) else (size, size)
        image = torch.zeros(1, 1, *sizes, device=next(model.parameters()).device)
        ours, theirs = rotated_by(tower, config, rope, image), type(module).forward(module, image)
        for expected, actual in zip(ours, theirs, strict=True):
            if expected.shape != actual.shape or not torch.allclose(expected, actual, atol=1e-4):
                raise UserError(
                    f"{type(module).__name__} rotates in another way than {rope}: "
                    f"{type(model).__name__} can't be patched."
                )
        return Scheme.of(rope, Bidirectional())
    rotary: Any = rotary_owners(model)[0].rotaries[0]
    ids = torch.eye(2, dtype=torch.long, device=rotary.inv_freq.device)
    x = torch.zeros(1, 1, device=ids.device)
    cos, sin = (t.float().reshape(2, -1) for t in type(rotary).forward(rotary, x, ids))
    angle = torch.atan2(sin, cos).cpu().double()  # (axes, dims): frequencies are at most 1
    first, second = angle.chunk(2, -1)
    pairs = "half" if torch.equal(first, second) else "adjacent"
    measured = first if pairs == "half" else angle[:, ::2]
    base = float(config.rope_parameters["rope_theta"])
    for spectrum in ("shared", "alternating"):
        rope = Rope(base, pairs=pairs, axes=Axial(spectrum))
        if torch.allclose(spectrum_of(rope, angle.shape[1]), measured, rtol=1e-4, atol=1e-7):
            return Scheme.of(rope, Bidirectional())
    raise UserError(
        f"{type(rotary).__name__} rotates by rows and columns in another way than axial(): "
        f"{type(model).__name__} can't be patched."
    )


def spectrum_of(rope: Rope, dim: int) -> Tensor:
    """Return the frequencies (axes, pairs) of a rotation without learned ones."""
    assert rope.axes is not None
    return rope.axes.inv_freq(rope.frequencies, dim, rope.base, 1, {})[:, 0]


@contextmanager
def patch(model: nn.Module, scheme: Scheme | Layers, force: bool) -> Iterator[Scheme]:
    """Run the model under a scheme, completed from its own, inside a with block."""
    own = own_scheme(model)
    (full,) = merge_scheme(scheme, [own], None, force)
    old, new = own.rotary, full.rotary
    assert old is not None
    only_frequencies = new and replace(new, base=old.base, frequencies=old.frequencies) == old
    gain = new.frequencies.gain(1) if new else 1.0
    if only_frequencies and gain == 1 and replace(full, rotary=old) == own:
        with frequencies_replaced(model, old, new) if new != old else ExitStack():  # type: ignore[arg-type]
            yield full
    else:
        with attention_patched(model, full):
            yield full


@contextmanager
def frequencies_replaced(model: nn.Module, old: Rope, new: Rope) -> Iterator[None]:
    """Set the frequencies of the model's rotary embedding to those of `new`."""
    if (pair := tower_of(model)) is not None:
        tower, module = pair

        def forward(image: Tensor) -> Any:
            return rotated_by(tower, model.config, new, image)

        with replaced(module, "forward", forward):
            yield
        return
    rotary: Any = rotary_owners(model)[0].rotaries[0]
    before = rotary.inv_freq
    dim = before.numel() * (4 if old.axes == Axial() else 2)
    freqs = spectrum_of(new, dim).sum(0)[: before.numel()]
    rotary._buffers["inv_freq"] = freqs.to(before)
    try:
        yield
    finally:
        rotary._buffers["inv_freq"] = before


@contextmanager
def attention_patched(model: nn.Module, scheme: Scheme) -> Iterator[None]:
    """Run our attention in every layer, at the rows and columns that the rotary embedding gets."""
    from transformers import AttentionInterface

    if getattr(model.config, "window_size", None):
        raise UserError(
            f"{type(model).__name__} reorders patches into windows after their positions are "
            f"known: give it other frequencies alone, such as rope(frequencies=linear(2))."
        )
    AttentionInterface.register(NAME, attend)
    state, pair = _Forward(scheme), tower_of(model)
    rotary = pair[1] if pair else rotary_owners(model)[0].rotaries[0]

    def given_images(image: Tensor) -> Any:
        assert pair is not None
        state.begin(pair[0].positions(model.config, image), 1)
        return rotated_by(pair[0], model.config, None, image)

    with ExitStack() as stack:
        identity = given_images if pair else identity_rotation(rotary, state.begin)
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
        """Return positions of a layer's next n patches: it attends to all at once or per image."""
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
        # which image each patch belongs to (b n), from a mask (b 1 n n) that hides other images
        mask = attention_mask[:, 0]
        shown = mask if mask.dtype == torch.bool else mask == 0
        ids = shown.int().argmax(-1)
        if not torch.equal(shown, ids[:, :, None] == ids[:, None]):
            raise UserError("a mask hides more than other images: patch the model without a mask.")
        segments = ids.expand(query.shape[0], -1)
    options: dict[str, Any] = {"scale": scaling, "dropout": dropout, "segments": segments}
    out = attention(state.scheme, query, key, value, pos, pos, **options)
    return out.transpose(1, 2).contiguous(), None


AXIAL = Family("axial", claims, own_scheme, patch)
