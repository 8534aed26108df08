"""M-RoPE under any scheme: three positions per token as one, and a rotation by what is left.

Pair i of a token at (t, h, w) rotates by p θ_i, where p is the one of the three that the model
gives to the pair (Qwen2-VL, arXiv:2409.12191; sections or interleaved; measured, `axes_of`). Here
each token gets one position u near its t, and before anything else pair i is rotated by
(p - u) θ_i. A scheme then rotates by u as it would a text's: together p θ_i, exactly. A remap
changes u's part alone, so it acts on time; rows and columns keep their true offsets. It could not
act on them: a remap shortens distances along the text, and an image is no longer than trained on.

All tokens of an image share t, but a token sees only those before it. So u grows by a trace with
each of them, which the first rotation takes back: causality goes by the order of tokens. In a text
the three positions are equal, u is the position itself and nothing is rotated first.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.part import by_rows
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.parts import Causal, Rope

TRACE = 2.0**-20  # far more tokens share a t in no image; float64 holds it beside any position
Tables = tuple[Tensor, Tensor]


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


def check(scheme: Scheme) -> None:
    """Raise for a scheme that says nothing of images."""
    rope, local = scheme.rotary, [mask for mask in scheme.mask if mask != Causal()]
    by_length = rope and (rope.frequencies.by_length or by_rows(rope.frequencies) or rope.decay)
    by_length = by_length or (rope and by_rows(rope.remap))
    if by_length or local or scheme.bias or scheme.scale:
        raise UserError(
            f"images have three positions per token, and {shown(scheme)} goes by one alone: give "
            f"text, or rope(…) of fixed frequencies and a fixed remap."
        )


def one_position(
    ids: Int[Tensor, "3 b n"], padding: Tensor | None, last: Tensor | None
) -> Float[Tensor, "b n"]:
    """u of each token: its t, or the largest before it, and a trace for each that shares it.

    `last` (b, 1) are those of the tokens before, in a cache."""
    time = ids[0].double()
    time = time if padding is None else time.masked_fill(padding, -1)
    starts = (time == 0) & (time.cummax(1).values > 0)
    if bool(starts.any()):
        raise UserError(
            "a row with images holds several documents: give each document a row of its own."
        )
    before = time if last is None else torch.cat([last.to(time).expand(len(time), 1), time], 1)
    highest = before.cummax(1).values
    index = torch.arange(before.shape[1], device=ids.device).expand_as(before)
    fresh = torch.ones_like(before, dtype=torch.bool)
    fresh[:, 1:] = highest[:, 1:] > highest[:, :-1]
    first = index.masked_fill(~fresh, 0).cummax(1).values
    return (highest + TRACE * (index - first))[:, -time.shape[1] :]


def tables(
    rope: Rope, axes: tuple[int, ...], left: Float[Tensor, "3 b n"], dim: int, like: Any
) -> Tables:
    """Cosines and sines (b 1 n pairs) of what is left of each pair's position, (p - u) θ_i."""
    inv = rope.frequencies.inv_freq(dim, rope.base, 1).to(left.device)
    angle = left[list(axes)].permute(1, 2, 0) * inv
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]
