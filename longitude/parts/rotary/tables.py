"""Tables of cosines and sines: what turns the queries or the keys of one region.

Angles are made in float64 and only then rounded: in float32 the cosine is off by 0.07 at position
one million. Tables for a range of positions are made once and shared by every layer.
"""

import torch
from torch import Tensor

from longitude.part import Frequencies, Pos, Region, as_tensor
from longitude.parts.rotary.memo import Memo, Tables
from longitude.parts.rotary.rope import Rope


def cos_sin(
    rope: Rope,
    region: Region,
    side: str,
    pos: Pos,
    head_dim: int,
    length: int | Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    centre: float = 0.0,
) -> Tables:
    """Tables (b|1, 1, n, half) that turn one side of a region: "q", "k", or the whole "pair".

    A query's tables carry the gain of the score. The tables of a pair turn a key for an unturned
    query: `pos` is then minus the distance, and they carry the gain too. `length` is one number, or
    one for each sequence or token, (b, n|1). `centre` is where a decay's gain is 1.
    """
    fixed = isinstance(pos, range) and not isinstance(length, Tensor)
    make = _made_once if fixed and not torch.compiler.is_compiling() else _make
    return make(rope, region, side, pos, head_dim, length, dtype, device, centre)


def _make(
    rope: Rope,
    region: Region,
    side: str,
    pos: Pos,
    head_dim: int,
    length: int | Tensor,
    dtype: torch.dtype,
    device: torch.device,
    centre: float,
) -> Tables:
    frequencies, dim = region.frequencies or rope.frequencies, rope.dim(head_dim)
    # made outside inference mode, because a table made once may serve a training step later
    with torch.inference_mode(False), torch.no_grad():
        where = (region.q if side == "q" else region.k)(torch.atleast_2d(as_tensor(pos, device)))
        inv, gain = _of_length(frequencies, dim, rope.base, length)
        angle = where[..., None] * inv.to(device)
        size = gain.to(device) if side != "k" else torch.ones_like(gain, device=device)
        if rope.decay:
            away = (where - centre) if side == "q" else (centre - where)
            size = size * (rope.decay.rate(dim).to(device) * away[..., None]).exp()
        return (angle.cos() * size).to(dtype)[:, None], (angle.sin() * size).to(dtype)[:, None]


_made_once = Memo(_make, limit=2**26)


def _of_length(
    frequencies: Frequencies, dim: int, base: float, length: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Inverse frequencies (half) or (b, n|1, half), and gains that broadcast with them."""
    if not isinstance(length, Tensor):
        gain = torch.tensor(frequencies.gain(length), dtype=torch.float64)
        return frequencies.inv_freq(dim, base, length), gain
    each, which = length.unique(return_inverse=True)
    inv = torch.stack([frequencies.inv_freq(dim, base, n) for n in each.tolist()])
    gain = torch.tensor([[frequencies.gain(n)] for n in each.tolist()], dtype=torch.float64)
    return inv.to(which.device)[which], gain.to(which.device)[which]
