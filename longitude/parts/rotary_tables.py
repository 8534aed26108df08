"""Tables of cosines and sines that rotate the queries or the keys of one region.

Angles are computed in float64 and only then rounded: in float32 the cosine is off by 0.07 at
position one million. Tables for a range of positions are cached and shared by every layer; the
cache is bounded in elements, not tables, because a decoder needs a longer table at each step.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

import torch
from torch import Tensor

from longitude.core.part import Frequencies, Pos, Region, as_rows
from longitude.parts.rope import Rope

Tables = tuple[Tensor, Tensor]
MIN_SIZE = 4096  # elements that a smaller table counts as: a decoder builds one at each step


class Memo:
    """Memoise `make`, without gradients, up to `limit` elements in all; the least recently used
    results are dropped first. Nothing is memoised while a compiler traces, nor if an argument is a
    tensor."""

    def __init__(self, make: Callable[..., Tables], limit: int = 2**26) -> None:
        self.make, self.limit, self.size = make, limit, 0
        self.cached: OrderedDict[tuple[Hashable, ...], Tables] = OrderedDict()
        self.lock = Lock()

    def __call__(self, *key: Hashable) -> Tables:
        if torch.compiler.is_compiling():
            return self._compute(key)
        with self.lock:
            if key in self.cached:
                self.cached.move_to_end(key)
                return self.cached[key]
        tables = self._compute(key)
        if any(isinstance(x, Tensor) for x in key):
            return tables
        with self.lock:
            if key not in self.cached:
                self.cached[key] = tables
                self.size += _numbers(tables)
            while self.size > self.limit and len(self.cached) > 1:
                self.size -= _numbers(self.cached.popitem(last=False)[1])
        return tables

    def _compute(self, key: tuple[Hashable, ...]) -> Tables:
        # outside inference mode, because a cached table may serve a training step later
        with torch.inference_mode(False), torch.no_grad():
            return self.make(*key)


def _numbers(tables: Tables) -> int:
    return max(MIN_SIZE, sum(t.numel() for t in tables))


def cos_sin(
    rope: Rope,
    region: Region,
    side: str,
    pos: Pos,
    head_dim: int,
    length: int | Tensor,
    dtype: torch.dtype,
    device: torch.device,
    centre: float = 0.0,
) -> Tables:
    """Tables (b|1, 1, n, pairs) that rotate one side of a region: "q", "k", or the full "pair".

    A query's tables include the gain of the score. "pair" tables rotate a key so that the query can
    stay pre-RoPE: `pos` is then minus the distance, (b|1, n) or (b|1, n, pairs), and they include
    the gain too. `length` is one number, or one for each sequence or token, (b, n|1). `centre` is
    the position at which a decay's gain is 1.
    """
    return _tables(rope, region, side, pos, head_dim, length, dtype, device, centre)


@Memo
def _tables(rope: Rope, region: Region, side: str, pos: Pos, head_dim: int, length: int | Tensor,
            dtype: torch.dtype, device: torch.device, centre: float) -> Tables:  # fmt: skip
    frequencies, dim = region.frequencies or rope.frequencies, rope.dim(head_dim)
    positions = as_rows(pos, device)
    if side != "pair":
        positions = (region.q if side == "q" else region.k).by_pair(positions, dim // 2)
    elif positions.dim() == 2:
        positions = positions[..., None]
    # copies don't block: waiting for one would wait for all work queued on the device
    of_length = _of_length(rope, frequencies, dim, length)
    inv, gain = (x.to(device, non_blocking=True) for x in of_length)
    angle = positions * inv
    size = gain if side != "k" else torch.ones_like(gain)
    if rope.decay:
        away = (positions - centre) if side == "q" else (centre - positions)
        size = size * (rope.decay.rate(dim).to(device, non_blocking=True) * away).exp()
    return (angle.cos() * size).to(dtype)[:, None], (angle.sin() * size).to(dtype)[:, None]


def _of_length(
    rope: Rope, frequencies: Frequencies, dim: int, length: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Inverse frequencies (pairs) or (b, n|1, pairs), and gains that broadcast with them."""
    if not isinstance(length, Tensor):
        gain = torch.tensor(frequencies.gain(length), dtype=torch.float64)
        return rope.inv_freq(dim, length, frequencies), gain
    lengths, index = length.unique(return_inverse=True)
    inv = torch.stack([rope.inv_freq(dim, n, frequencies) for n in lengths.tolist()])
    gain = torch.tensor([[frequencies.gain(n)] for n in lengths.tolist()], dtype=torch.float64)
    return inv.to(index.device)[index], gain.to(index.device)[index]


def attention_scaling(frequencies: Frequencies, length: int) -> float:
    """The factor on q and on k each, as the part defines it: the root of its square may differ."""
    factor = getattr(frequencies, "attention", None)
    return factor() if factor else math.sqrt(frequencies.gain(length))
