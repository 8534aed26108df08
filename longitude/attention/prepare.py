"""From a user's arguments to a checked problem: sizes, positions, weights, each with its
sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from longitude.attention.count import lengths, rides, scaled
from longitude.attention.problem import Problem, weights_of
from longitude.part import Dims, Learned, Mistake, Pos, Weights
from longitude.scheme import Scheme


def prepare(
    scheme: Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Pos,
    k_pos: Pos,
    weights: Weights | None,
    *,
    scale: float | None,
    segments: Tensor | tuple[Tensor, Tensor] | None,
    length: int | Sequence[int] | Tensor | None,
    **rest: object,
) -> Problem:
    """Check the inputs and multiply the scale of ④ into q, or leave it to what turns q."""
    _check_sizes(q, k, v)
    q_pos = _positions("q_pos", q_pos, q)
    k_pos = _positions("k_pos", k_pos, k)
    scale = scheme.softmax_scale(q.shape[-1]) if scale is None else scale
    pair = (segments, segments) if isinstance(segments, Tensor) else segments
    p = Problem(scheme, q, k, v, q_pos, k_pos, weights or {}, scale, segments=pair, **rest)  # type: ignore[arg-type]
    _check_hidden(p)
    _check_weights(p)
    if scheme.scale:
        p = replace(p, rides=True) if rides(p) else replace(p, q=scaled(p))
    if scheme.rotary and scheme.rotary.frequencies.by_length:
        p = replace(p, **lengths(p, length))
    return p


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise Mistake(f"{name} must be (batch, heads, tokens, size), but got {tuple(x.shape)}.")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise Mistake(
            f"q, k and v do not fit together, but got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}: give q (b h n d), k and v (b hkv m d)."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise Mistake(
            f"{q.shape[1]} query heads can't share {k.shape[1]} key heads evenly: "
            f"the first must be a multiple of the second."
        )


def _positions(name: str, pos: Pos, x: Tensor) -> Pos:
    if isinstance(pos, range):
        if len(pos) != x.shape[2]:
            raise Mistake(f"{name} holds {len(pos)} positions, but there are {x.shape[2]} tokens.")
        return pos
    rows = torch.atleast_2d(pos).to(x.device)
    if rows.dim() != 2 or rows.shape[1] != x.shape[2] or rows.shape[0] not in (1, x.shape[0]):
        raise Mistake(
            f"{name} must be a range, (n) or (batch, n), but got {tuple(pos.shape)} for "
            f"{x.shape[0]} × {x.shape[2]} tokens."
        )
    return rows


def _check_hidden(p: Problem) -> None:
    batch, _, nq, _ = p.q.shape
    nk = p.k.shape[2]
    if p.key_padding is not None and p.key_padding.shape != (batch, nk):
        raise Mistake(
            f"key_padding must be (batch, keys) = ({batch}, {nk}), but got "
            f"{tuple(p.key_padding.shape)}: True where a key is padding."
        )
    if p.segments and (p.segments[0].shape, p.segments[1].shape) != ((batch, nq), (batch, nk)):
        raise Mistake(
            f"segments must be one id a token, ({batch}, {nq}) for queries and ({batch}, {nk}) for "
            f"keys, but got {tuple(p.segments[0].shape)} and {tuple(p.segments[1].shape)}: "
            f"give a pair where they differ."
        )
    if p.sink_logits is not None and p.sink_logits.shape != (p.q.shape[1],):
        raise Mistake(
            f"sink_logits must be one number a head, ({p.q.shape[1]},), but got "
            f"{tuple(p.sink_logits.shape)}."
        )


@lru_cache(maxsize=1024)
def _learned(part: Learned) -> frozenset[str]:
    """The names of a part's weights."""
    return frozenset(part.init(Dims(1, 1, 1), None))


def _check_weights(p: Problem) -> None:
    for part in (*p.scheme.bias, *p.scheme.scale):
        if missing := sorted(_learned(part) - set(weights_of(part.name, p.weights))):
            names = ", ".join(f"{part.name}.{m}" for m in missing)
            raise Mistake(
                f"{part} is learned, but weights lack {names}: pass "
                f"weights=scheme.init(Dims(…)) or a "
                f"checkpoint's own."
            )
