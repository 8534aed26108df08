"""M-RoPE of a checkpoint: which of three positions each pair rotates by, measured on the model.

The rotation itself, and what a remap does to it, is that of `ops.axes`: a token's three positions
as one, and heads rotated first by what that leaves. The scheme of a checkpoint names no axes,
because a text has one position.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError
from longitude.ops.axes import rotate
from longitude.parts import Rope
from longitude.parts.axes import by_axis


def axes_of(rotary: nn.Module, pairs: int) -> tuple[int, ...]:
    """Which of the three positions each pair rotates by, as the rotary embedding has it."""
    x, moved = torch.zeros(1, 1, 1, device=next(rotary.buffers()).device), []
    for axis in range(3):
        ids = torch.zeros(3, 1, 1, dtype=torch.long, device=x.device)
        ids[axis] = 1
        sin: Tensor = type(rotary).forward(rotary, x, ids)[1].flatten()  # type: ignore[operator]
        halves = sin.view(2, -1) if len(sin) == 2 * pairs else sin[None]
        twice = halves if torch.equal(halves[0], halves[-1]) else sin.view(-1, 2).mT
        moved.append(twice.ne(0))
    each = torch.stack(moved)  # (3, 2|1, pairs)
    one_axis = each.shape[-1] == pairs and bool((each.sum(0) == 1).all())
    if not one_axis or not bool((each == each[:, :1]).all()):
        raise UserError(
            f"{type(rotary).__name__} does not rotate each pair by one position of its three: it "
            f"reads text only while patched."
        )
    return tuple(each[:, 0].int().argmax(0).tolist())


def rotate_left(rope: Rope, axes: tuple[int, ...], left: Tensor, dim: int, x: Tensor) -> Tensor:
    """Heads rotated by what one position leaves (3 b n) of each pair's own, (p - u) θ_i."""
    theta = rope.frequencies.inv_freq(dim, rope.base, 1)
    return rotate(x, left, by_axis(axes, 3, theta), rope.pairs)
