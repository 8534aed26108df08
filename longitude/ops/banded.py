"""Bands of distances by a kernel that knows them: windows, remaps, and the biases of the distance
alone (T5, ALiBi, KERPLE, Sandwich).

The biases of a call are one table, a row a head, an entry a distance. Every area of every pass is a
band of pairs, and a band after the other goes into one softmax, each starting from what stands so
far (`band.Start`), so nothing has to be merged. What a remap or a bias that has gone flat leaves
far away is one tile of the fastest plain kernel, which comes first: beyond `flat_beyond` a bias
adds one number a head, which is a shift of the log-sum-exp. Only a narrow band is left for ours.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from longitude.core.part import Dims, HasWeights
from longitude.core.region import FAR, Area
from longitude.core.scheme import Scheme
from longitude.ops import swa_cudnn as paved
from longitude.ops import swa_flash as windowed
from longitude.ops.aten import CUDNN, Operator, cudnn_for, operator_for
from longitude.ops.band import TWIN, Band, Bias, Chunk, Gradients, Part, Way
from longitude.ops.band_table import table_of
from longitude.ops.banded_autograd import Banded, Far, Piece, Plan, chained, turning
from longitude.ops.inputs import AttentionInputs, contiguous
from longitude.ops.kernels.launch import usable
from longitude.ops.passes import make_passes, region_areas
from longitude.ops.rented import BANDS, BIASED, Rent, operations
from longitude.ops.tiles import Tile, tiles
from longitude.parts.distance_bias import ByDistance

LARGEST_HEAD = 256
LONG = 1024  # from so many queries on it pays to ask how far a bias lets them reach
WORTH = 8  # a far band pays for its own launch where this many near ones fit into the rows
CHUNKS = 128  # rows of a block, which must lie in one chunk
RENT, RENT_BIASED = Rent.of(BANDS), Rent.of(BIASED)
TRAINED = 5  # a call whose gradients are wanted saves about so many times as much
LARGE = paved.LEAST  # rows from which on a far tile pays for its own launch, too


def refuses(p: AttentionInputs) -> str | None:
    """Why the banded kernel can't run the call, or None."""
    if not all(map(by_distance, p.scheme.bias)):
        return "its table is of distances, and needs biases of the distance alone"
    if not contiguous(p.q_pos, p.k_pos) or p.hides:
        return "it reads pairs off contiguous positions (ranges), with no padding or segments"
    if p.softcap or p.dropout:
        return "it has neither soft-capping nor dropout"
    if p.overflows:
        return "the decay over so many queries at once would overflow float32"
    if any((area.top, area.bottom) != (None, None) for area in _areas(p)):
        return "it runs bands of distances, and not of rows"
    if why := _refuses_chunks(p):
        return why
    return _refuses_tensors(p)


def _refuses_chunks(p: AttentionInputs) -> str | None:
    """Blocks of rows must lie in one chunk each, and gradients know of none."""
    found = [area.chunks for area in _areas(p) if area.chunks]
    if not found:
        return None
    assert isinstance(p.q_pos, range)
    if p.scheme.bias or any(len(chunks) > 1 for chunks in found):
        return "it runs chunks of one size, and no bias with them"
    if any(c.size % CHUNKS or p.q_pos[0] % CHUNKS for chunks in found for c in chunks):
        return f"it runs chunks that are multiples of {CHUNKS} tokens"
    given = (p.q, p.k, p.v, p.sink_logits)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return "it has no gradients of chunks"
    return None


def _refuses_tensors(p: AttentionInputs) -> str | None:
    if not usable(p.q):
        return "it is a Triton kernel, for CUDA devices"
    if p.q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or p.scale <= 0:
        return "it takes float16, bfloat16 and float32, and a scale above zero"
    if max(p.q.shape[-1], p.v.shape[-1]) > LARGEST_HEAD:
        return f"it takes heads of up to {LARGEST_HEAD}"
    return None


