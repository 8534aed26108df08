"""cuDNN's attention with its log-sum-exp: on Hopper the fastest plain kernel there is.

The same aten call that SDPA would make. cuDNN takes grouped heads by itself, so keys that were
expanded over a group go in as the one head they are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from longitude.attention.operators import Operator, Ran

aten = torch.ops.aten
LARGEST_HEAD = 128  # forward and backward
HOPPER = (9, 0)  # before it, flash attention is as fast


def cudnn_for(q: Tensor) -> Operator | None:
    """cuDNN's operator, where it is the faster kernel for this tensor, or None."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_HEAD
    return CUDNN if fits and _has_cudnn(q.device) else None


@cache
def _has_cudnn(device: torch.device) -> bool:
    return torch.backends.cudnn.is_available() and (
        torch.cuda.get_device_capability(device) >= HOPPER
    )


def _one_head(x: Tensor) -> Tensor:
    return x[:, :1] if x.shape[1] > 1 and x.stride(1) == 0 else x


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    out, lse, *extra = aten._scaled_dot_product_cudnn_attention(
        q, _one_head(k), _one_head(v), None, True, 0.0, causal, False, scale=scale
    )
    return Ran(out, lse.reshape(q.shape[:3]), (*extra[:6], lse.dim()))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k, seed, offset, dims = ran.extra
    k, v = _one_head(k), _one_head(v)
    lse = ran.lse.contiguous() if dims == ran.lse.dim() else ran.lse.contiguous()[..., None]
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, ran.out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal,
        scale=scale,
    )  # fmt: skip


CUDNN = Operator(_forward, _backward)
