"""cuDNN's attention with its log-sum-exp: on Hopper the fastest plain kernel there is.

The same aten call that SDPA would make. cuDNN takes grouped heads by itself; keys that were
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
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, _one_head(k), _one_head(v), None, True, 0.0, causal, False, scale=scale
    )
    return Ran(out, lse.reshape(q.shape[:3]))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing of a forward but its output and log-sum-exp: there need not have been one."""
    k, v, out, lse = _one_head(k), _one_head(v), ran.out, ran.lse.contiguous()
    if _steps(grad) != _steps(out):  # which the kernel would put right with a warning
        grad, out = grad.contiguous(), out.contiguous()
    dims, seed = _recorded(q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse if dims == lse.dim() else lse[..., None], seed, seed, None, None,
        None, q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _steps(x: Tensor) -> list[int]:
    """Its strides; a dimension of one has none that matter."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


@cache
def _recorded(device: torch.device) -> tuple[int, Tensor]:
    """How many dimensions this torch's log-sum-exp has there, and what a forward without dropout
    leaves for a seed: asked of the smallest one."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    made = aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)
    return made[1].dim(), made[6]


CUDNN = Operator(_forward, _backward, grouped=True)