def _areas(p: AttentionInputs) -> tuple[Area, ...]:
    return tuple(area for one in make_passes(p) for area in one.areas)


@lru_cache(maxsize=1024)
def by_distance(part: HasWeights) -> bool:
    """Whether a bias is a function of the head and the distance: asked of it at its smallest."""
    dims, one = Dims(16, 2, 8), torch.zeros(1, 2, 1, 8)
    pos = torch.zeros(1, 1, dtype=torch.int64)
    weights = part.init(dims, torch.Generator().manual_seed(0))
    return isinstance(part.term(one, one, pos, pos, weights, 1.0), ByDistance)  # type: ignore[attr-defined]


def run(p: AttentionInputs, way: Way | None = None) -> Tensor:
    """Attention, band after band: by the kernels, or by the way that is given."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    plan = plan_of(p)
    return run_plan(p, plan.bands if plan.bands and _unpaid(p, plan) else plan, way)


def _unpaid(p: AttentionInputs, plan: Plan) -> bool:
    """Whether the far tile's kernel would have to plan, which its shape has not paid for: our own
    runs it until then."""
    if plan.far is None or plan.far.operator is not CUDNN:
        return False
    tile, q = plan.far.tile, p.q[:, :, plan.far.rows]
    shape = (tuple(q.shape), p.k.shape[1], tile.width, tile.kind)
    rent = RENT_BIASED if p.scheme.bias else RENT
    share = TRAINED if torch.is_grad_enabled() and q.requires_grad else 1
    return rent.due(q, shape, share * operations(q, tile.width, plan.far.causal))


def run_plan(p: AttentionInputs, plan: Plan, way: Way | None = None) -> Tensor:
    """The same under a plan: a benchmark compares several."""
    if not plan.pieces:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    way, bias = way or _way(p.q), bias_of(p, plan)
    turns = tuple(one.turn() for one in make_passes(p))
    given = (p.q, p.k, p.v, p.sink_logits, None if bias is None else bias.table)
    if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)):
        turned = turning(plan, p.q, p.k, turns)
        return chained(way, plan, turned, p.v, bias, p.sink_logits).out
    table, _, ahead = bias or (None, 0, None)
    return Banded.apply(  # type: ignore[no-any-return]
        (way, plan, turns), p.q, p.k, p.v, table, ahead, p.sink_logits
    )


def _way(q: Tensor) -> Way:
    if not usable(q):
        return TWIN
    from longitude.ops.kernels.banded_backward import WAY  # late: it imports Triton

    return Way(WAY.forward, _backward)


def _backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor, table: bool,
              wide: bool) -> Gradients:  # fmt: skip
    """A band's gradients by the quickest kernels; but for our own they are in the type of its
    tensors, wide or not."""
    from longitude.ops.kernels.banded_backward import backward

    if paved.takes(part) and not paved.due(part):
        return paved.backward(part, grad, out, lse)
    if windowed.takes(part):
        return windowed.backward(part, grad, out, lse)
    return backward(part, grad, out, lse, table, wide)


def plan_of(p: AttentionInputs) -> Plan:
    """The pieces of a call; what is far apart as one tile, where it is worth its launch."""
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    operator = cudnn_for(p.q) or operator_for(p.q)
    plain = operator if p.v.shape[-1] == p.q.shape[-1] else None
    return (_biased if p.scheme.bias else _plain)(p.scheme, p.q_pos, p.k_pos, p.scale, plain)


@lru_cache(maxsize=256)
def _plain(scheme: Scheme, q: range, k: range, scale: float, operator: Operator | None) -> Plan:
    """Without a bias every area stands for itself, and the largest may be the far one."""
    found = [
        (piece, _tile((area,), q, k))
        for turn, (_, areas) in enumerate(region_areas(scheme, None))
        for area in areas
        if (piece := _piece(turn, area, q, k)) is not None
    ]
    tiled = [(piece, tile) for piece, tile in found if tile is not None]
    piece, tile = max(tiled, key=lambda x: x[1].height * x[1].width, default=(None, None))
    pieces = tuple(x for x, _ in found)
    bands = Plan(scale, pieces)
    if piece is None or tile is None or operator is None or len(pieces) == 1:
        return bands
    if min(tile.height, tile.width) < LARGE:
        return bands
    rest = tuple(x for x in pieces if x is not piece)
    return replace(bands, pieces=rest, far=Far(piece.turn, tile, operator), bands=bands)


@lru_cache(maxsize=256)
def _biased(scheme: Scheme, q: range, k: range, scale: float, operator: Operator | None) -> Plan:
    """The table counts distances by indices: those of positions less the first query's distance to
    the first key."""
    n, m, away = len(q), len(k), q[0] - k[0]
    passes = region_areas(scheme, None)
    pieces = [
        piece
        for turn, (_, areas) in enumerate(passes)
        for area in areas
        if (piece := _piece(turn, area, q, k)) is not None
    ]
    least = min((x.band.lo - x.columns[0] for x in pieces), default=0)
    ends = [part.flat_beyond for part in scheme.bias]
    flat = n if None in ends else max([least, *(e - away for e in ends if e is not None)])
    plan = Plan(scale, tuple(pieces), least, flat < n - 1, reached=flat >= n - 1 and n >= LONG)
    alone = len(pieces) == 1 and pieces[0].band.hi == n and len(passes) == 1
    if operator is None or not plan.flat or not alone or n < WORTH * flat:
        return plan
    beyond = Area(lo=flat + away)
    tile = _tile(tuple(area & beyond for area in passes[0][1]), q, k)
    if tile is None:
        return plan
    near = Band(pieces[0].band.lo, flat).within(n, m)
    far = Far(0, tile, operator)
    return replace(plan, pieces=(Piece(0, (0, m), near),), far=far, bands=plan)


def _tile(areas: tuple[Area, ...], q: range, k: range) -> Tile | None:
    """Areas as one tile of a plain kernel that reaches the last row, where they are one."""
    found = tiles(areas, q, k)
    if len(found) != 1 or found[0].kind == "upper" or found[0].top + found[0].height != len(q):
        return None
    return found[0]


def _piece(turn: int, area: Area, q: range, k: range) -> Piece | None:
    """An area as a band of indices over some columns, or None where it is empty."""
    begin = max(0, (area.first if area.first is not None else -FAR) - k[0])
    end = min(len(k), (area.last if area.last is not None else FAR) - k[0])
    shift = begin + k[0] - q[0]
    lo, hi = -FAR if area.lo is None else area.lo, FAR if area.hi is None else area.hi
    band = Band(lo + shift, hi + shift).within(len(q), max(end - begin, 0))
    if begin >= end or band.lo >= band.hi:
        return None
    return Piece(turn, (begin, end), band, _chunk(area, q[0], k[0] + begin))


def _chunk(area: Area, row: int, column: int) -> Chunk | None:
    if not area.chunks:
        return None
    (one,) = area.chunks
    lo, hi = -FAR if one.lo is None else one.lo, FAR if one.hi is None else one.hi
    most = 2**20  # chunks: bounds that a kernel can multiply
    return Chunk(one.size, max(lo, -most), min(hi, most), row, column)


def bias_of(p: AttentionInputs, plan: Plan) -> Bias | None:
    """The table from the plan's first distance on, to where it goes flat or the rows end."""
    if not p.scheme.bias:
        return None
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    away, last = p.q_pos[0] - p.k_pos[0], p.q.shape[2] - 1
    if plan.flat:
        last = max(plan.first, *((part.flat_beyond or 0) - away for part in p.scheme.bias))
    table, ahead = table_of(p, plan.first + away, last + away, plan.reached)
    return Bias(table, plan.first, ahead)
