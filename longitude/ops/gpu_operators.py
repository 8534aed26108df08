"""Plain attention on a GPU that gives its log-sum-exp (LSE): an operator for each kernel.

Public `scaled_dot_product_attention` returns no LSE, so each of torch's kernels is the aten call
that SDPA itself would make. They align causal masks at the top left, which does not matter: causal
tiles are square. cuDNN, FlashAttention 4 and our own kernel take grouped heads.

FlashAttention 4 (the package `flash-attn-4`, if it is installed) also takes a window. On an H200 it
runs causal attention at 600 to 690 TFLOP/s (cuDNN: 530 to 660), and a window of 4,096 at 540 to
570. Importing it takes eight seconds, so its first call does, which also
compiles for two or three: once for each kind of call, whatever the lengths.
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
    """What a forward leaves: the output, its log-sum-exp (b h n) in float32, and what backward
    needs."""

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
    # the kernel reads its log-sum-exp in rows padded to 32; infinity there weighs nothing
    lse = torch.nn.functional.pad(ran.lse, (0, -ran.lse.shape[-1] % 32), value=float("inf"))
    made = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, ran.out, lse, *ran.extra, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return made[:3]


def _one_head(x: Tensor) -> Tensor:
    """Keys that were expanded over a group as the one head they are."""
    return x[:, :1] if x.shape[1] > 1 and x.stride(1) == 0 else x


def _own_heads(*tensors: Tensor) -> list[Tensor]:
    """Tensors with memory for each of their heads."""
    return [x if x is _one_head(x) else x.contiguous() for x in tensors]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, _one_head(k), _one_head(v), None, True, 0.0, causal, False, scale=scale
    )
    return Forward(out, lse.reshape(q.shape[:3]))


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: bool,
                    scale: float) -> Three:  # fmt: skip
    """All it needs of a forward is an output and log-sum-exp; expanded heads are copied.

    torch keeps cuDNN's plans by the strides of q, k and v alone, for its own outputs lie as q does:
    another that lies otherwise would be read wrongly, or make a later call of anybody's do so.
    """
    k, v = _own_heads(k, v)
    grad, out, lse = laid_like(grad, q), laid_like(ran.out, q), ran.lse.contiguous()
    dims, seed = _cudnn_state(q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse if dims == lse.dim() else lse[..., None], seed, seed, None, None,
        None, q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def laid_like(x: Tensor, q: Tensor) -> Tensor:
    """x without gaps, its dimensions in the order in which those of q lie: copied if it is not."""
    order = sorted(range(x.dim()), key=q.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(n) for n in range(x.dim())])


@cache
def _cudnn_state(device: torch.device) -> tuple[int, Tensor]:
    """How many dimensions this torch's log-sum-exp has there, and the random state of a forward
    without dropout: read off the smallest one."""
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    made = aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, False, False)
    return made[1].dim(), made[6]


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float) -> Forward:
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

    tokens_first = (x.transpose(1, 2) for x in _own_heads(q, k, v))
    how = {"softmax_scale": scale, "return_lse": True, "pack_gqa": False}  # which is for decoding
    out, lse, *_ = _flash_attn_fwd(*tokens_first, **how, **_window_sizes(causal))
    return Forward(out.transpose(1, 2), lse)


def _flash4_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, causal: Causal,
                     scale: float) -> Three:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    tokens_first = (x.transpose(1, 2) for x in _own_heads(q, k, v, ran.out, grad))
    exact = torch.are_deterministic_algorithms_enabled()
    how = {"deterministic": exact, **_window_sizes(causal)}
    made = _flash_attn_bwd(*tokens_first, ran.lse.contiguous(), scale, **how)
    dq, dk, dv = (x.transpose(1, 2) for x in made[:3])
    return dq, dk, dv


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, wide: bool = False
) -> Forward:
    """By our kernel of specialised warps; a `wide` output is float32."""
    from longitude.ops.bands import BandCall  # late: few calls come here
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
