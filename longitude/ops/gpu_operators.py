"""Plain attention on a GPU that returns its log-sum-exp (LSE): an operator for each kernel.

Public `scaled_dot_product_attention` returns no LSE, so torch's kernels are called by the aten
operators that SDPA itself uses. They align causal masks at the top left, which makes no difference
for causal tiles: those are square. cuDNN, FlashAttention 4 and our own kernel take grouped heads.

FlashAttention 4 (the package `flash-attn-4`, if it is installed) also takes a window. On an H200 it
runs causal attention at 600 to 690 TFLOP/s (cuDNN: 530 to 660), and a window of 4,096 at 540 to
570. Importing it takes eight seconds, so it is imported by its first call, which also compiles for
two or three: once for each kind of call, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.ops.passes import Window
from longitude.ops.plan import Band, Kernel

aten = torch.ops.aten
Three = tuple[Tensor, Tensor, Tensor]
Causal = bool | Window


class Forward(NamedTuple):
    """The results of a forward: the output, its log-sum-exp (b h n) in float32, and what the
    backward needs besides."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...] = ()


class Operator(NamedTuple):
    """forward(q, k, v, causal, scale) and backward(grad, q, k, v, forward, causal, scale)."""

    forward: Callable[..., Forward]
    backward: Callable[..., Three]
    grouped: bool = False  # whether it takes fewer heads of keys than of queries


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, lse, *extra = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return Forward(out, lse, tuple(extra[:6]))


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: bool,
                    scale: float) -> Three:  # fmt: skip
    *lengths, state, unused = ran.extra
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, ran.out, ran.lse, *lengths, 0.0, causal, state, unused, scale=scale
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return Forward(out, lse[..., : q.shape[2]], (seed, offset))


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: bool,
                        scale: float) -> Three:  # fmt: skip
    # the kernel reads log-sum-exps in rows padded to 32; infinity gives padding zero weight
    lse = torch.nn.functional.pad(ran.lse, (0, -ran.lse.shape[-1] % 32), value=float("inf"))
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, ran.out, lse, *ran.extra, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return grads[:3]


def _one_head(x: Tensor) -> Tensor:
    """Return the single head of keys that were expanded over a group; other keys unchanged."""
    return x[:, :1] if x.shape[1] > 1 and x.stride(1) == 0 else x


def _own_heads(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors that were expanded over heads, so that each head has its own memory."""
    return [x if x is _one_head(x) else x.contiguous() for x in tensors]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, _one_head(k), _one_head(v), None, True, 0.0, causal, False, scale=scale
    )
    return Forward(out, lse.reshape(q.shape[:3]))


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: bool,
                    scale: float) -> Three:  # fmt: skip
    """Needs only the output and log-sum-exp of a forward; expanded heads are copied.

    torch caches cuDNN's plans by the strides of q, k and v alone, since its own outputs have q's
    layout: an output with another layout would be read wrongly, in this call or in a later one.
    """
    k, v = _own_heads(k, v)
    grad, out, lse = laid_like(grad, q), laid_like(ran.out, q), ran.lse.contiguous()
    dims, seed = _cudnn_state(q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse if dims == lse.dim() else lse[..., None], seed, seed, None, None,
        None, q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def laid_like(x: Tensor, q: Tensor) -> Tensor:
    """Return x densely packed, its dimensions in the memory order of q's: copied if need be."""
    order = sorted(range(x.dim()), key=q.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(n) for n in range(x.dim())])


@cache
def _cudnn_state(device: torch.device) -> tuple[int, Tensor]:
    """Return how many dimensions the log-sum-exp has in this torch, and the random state of a
    forward without dropout, both from a minimal call."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    outputs = aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)
    return outputs[1].dim(), outputs[6]


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float) -> Forward:
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

    tokens_first = (x.transpose(1, 2) for x in _own_heads(q, k, v))
    kwargs = {"softmax_scale": scale, "return_lse": True, "pack_gqa": False}  # packs for decoding
    out, lse, *_ = _flash_attn_fwd(*tokens_first, **kwargs, **_window_sizes(causal))
    return Forward(out.transpose(1, 2), lse)


def _flash4_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: Causal,
                     scale: float) -> Three:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    tokens_first = (x.transpose(1, 2) for x in _own_heads(q, k, v, ran.out, grad))
    deterministic = torch.are_deterministic_algorithms_enabled()
    kwargs = {"deterministic": deterministic, **_window_sizes(causal)}
    grads = _flash_attn_bwd(*tokens_first, ran.lse.contiguous(), scale, **kwargs)
    dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
    return dq, dk, dv


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, wide: bool = False
) -> Forward:
    """Run our warp-specialised kernel; a `wide` output is float32."""
    from longitude.ops.bands import BandCall  # deferred: few calls need it
    from longitude.ops.kernels.banded import banded

    band = Band(0 if causal else 1 - k.shape[2], q.shape[2])
    return Forward(*banded(BandCall(q, k, v, None, band, scale), wide=wide))


def _window_sizes(causal: Causal) -> dict[str, int | None]:
    window = causal if isinstance(causal, Window) else Window(None, 0 if causal else None)
    return {"window_size_left": window.left, "window_size_right": window.right}


GPU_OPERATORS = {
    Kernel.FLASH: Operator(_flash_forward, _flash_backward),
    Kernel.EFFICIENT: Operator(_efficient_forward, _efficient_backward),
    Kernel.CUDNN: Operator(_cudnn_forward, _cudnn_backward, grouped=True),
    Kernel.FLASH4: Operator(_flash4_forward, _flash4_backward, grouped=True),
    Kernel.HOPPER: Operator(hopper_forward, _cudnn_backward, grouped=True),
}
