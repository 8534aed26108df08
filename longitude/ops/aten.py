"""PyTorch's own attention kernels with their log-sum-exp, forward and backward, behind one
signature.

Public `scaled_dot_product_attention` keeps the log-sum-exp to itself; merging passes needs it. Each
operator here is the aten call that SDPA itself would make. Causal tiles are square, so it does not
matter that these kernels align causal masks at the top left. Grouped heads become a batch of groups
over expanded keys: nothing is repeated in memory.

cuDNN's attention with its log-sum-exp: on Hopper the fastest plain kernel there is.

The same aten call that SDPA would make. cuDNN takes grouped heads by itself; keys that were
expanded over a group go in as the one head they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Ran(NamedTuple):
    """What a forward leaves: the output, its log-sum-exp (b h n) in float32, and what backward
    needs."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...] = ()


class Operator(NamedTuple):
    """forward(q, k, v, causal, scale) and backward(grad, q, k, v, ran, causal, scale)."""

    forward: Callable[..., Ran]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    grouped: bool = False  # whether it takes fewer heads of keys than of queries


def operator_for(q: Tensor) -> Operator | None:
    """The kernel for this tensor's device, type and head size, or None."""
    if q.device.type == "cpu":
        return CPU if q.dtype in (torch.float32, torch.float64, torch.bfloat16) else None
    if q.device.type != "cuda":
        return None
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return FLASH
    return EFFICIENT if q.dtype == torch.float32 and q.shape[-1] % 4 == 0 else None


def forward(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    """The operator over grouped heads."""
    ran = in_groups(op, q, k, v, causal, scale)
    return Ran(ran.out.flatten(1, 2), ran.lse.flatten(1, 2), ran.extra)


def in_groups(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    """The same as (b hkv g n d) and (b hkv g n): as the kernel laid it in memory, not copied."""
    b, hkv = k.shape[:2]
    ran = op.forward(*((q, k, v) if op.grouped else _group(q, k, v)), causal, scale)
    shape = (b, hkv, q.shape[1] // hkv, q.shape[2])
    return Ran(ran.out.view(*shape, -1), ran.lse.view(shape), ran.extra)


def backward(
    op: Operator,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ran: Ran,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; a group's gradients add up in its keys."""
    if op.grouped:
        return op.backward(grad, q, k, v, ran, causal, scale)
    b, h, hkv = q.shape[0], q.shape[1], k.shape[1]
    qg, kg, vg = _group(q, k, v)
    out, lse, grad = (
        x.contiguous().view(qg.shape[0], qg.shape[1], *x.shape[2:])
        for x in (ran.out, ran.lse, grad)
    )
    dq, dk, dv = op.backward(grad, qg, kg, vg, Ran(out, lse, ran.extra), causal, scale)
    if hkv != h:  # a kernel that knows groups has added them up itself
        dk, dv = (x if x.shape[1] == 1 else x.sum(1) for x in (dk, dv))
    return _heads(dq, b, h), dk.reshape(k.shape), dv.reshape(v.shape)


def _group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(b hkv·g n d) and (b hkv m d) as (b·hkv g n d), keys expanded over g without a copy."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    return q.reshape(-1, group, *q.shape[2:]), k, v


def _heads(x: Tensor, b: int, h: int) -> Tensor:
    return x.reshape(b, h, *x.shape[2:])


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return Ran(out, lse)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, ran.out, ran.lse, 0.0, causal, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    out, lse, *extra = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return Ran(out, lse, tuple(extra[:6]))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    cum_q, cum_k, max_q, max_k, state, unused = ran.extra
    return aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        ran.out,
        ran.lse,
        cum_q,
        cum_k,
        max_q,
        max_k,
        0.0,
        causal,
        state,
        unused,
        scale=scale,
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return Ran(out, lse[..., : q.shape[2]], (seed, offset))


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # the kernel reads its log-sum-exp in rows padded to 32; infinity there weighs nothing
    lse = torch.nn.functional.pad(ran.lse, (0, -ran.lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad,
        q,
        k,
        v,
        None,
        ran.out,
        lse,
        *ran.extra,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return dq, dk, dv


CPU = Operator(_cpu_forward, _cpu_backward)
FLASH = Operator(_flash_forward, _flash_backward)
EFFICIENT = Operator(_efficient_forward, _efficient_backward)


aten_cudnn = torch.ops.aten
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
    out, lse, *_ = aten_cudnn._scaled_dot_product_cudnn_attention(
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
    return aten_cudnn._scaled_dot_product_cudnn_attention_backward(
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
    made = aten_cudnn._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)
    return made[1].dim(), made[6]


CUDNN = Operator(_forward, _backward, grouped=True)
