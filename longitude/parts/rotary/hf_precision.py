"""transformers' own tables: the cosines and sines of float32 angles, bit for bit.

Longitude makes its angles in float64, where transformers (5.x, `LlamaRotaryEmbedding.forward`)
multiplies float32 positions by float32 frequencies. `hf_cos_sin` reproduces those bits, so that a
difference from a checkpoint's own run is never a matter of rounding: for tests of parity, and to
tell one kind of error from another. A model that ran longer inputs before may hold other
frequencies (dynamic NTK); these are a fresh model's.
"""

import math

import torch
from torch import Tensor

from longitude.part import Frequencies, Mistake, Pos, as_tensor, by_rows
from longitude.parts.rotary.frequencies.dynamic_ntk import DynamicNtk
from longitude.parts.rotary.frequencies.unscaled import powers
from longitude.parts.rotary.rope import Rope


def hf_cos_sin(
    rope: Rope, pos: Pos, head_dim: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The tables (…, n, rotary dim) of positions (…, n), laid out as the rope's pairs are.

    They are as wide as the rotary dimensions, each angle standing twice, and carry the square root
    of the gain: transformers turns queries and keys by the same tables.
    """
    if rope.remap or rope.decay or by_rows(rope.frequencies):
        raise Mistake(
            f"hf precision: transformers has no counterpart of {rope}: "
            f"leave out its remap, decay or stepped frequencies."
        )
    where = as_tensor(pos)
    inv = _inv_freq(rope.frequencies, rope.dim(head_dim), rope.base, length).to(where.device)
    angle = where[..., None].float() * inv
    both = torch.cat([angle] * 2, -1) if rope.pairs == "half" else angle.repeat_interleave(2, -1)
    scaling = attention_scaling(rope.frequencies, length)
    return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)


def _inv_freq(frequencies: Frequencies, dim: int, base: float, length: int) -> Tensor:
    if isinstance(frequencies, DynamicNtk) and length > frequencies.original and dim > 2:
        # a forward pass finds its length as a tensor, so the base grows in float32 there
        grown = frequencies.factor * torch.tensor(length) / frequencies.original
        grown = base * (grown - (frequencies.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / powers(dim, grown, torch.float32)
    return frequencies.inv_freq(dim, base, length, dtype=torch.float32)


def attention_scaling(frequencies: Frequencies, length: int) -> float:
    """The factor on q and on k each: as the part has it, for the root of its square may differ."""
    own = getattr(frequencies, "attention", None)
    return own() if own else math.sqrt(frequencies.gain(length))
