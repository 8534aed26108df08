"""PyTorch's fused kernels, by three ways that need no kernel of ours, and a few queries by ours.

One pass over a whole call is `scaled_dot_product_attention`. Regions over ranges of positions are
tiles of plain attention, merged exactly. What depends on more than positions (a bias, padding,
packed segments, positions in a tensor) goes in as a mask, in blocks of queries, and a single query
folds its regions into one turn of the keys. Memory is linear in the number of keys in each.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Term
from longitude.core.region import FAR, Area
from longitude.ops import decode as decoding
from longitude.ops.aten import operator_for
from longitude.ops.decode import DecodePlan, Run
from longitude.ops.inputs import AttentionInputs, contiguous, in_blocks
from longitude.ops.lse_merge import Box, Plan, merged
from longitude.ops.passes import Pass, fold, make_passes
from longitude.ops.rented import quickest_for
from longitude.ops.tiles import Tile, split, tiles
from longitude.parts.distance_bias import ByDistance

LARGEST = 2**23  # entries of one block's mask
ON_CUDA = 2**27  # and where memory is plenty but every call costs
FINEST = 256  # on CPU, triangles up to this size; the kernel there steps through 512 keys at a time


def refuses(p: AttentionInputs) -> str | None:
    """Why these kernels can't run the call, or None."""
    if p.softcap:
        return "soft-capping happens between the product and the softmax, inside the kernel"
    if p.value_parts():
        return "Shaw's value side needs the whole row of weights"
    if p.overflows:
        return "the decay over so many queries at once would overflow float32"
    if few(p) is not None:
        return None
    if by_mask(p):
        several = p.q.shape[2] > 1 and len(make_passes(p)) > 1
        wanted = "several regions need contiguous positions (ranges), no bias, padding or segments"
        return wanted if several else None
    return None if single(p) else _refuses_tiles(p)


def _refuses_tiles(p: AttentionInputs) -> str | None:
    if p.dropout:
        return "dropout can't be merged across passes"
    if operator_for(p.q) is None or p.v.shape[-1] != p.q.shape[-1]:
        return "no kernel gives a log-sum-exp for this device, type or head size"
    return None


