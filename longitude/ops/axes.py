"""Several positions per token as one: a first rotation of q and k covers what one position misses.

Pair i of a token at positions p_a must rotate by Σ_a p_a f_a,i (parts/axes.py). In M-RoPE the f of
a pair sum to θ_i. Each token gets one position u close to its time; q and k are rotated by
Σ_a (p_a - u) f_a,i, and then by u as in plain text: together Σ_a p_a f_a,i, exactly. So every
kernel, cache and remap runs as for text. A remap changes only the rotation by u, so it acts on
time; rows and columns keep their true offsets. It could not act on those: a remap shortens
distances along the text, and an image is no longer than those trained on. All tokens of an image
share one time, but a token attends only to those before it, so u grows by `TRACE` per token of an
image, and the first rotation cancels that growth.

Axial axes have no such order: q and k get their whole rotation here, and no other follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Pos, Weights, as_rows, as_tensor, by_rows
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.parts import Bidirectional, Causal, Rope
from longitude.parts.rope import Pairs, apply_rotary

TRACE = 2.0**-20  # images have far fewer than 2^20 tokens; float64 resolves it at any position
Heads = Tensor  # (b h n d)


def without_axes(scheme: Scheme) -> Scheme:
    """Return the scheme that remains to run on heads rotated here: one position per token."""
    rope = scheme.rotary
    assert rope is not None and rope.axes is not None
    return replace(scheme, rotary=replace(rope, axes=None) if rope.axes.temporal else None)


def one_position(
    scheme: Scheme, heads: tuple[Heads, Heads, Heads], q_pos: Any, k_pos: Any, weights: Weights,
    padding: Tensor | None,
) -> tuple[Scheme, Heads, Heads, Heads, Any, Any]:  # fmt: skip
    """Reduce a call of `rope(axes=…)` to one position per token: scheme, q, k, v, q_pos, k_pos."""
    (q, k, v), rope = heads, scheme.rotary
    assert rope is not None and rope.axes is not None
    if rope.axes.temporal and not any(map(has_axes, (q_pos, k_pos))):
        return without_axes(scheme), q, k, v, q_pos, k_pos
    q_at, q_order = split(rope, "q_pos", q_pos, q)
    k_at, k_order = (q_at, q_order) if k_pos is q_pos else split(rope, "k_pos", k_pos, k)
    if k_order is None:
        k_order = order(scheme, k_at, padding)
    n, unordered = q_at.shape[2], not rope.axes.temporal and scheme.mask == (Bidirectional(),)
    if q_order is None and unordered:
        q_order = range(n)
    elif q_order is None:  # queries are the last of the key tokens
        if q_at is not k_at and not bool((q_at == k_at[..., -n:]).all()):
            raise UserError(
                "q_pos is not the end of k_pos, so the order of tokens is ambiguous: pass the "
                "order as an additional first row of both."
            )
        q_order = k_order[-n:] if isinstance(k_order, range) else as_rows(k_order)[:, -n:]
    rope_weights = {name.removeprefix("rope."): w for name, w in weights.items()}
    inv = inv_freq(rope, q.shape[-1], rope_weights)
    if inv.shape[1] > k.shape[1]:  # each query head has its own frequencies
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q = rotate_left(rope, q, q_at, q_order, inv, gain=True)
    k = rotate_left(rope, k, k_at, k_order, inv)
    return without_axes(scheme), q, k, v, q_order, k_order


def has_axes(pos: Any) -> bool:
    """Whether positions come with one row per axis."""
    return isinstance(pos, Tensor) and pos.dim() == 3


def split(rope: Rope, name: str, pos: Any, x: Tensor) -> tuple[Tensor, Pos | None]:
    """Split positions into those on each axis (axes b|1 n) and the order of tokens, if given: an
    additional first row, or the single position that all axes share."""
    assert rope.axes is not None
    count, (batch, n) = rope.axes.count, (x.shape[0], x.shape[2])
    if not has_axes(pos):
        rows = pos if isinstance(pos, range | Tensor) else torch.empty(0)
        rows = as_rows(rows, x.device)
        if rows.shape[1:] != (n,):
            raise UserError(
                f"{name} must hold a position for each of {n} tokens, but got {shown(pos)}."
            )
        return rows.expand(count, -1, -1), pos
    if (
        pos.shape[0] not in (count, count + 1)
        or pos.shape[1] not in (1, batch)
        or pos.shape[2] != n
    ):
        raise UserError(
            f"{name} must hold {count} positions per token ({count}, batch, n), or their order and "
            f"these ({count + 1}, batch, n), for {rope.axes} and {batch} × {n} tokens, but got "
            f"{tuple(pos.shape)}."
        )
    if rope.frequencies.by_length or by_rows(rope.frequencies):
        raise UserError(
            f"{rope.frequencies} changes with the length of a text, but {name} holds several "
            f"positions per token: use fixed frequencies, such as yarn(…) or linear(…)."
        )
    pos = pos.to(x.device)
    return (pos, None) if pos.shape[0] == count else (pos[1:], pos[0])


def check(scheme: Scheme) -> None:
    """Raise for a scheme that is undefined for tokens with several positions."""
    rope, local = scheme.rotary, [m for m in scheme.mask if m not in (Causal(), Bidirectional())]
    by_length = rope and (rope.frequencies.by_length or by_rows(rope.frequencies) or rope.decay)
    by_length = by_length or (rope and by_rows(rope.remap))
    if by_length or local or scheme.bias or (scheme.scale and scheme.causal):
        raise UserError(
            f"images have several positions per token, but {shown(scheme)} supports only one: pass "
            f"text, or use rope(…) with fixed frequencies and a fixed remap."
        )


def order(
    scheme: Scheme, at: Tensor, padding: Tensor | None, last: Tensor | None = None, first: int = 0
) -> Pos:
    """Return one position per token: close to its time where axes have one, else its index."""
    rope = scheme.rotary
    check(scheme)
    if rope is not None and rope.axes is not None and not rope.axes.temporal:
        return range(first, first + at.shape[2])
    return temporal_order(at, padding, last)


def temporal_order(
    ids: Int[Tensor, "axes b n"], padding: Tensor | None = None, last: Tensor | None = None
) -> Float[Tensor, "b n"]:
    """Return u of each token: the largest time so far, plus `TRACE` per token since it was reached.

    `last` (b, 1) holds u of the last cached tokens."""
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


def inv_freq(rope: Rope, head_dim: int, weights: Weights) -> Float[Tensor, "axes _ pairs"]:
    """The angle of each pair per step along each axis."""
    assert rope.axes is not None
    return rope.axes.inv_freq(rope.frequencies, rope.dim(head_dim), rope.base, 1, weights)


def rotate_left(
    rope: Rope, x: Heads, at: Tensor, one: Pos, inv: Tensor | None = None, *,
    gain: bool = False, inverse: bool = False,
) -> Heads:  # fmt: skip
    """Rotate heads at positions (axes b|1 n) by the remainder that position `one` leaves, or back.
    With `gain`, queries carry the gain of their score if no other rotation follows."""
    assert rope.axes is not None
    inv = inv_freq(rope, x.shape[-1], {}) if inv is None else inv
    remainder = at.double() - as_tensor(one, at.device) if rope.axes.temporal else at.double()
    factor = rope.frequencies.gain(1) if gain and not rope.axes.temporal else 1.0
    return rotate(x, -remainder if inverse else remainder, inv, rope.pairs, factor)


def rotate(x: Heads, at: Tensor, inv: Tensor, pairs: Pairs, gain: float = 1.0) -> Heads:
    """Rotate x by Σ_a p_a f_a,i, with positions (axes b|1 n) and frequencies (axes h|1 pairs)."""
    angle = torch.einsum("abn,ahp->bhnp", at, inv.to(at.device, torch.float64))
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = ((t * gain).to(dtype) for t in (angle.cos(), angle.sin()))
    return apply_rotary(x, cos, sin, pairs)
