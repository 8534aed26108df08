"""Biases of the distance alone in a kernel that knows them: T5, ALiBi, KERPLE, Sandwich.

The biases of a call are one table, a row a head, an entry a distance. Every area of every pass is a
band of pairs, and a band after the other goes into one softmax, each starting from what stands so
far (`band.Start`). A bias that goes flat leaves most of a causal call to the fastest plain kernel:
beyond `flat_beyond` it adds one number a head, which is a shift of the log-sum-exp, and only a
narrow band is left for the kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from longitude.attention.band import TWIN, Band, Bias, Way
from longitude.attention.band_table import table_of
from longitude.attention.chain import Banded, Far, Piece, Plan
from longitude.attention.cudnn import cudnn_for
from longitude.attention.lower import lower
from longitude.attention.operators import operator_for
from longitude.attention.problem import Problem, contiguous
from longitude.attention.tiles import tiles
from longitude.attention.triton.available import usable
from longitude.part import Dims, Learned
from longitude.parts.bias.distance import ByDistance
from longitude.region import FAR, Area

LARGEST_HEAD = 256
LONG = 1024  # from so many queries on it pays to ask how far a bias lets them reach
WORTH = 8  # a far band pays for its own launch where this many near ones fit into the rows


def refuses(p: Problem) -> str | None:
    """Why the banded kernel can't run the call, or None."""
    if not p.scheme.bias or not all(map(by_distance, p.scheme.bias)):
        return "its table is of distances, and needs biases of the distance alone"
    if not contiguous(p.q_pos, p.k_pos) or p.hides:
        return "it reads pairs off contiguous positions (ranges), with no padding or segments"
    if p.softcap or p.dropout:
        return "it has neither soft-capping nor dropout"
    if p.overflows:
        return "the decay over so many queries at once would overflow float32"
    if any(area.chunks or (area.top, area.bottom) != (None, None) for area in _areas(p)):
        return "it runs bands of distances, and not chunks or bands of rows"
    return _refuses_tensors(p)


def _refuses_tensors(p: Problem) -> str | None:
    if not usable(p.q):
        return "it is a Triton kernel, for CUDA devices"
    if p.q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or p.scale <= 0:
        return "it takes float16, bfloat16 and float32, and a scale above zero"
    if max(p.q.shape[-1], p.v.shape[-1]) > LARGEST_HEAD:
        return f"it takes heads of up to {LARGEST_HEAD}"
    return None


def _areas(p: Problem) -> tuple[Area, ...]:
    return tuple(area for one in lower(p) for area in one.areas)


@lru_cache(maxsize=1024)
def by_distance(part: Learned) -> bool:
    """Whether a bias is a function of the head and the distance: asked of it at its smallest."""
    dims, one = Dims(16, 2, 8), torch.zeros(1, 2, 1, 8)
    pos = torch.zeros(1, 1, dtype=torch.int64)
    weights = part.init(dims, torch.Generator().manual_seed(0))
    return isinstance(part.term(one, one, pos, pos, weights, 1.0), ByDistance)  # type: ignore[attr-defined]


def run(p: Problem, way: Way | None = None) -> Tensor:
    """Attention, band after band: by the kernels, or by the way that is given."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    return run_plan(p, plan_of(p), way)


def run_plan(p: Problem, plan: Plan, way: Way | None = None) -> Tensor:
    """The same under a plan: a benchmark compares several."""
    if not plan.pieces:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    turned = [x for one in lower(p) for x in one.turned()]
    table, _, ahead = bias_of(p, plan)
    way = way or _way(p.q)
    return Banded.apply(way, plan, p.v, table, ahead, p.sink_logits, *turned)  # type: ignore[no-any-return]


def _way(q: Tensor) -> Way:
    if not usable(q):
        return TWIN
    from longitude.attention.triton.banded_backward import WAY  # late: it imports Triton

    return WAY


def plan_of(p: Problem) -> Plan:
    """The pieces of a call; the far part of a flat bias apart where it is worth its launch.

    The table counts distances by indices: those of positions less the first query's distance to
    the first key.
    """
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    n, m, away = p.q.shape[2], p.k.shape[2], p.q_pos[0] - p.k_pos[0]
    pieces = [
        piece
        for turn, one in enumerate(lower(p))
        for area in one.areas
        if (piece := _piece(turn, area, p.q_pos, p.k_pos)) is not None
    ]
    least = min((x.band.lo - x.columns[0] for x in pieces), default=0)
    ends = [part.flat_beyond for part in p.scheme.bias]
    flat = n if None in ends else max([least, *(e - away for e in ends if e is not None)])
    plan = Plan(p.scale, tuple(pieces), least, flat < n - 1, reached=flat >= n - 1 and n >= LONG)
    far = _far(p, plan, flat) if plan.flat else None
    if far is None:
        return plan
    near = Band(pieces[0].band.lo, flat).within(n, m)
    return replace(plan, pieces=(Piece(0, (0, m), near),), far=far)


def _piece(turn: int, area: Area, q: range, k: range) -> Piece | None:
    """An area as a band of indices over some columns, or None where it is empty."""
    begin = max(0, (area.first if area.first is not None else -FAR) - k[0])
    end = min(len(k), (area.last if area.last is not None else FAR) - k[0])
    shift = begin + k[0] - q[0]
    lo, hi = -FAR if area.lo is None else area.lo, FAR if area.hi is None else area.hi
    band = Band(lo + shift, hi + shift).within(len(q), max(end - begin, 0))
    return Piece(turn, (begin, end), band) if begin < end and band.lo < band.hi else None


def _far(p: Problem, plan: Plan, flat: int) -> Far | None:
    """The tile beyond a flat bias's end, where it is one, reaches the last row and is large."""
    n = p.q.shape[2]
    operator = cudnn_for(p.q) if p.q.is_cuda else operator_for(p.q)
    alone = len(plan.pieces) == 1 and plan.pieces[0].band.hi == n and len(lower(p)) == 1
    if operator is None or not alone or p.v.shape[-1] != p.q.shape[-1] or n < WORTH * flat:
        return None
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    beyond = Area(lo=flat + p.q_pos[0] - p.k_pos[0])
    found = tiles(tuple(area & beyond for area in _areas(p)), p.q_pos, p.k_pos)
    if len(found) != 1 or found[0].kind == "upper" or found[0].top + found[0].height != n:
        return None
    return Far(found[0], operator)


def bias_of(p: Problem, plan: Plan) -> Bias:
    """The table from the plan's first distance on, to where it goes flat or the rows end."""
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    away, last = p.q_pos[0] - p.k_pos[0], p.q.shape[2] - 1
    if plan.flat:
        last = max(plan.first, *((part.flat_beyond or 0) - away for part in p.scheme.bias))
    table, ahead = table_of(p, plan.first + away, last + away, plan.reached)
    return Bias(table, plan.first, ahead)