def run(p: AttentionInputs) -> Tensor:
    """Attention by the way that fits the call."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    if (seen := few(p)) is not None:
        return decoding.run(p.scheme, p.q, p.k, p.v, seen, p.scale, p.sink_logits, p.key_padding)
    if by_mask(p):
        return in_blocks(p, _masked, ON_CUDA if p.q.is_cuda else LARGEST)
    return _whole(p) if single(p) else _tiled(p)


def few(p: AttentionInputs) -> DecodePlan | None:
    """What a few queries over contiguous positions see, where our own kernel runs them: keys then
    turn as they are read."""
    if p.q.shape[2] > decoding.MAX_QUERIES or not contiguous(p.q_pos, p.k_pos):
        return None
    if p.softcap or p.dropout or p.segments or not isinstance(p.k_length, int):
        return None
    if p not in _few:  # asked by who chooses, and by who runs
        lines = ((Run(0, p.k_pos[0], len(p.k_pos)),),)  # type: ignore[arg-type]
        at = (tuple(p.q_pos),)
        _few[p] = decoding.plan_for(p.scheme, p.q, p.k, p.v, p.k_length, lines, at)  # type: ignore[arg-type]
    return _few[p]


_few: WeakKeyDictionary[AttentionInputs, DecodePlan | None] = WeakKeyDictionary()


def by_mask(p: AttentionInputs) -> bool:
    """Whether visibility or scores depend on more than contiguous positions, and no kernel of ours
    knows of it."""
    return not (p.plain and contiguous(p.q_pos, p.k_pos)) and few(p) is None


def _passes(p: AttentionInputs) -> tuple[Pass, ...]:
    return (fold(p),) if p.q.shape[2] == 1 else make_passes(p)


def single(p: AttentionInputs) -> bool:
    """Whether one SDPA call does it: every pair visible, or all of it causal."""
    passes = 1 if p.q.shape[2] == 1 else len(make_passes(p))
    return passes == 1 and p.sink_logits is None and causal(p, p.scheme.areas()) is not None


def causal(p: AttentionInputs, areas: tuple[Area, ...]) -> bool | None:
    """True for causal, False for full, None for any other shape."""
    found = _tiles(p, areas)
    if len(found) != 1 or (found[0].height, found[0].width) != (p.q.shape[2], p.k.shape[2]):
        return None
    return {"full": False, "lower": True}.get(found[0].kind)


def _tiles(p: AttentionInputs, areas: tuple[Area, ...]) -> tuple[Tile, ...]:
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    return tiles(areas, p.q_pos, p.k_pos)


def _whole(p: AttentionInputs) -> Tensor:
    q, k = _passes(p)[0].turned()
    return _sdpa(q, k, p.v, None, p, causal=bool(causal(p, p.scheme.areas())))


def _tiled(p: AttentionInputs) -> Tensor:
    operator = quickest_for(p.q)
    assert operator is not None
    turned, boxes, passes = [], [], []
    for one in _passes(p):
        if not (found := _tiles(p, one.areas)):
            continue
        rows = _bounds([(t.top, t.height) for t in found])
        cols = _bounds([(t.left, t.width) for t in found])
        moved = [replace(t, top=t.top - rows.start, left=t.left - cols.start) for t in found]
        finest = FINEST if p.q.device.type == "cpu" else FAR
        passes.append([piece for t in moved for piece in split(t, finest)])
        turned.append(one.turned(rows, cols))
        boxes.append(Box(rows.start, cols.start))
    if not turned:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    plan = Plan.of(operator, p.scale, passes)
    return merged(plan, boxes, p.v, turned, p.q.shape[2], p.sink_logits)


def _bounds(spans: list[tuple[int, int]]) -> slice:
    return slice(min(a for a, _ in spans), max(a + n for a, n in spans))


def _masked(p: AttentionInputs) -> Tensor:
    """One pass with everything else in the mask."""
    b, _, i, j = p.grid()
    q, k = _passes(p)[0].turned()
    v, shape = p.v, (*q.shape[:3], k.shape[2])
    if p.scheme.bias:  # a mask has q's type, and a bias in bfloat16 is off by whole units far out
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    seen = p.visible(b, i, j)
    some = seen.any(-1, keepdim=True)
    mask = (seen | ~some).expand(
        shape
    )  # a query that sees nothing sees all, and is put to zero below
    terms = [_dense(term, p).to(q.dtype) for term in p.terms().values()]
    if terms or p.sink_logits is not None:
        bias = sum(terms, q.new_zeros(()))
        mask = bias.expand(shape).masked_fill(~mask, float("-inf"))
    if (
        p.sink_logits is not None
    ):  # a key of zeros whose bias is the sink's logit and whose value is 0
        sink = p.sink_logits.to(q.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        mask = torch.cat([mask, sink], -1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return (_sdpa(q, k, v, mask, p) * some).to(p.v.dtype)


def _dense(term: Term, p: AttentionInputs) -> Tensor:
    """A term of every pair; one of the distance alone is read off its table."""
    if isinstance(term, ByDistance) and contiguous(p.q_pos, p.k_pos):
        return term.dense(p.q.shape[1], p.q_pos, p.k_pos)[None]  # type: ignore[arg-type]
    return term(*p.grid())


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: AttentionInputs, causal: bool = False
) -> Tensor:
    """SDPA over grouped heads without repeating keys: a group is a batch, or rows of a single
    query."""
    b, h, n, _ = q.shape
    hkv = k.shape[1]
    if h != hkv:
        shape = (b, hkv, h // hkv) if n == 1 else (b * hkv, h // hkv, n)
        q = q.reshape(*shape, -1)
        mask = None if mask is None else mask.reshape(*shape, -1)
        if n > 1:
            k, v = (x.flatten(0, 1)[:, None].expand(-1, h // hkv, -1, -1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):  # it would round a wide bias to 8 bits
        out = sdpa(q, k, v, attn_mask=mask, dropout_p=p.dropout, is_causal=causal, scale=p.scale)
    return out.reshape(b, h, n, -1)
