"""The gradients of a causal window by FlashAttention 2, which torch brings along.

Given the output and log-sum-exp of a softmax over more than the window, they are the window's share
of that softmax's gradients. Its backward is one pass over the pairs where our own kernel takes two.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from longitude.ops.band import Gradients, Part

aten = torch.ops.aten
LARGEST_HEAD = 192  # consumer GPUs (sm86, sm89) have no backward for larger ones


def takes(part: Part) -> bool:
    """Whether a band is such a window, of tensors that the kernel reads."""
    q, k, v = part.q, part.k, part.v
    plain = part.bias is None and part.reach is None and part.chunk is None
    fits = q.shape[-1] == v.shape[-1] <= LARGEST_HEAD and q.shape[-1] % 8 == 0
    square = part.band.lo == 0 and q.shape[2] == k.shape[2]
    return plain and fits and square and q.dtype in (torch.float16, torch.bfloat16)


def backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of a window, in the type of its tensors."""
    n, hi = part.q.shape[2], part.band.hi
    given = (_rows(x) for x in (grad, part.q, part.k, part.v, out))
    undrawn = _undrawn(part.q.device)
    made = aten._flash_attention_backward(
        *given, lse.contiguous(), None, None, n, n, 0.0, True, *undrawn, scale=part.scale,
        window_size_left=-1 if hi >= n else hi - 1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in made)
    return Gradients(dq, dk, dv, None)


def _rows(x: Tensor) -> Tensor:
    """Tokens before heads, as the kernel has them; a head's numbers stand together."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=64)
def _undrawn(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the kernel wants to know of a dropout that there is none of."""
    return torch.empty(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
