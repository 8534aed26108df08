"""Turning vectors by angles: the rotation itself, in both pair layouts.

"half" pairs dimension i with i + d/2 (GPT-NeoX, Llama in transformers); "adjacent" pairs 2i with 2i
+ 1 (RoFormer, GPT-J, Meta's Llama weights). The two give equal scores only after permuting the
weights' rows. Dimensions past the tables' pass through: partial rotary.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Pairs = Literal["half", "adjacent"]


def turn(
    x: Float[Tensor, "b h n d"],
    cos: Float[Tensor, "#b 1 n half"],
    sin: Float[Tensor, "#b 1 n half"],
    pairs: Pairs = "half",
) -> Float[Tensor, "b h n d"]:
    """x (b h n d) turned by tables (b|1 1 n half), in float32 at least, rounded once to x's
    dtype."""
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([turn(x[..., :width], cos, sin, pairs), x[..., width:]], -1)
    wide = x.to(cos.dtype)
    turned = _turn_adjacent(wide, cos, sin) if pairs == "adjacent" else _turn_half(wide, cos, sin)
    return turned.to(x.dtype)


def _turn_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if (
        torch.compiler.is_compiling()
    ):  # the compiler fuses real arithmetic and falls back on complex
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    x = x.contiguous()
    if x.storage_offset() % 2:  # a complex number starts where an even one stands
        x = x.clone()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def _turn_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return _Half.apply(x, cos, sin)  # type: ignore[return-value]


class _Half(torch.autograd.Function):
    """Half pairs in three passes over whole rows, where loops are long; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        a, b = x.chunk(2, -1)
        turned = torch.cat([b, a], -1).mul_(torch.cat([-sin, sin], -1))
        return turned.addcmul_(x, torch.cat([cos, cos], -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _Half.apply(grads[0], cos, -sin), None, None
