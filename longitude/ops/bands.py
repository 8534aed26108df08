"""Bands of distances: the plan of a call as bands, and the values that the banded kernel takes.

score(i, j) = scale · q_i·k_j + table[h, i - j] for lo <= i - j < hi, with i and j indices; the
table is a bias of the distance alone, or none. A softmax over several bands is computed band by
band: the output and log-sum-exp of one band are what the next starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.region import FAR, Area
from longitude.ops.passes import accum_dtype
from longitude.ops.plan import (
    HALF,
    MAX_CUDNN_HEAD,
    Band,
    BandPiece,
    CallSpec,
    Chunk,
    Kernel,
    Merge,
    Plan,
    Step,
    TableSpan,
    fastest_kernel,
)
from longitude.parts.distance_bias import ByDistance, term_type
from longitude.parts.fire import Fire

MAX_HEAD = 256
MAX_WINDOW_HEAD = 192  # consumer GPUs (sm86, sm89) have no backward for larger ones
FAR_TILE_ROWS = 2048  # minimum for which a far tile, or a window's tiles, repay their own launch
FAR_TILE_SHARE = 8  # a biased far tile pays off if the rows hold this many near bands
REACH_QUERIES = 1024  # minimum for which computing a bias's reach pays off
SHARE_QUERIES, SHARE_ROWS = 1024, 128  # fewest queries for a table of shares; most rows of a block
SHARE_ERROR = 2**-8  # nats, at most: one step of a weight in bfloat16
CHUNK_ROWS = 128  # rows of a block of the banded kernel, which must lie in one chunk
MAX_CHUNKS = 2**20  # largest bound in chunks, which the kernel multiplies by their size
MOST_BANDS = 2  # in one launch: queries fit into shared memory beside tiles of keys and values
NEGLIGIBLE = 22.0  # nats: a weight below 2^-32 of its row's largest is ignored
Outs = Float[Tensor, "b h n dv"]
Sums = Float[Tensor, "b h n"]


def plan_banded(call: CallSpec) -> Plan | str:
    """Return a plan of bands, or the reason why they can't run the call."""
    if why := _no_bands(call):
        return why
    if not call.device.triton:
        return "it is a Triton kernel, for CUDA devices"
    if call.dtype not in (*HALF, torch.float32) or not call.positive_scale:
        return "it takes float16, bfloat16 and float32, and a scale above zero"
    if max(call.head_dim, call.value_dim) > MAX_HEAD:
        return f"it takes heads of up to {MAX_HEAD}"
    return plan_bands(call)


def _no_bands(call: CallSpec) -> str | None:
    """Return the reason why a call is not a set of bands of distances, or None."""
    by_share = len(call.scheme.bias) == 1 and isinstance(call.scheme.bias[0], Fire)
    if by_share and (call.gradients or call.queries < SHARE_QUERIES or call.dtype not in HALF):
        return f"FIRE's table is for {SHARE_QUERIES:,} queries in half precision, no gradients"
    if not by_share and any(term_type(part) is not ByDistance for part in call.scheme.bias):
        return "it needs biases that depend on the distance alone"
    if not call.contiguous or call.options & {"key_padding", "segments"}:
        return "it needs contiguous positions (ranges), without padding or segments"
    if call.options & {"softcap", "dropout"}:
        return "it has neither soft-capping nor dropout"
    if call.overflows:
        return "the decay over so many queries at once would overflow float32"
    areas = [area for of_pass in call.pass_areas for area in of_pass]
    if any((area.top, area.bottom) != (None, None) for area in areas):
        return "it does not support areas limited to a range of rows"
    chunks = [area.chunks for area in areas if area.chunks]
    if not chunks:
        return None
    assert call.q_pos is not None
    if call.scheme.bias or any(len(cs) > 1 for cs in chunks):
        return "it runs chunks of one size, and no bias with them"
    if any(c.size % CHUNK_ROWS or call.q_pos[0] % CHUNK_ROWS for cs in chunks for c in cs):
        return f"it runs chunks that are multiples of {CHUNK_ROWS} tokens"
    return "it has no backward for chunks" if call.gradients else None


def plan_bands(call: CallSpec, far_tile_rows: int = FAR_TILE_ROWS) -> Plan:
    """Plan a call as bands in one running softmax, its far pairs as one tile of a plain kernel
    where that is faster and the tile repays its own launch."""
    areas = [(n, area) for n, pass_areas in enumerate(call.pass_areas) for area in pass_areas]
    pieces = {
        area: piece for n, area in areas if (piece := _piece(call, n, area)) is not None
    }  # fmt: skip
    if call.scheme.bias:
        table = _table_span(call, list(pieces.values()))
        far = _far_biased(call, pieces, table)
    else:
        table, far = None, _far_plain(call, pieces, far_tile_rows)
    step, bands = far or (None, list(pieces.values()))
    bands = [piece._replace(backward=_window_backward(call, piece)) for piece in bands]
    if not bands:
        return Plan("banded", ())
    passes = tuple(dict.fromkeys(piece.pass_index for piece in bands))
    together = call.specialised and 1 < len(bands) <= MOST_BANDS and table is None
    kernel = Kernel.BANDS_TOGETHER if together else Kernel.BANDED
    forward = _forward(call, step, far_tile_rows) if step and table is None else ()
    banded = Step(kernel, passes, bands=tuple(bands), forward=forward, table=table)
    return Plan("banded", (banded,) if step is None else (step, banded), Merge.RUNNING_SOFTMAX)


def _forward(call: CallSpec, far: Step, far_tile_rows: int) -> tuple[BandPiece, ...]:
    """Return the bands that one launch can run forward although the backward has a far tile: none
    if the tile's kernel needs more than output and log-sum-exp, or other rows and columns."""
    if not call.gradients or far.kernel is not Kernel.CUDNN:
        return ()
    last = plan_bands(call._replace(gradients=False), far_tile_rows).steps[-1]
    (t,), cuts = far.tiles, [(x.top, x.columns) for x in last.bands]
    same_tile = (t.top, (t.left, t.left + t.width)) in cuts
    return last.bands if same_tile and last.kernel is Kernel.BANDS_TOGETHER else ()


def _piece(call: CallSpec, n: int, area: Area) -> BandPiece | None:
    """Convert an area to a band of indices over a slice of columns, or None if it is empty."""
    q, k = call.q_pos, call.k_pos
    assert q is not None and k is not None
    begin = max(0, (area.first if area.first is not None else -FAR) - k[0])
    end = min(len(k), (area.last if area.last is not None else FAR) - k[0])
    shift = begin + k[0] - q[0]
    lo, hi = -FAR if area.lo is None else area.lo, FAR if area.hi is None else area.hi
    band = Band(lo + shift, hi + shift).within(len(q), max(end - begin, 0))
    if begin >= end or band.lo >= band.hi:
        return None
    chunk, top, end = None, max(0, band.lo), min(end, begin + len(q) - band.lo)
    if area.chunks:
        (chunks,) = area.chunks
        lo = -MAX_CHUNKS if chunks.lo is None else max(chunks.lo, -MAX_CHUNKS)
        hi = MAX_CHUNKS if chunks.hi is None else min(chunks.hi, MAX_CHUNKS)
        chunk = Chunk(chunks.size, lo, hi, q[0], k[0] + begin)
        top = max(top, (lo + chunk.column // chunks.size) * chunks.size - chunk.row)
    return BandPiece(n, (begin, end), band, chunk, min(top, len(q) - 1))


def _table_span(call: CallSpec, pieces: list[BandPiece]) -> TableSpan:
    """Return the span of the bias table in distances of indices, which are those of positions less
    the distance of the first query to the first key."""
    assert call.q_pos is not None and call.k_pos is not None
    n, away = call.queries, call.q_pos[0] - call.k_pos[0]
    least = min((x.band.lo - x.columns[0] for x in pieces), default=0)
    ends = [part.flat_beyond for part in call.scheme.bias]
    end = n if None in ends else max([least, *(e - away for e in ends if e is not None)])
    flat = end < n - 1
    slow = all(getattr(part, "falls_slowly", False) for part in call.scheme.bias)
    reached = not (flat or slow) and n >= REACH_QUERIES
    return TableSpan(least, end if flat else n - 1, flat, reached)


Far = tuple[Step, list[BandPiece]]  # the far tile, and the remaining bands


def _far_plain(call: CallSpec, pieces: dict[Area, BandPiece], least: int) -> Far | None:
    """Split off the far tile of a call without a bias, whose areas are independent: the largest."""
    if call.specialised:  # no kernel is faster
        return None
    steps = {a: _far_step(call, one.pass_index, (_far_near(a)[0],)) for a, one in pieces.items()}
    sizes = {area: step.tiles[0] for area, step in steps.items() if step is not None}
    area = max(sizes, key=lambda one: sizes[one].height * sizes[one].width, default=None)
    if area is None or len(pieces) == 1 or min(sizes[area].height, sizes[area].width) < least:
        return None
    rest, others = _far_near(area)[1], [piece for a, piece in pieces.items() if a is not area]
    near = rest and _piece(call, pieces[area].pass_index, rest)
    return steps[area], [near, *others] if near else others  # type: ignore[return-value]


def _far_near(area: Area) -> tuple[Area, Area | None]:
    """Split an area into the part that one tile covers and the remainder. An area that starts `lo`
    chunks away contains every pair at least lo * size apart."""
    chunk = area.chunks[0] if area.chunks else None
    if chunk is None or chunk.lo is None or chunk.hi is not None:
        return area, None
    away = chunk.lo * chunk.size
    return replace(area, chunks=()) & Area(lo=away), area & Area(hi=away)


def _far_biased(call: CallSpec, pieces: dict[Area, BandPiece], table: TableSpan) -> Far | None:
    """Split off the tile beyond the distance where the bias becomes constant: there it adds one
    number per head, which is a shift of the log-sum-exp."""
    assert call.q_pos is not None and call.k_pos is not None
    if not table.flat or len(pieces) != 1 or len(call.pass_areas) != 1:
        return None
    (near,) = pieces.values()
    if near.band.hi != call.queries or call.queries < FAR_TILE_SHARE * table.last:
        return None
    beyond = Area(lo=table.last + call.q_pos[0] - call.k_pos[0])
    step = _far_step(call, 0, tuple(area & beyond for area in call.pass_areas[0]))
    band = Band(near.band.lo, table.last).within(call.queries, call.keys)
    return step and (step, [BandPiece(0, (0, call.keys), band)])


def far_tiles(call: CallSpec) -> list[Step]:
    """Return tiles of plain kernels for distances from which on a bias is a number per query plus a
    vector that all queries of a head share (Shaw, DeBERTa, a clamped Transformer-XL)."""
    (area, *others), bias = call.scheme.areas(), call.scheme.bias
    flat = bias[0].flat_beyond if len(bias) == 1 else None
    if flat is None or not hasattr(term_type(bias[0]), "far") or call.scheme.rotary is not None:
        return []
    if others or area != Area(area.lo) or call.gradients or not call.contiguous:
        return []
    if call.options - {"sink_logits"} or call.queries < FAR_TILE_ROWS + FAR_TILE_SHARE * flat:
        return []
    plain = call._replace(scheme=replace(call.scheme, bias=()))
    if fastest_kernel(plain, 0) is None or call.value_dim != call.head_dim:
        return []
    sides = [Area(lo=flat)] if area.lo is not None else [Area(lo=flat), Area(hi=1 - flat)]
    tiles = [tile for side in sides for tile in plain.tiles((area & side,))]
    return [Step(kernel, (0,), (t,)) for t in tiles if (kernel := fastest_kernel(plain, t.pairs))]


def _far_step(call: CallSpec, pass_index: int, areas: tuple[Area, ...]) -> Step | None:
    """Return areas as one tile that reaches the last row, run by a plain kernel that is faster
    there than the banded kernel (FlashAttention 2 on Hopper is not), or None."""
    tiles = call.tiles(areas)
    if len(tiles) != 1 or tiles[0].kind == "upper" or call.value_dim != call.head_dim:
        return None
    kernel = fastest_kernel(call, tiles[0].pairs)
    slower = kernel is Kernel.FLASH and call.device.cudnn and call.head_dim <= MAX_CUDNN_HEAD
    if kernel is None or slower or tiles[0].top + tiles[0].height != call.queries:
        return None
    return Step(kernel, (pass_index,), tiles)


def _window_backward(call: CallSpec, piece: BandPiece) -> Kernel:
    """Return the fastest kernel for a band's gradients: for a causal window without a bias it is
    FlashAttention 2 or, if the window divides the rows into blocks, causal tiles of cuDNN's."""
    hi, n, d = piece.band.hi, call.queries, call.head_dim
    square = piece.band.lo == 0 and piece.columns[1] - piece.columns[0] == n
    fits = d == call.value_dim <= MAX_WINDOW_HEAD and d % 8 == 0 and call.dtype in HALF
    if call.scheme.bias or piece.chunk or not (square and fits and call.device.type == "cuda"):
        return Kernel.BANDED
    blocks = FAR_TILE_ROWS <= hi < n and n % hi == 0
    return (blocks and fastest_kernel(call._replace(gradients=True), n * hi)) or Kernel.FLASH


class Shares(NamedTuple):
    """Row i at distance r reads the entry nearest to log2(1 + c r) pace[i]. If the pace falls by a
    fraction, the bias changes by at most that fraction of a head's `steepest`."""

    pace: Float[Tensor, " n"]
    c: Float[Tensor, ""]
    steepest: Float[Tensor, " h"]


class Bias(NamedTuple):
    """table[h, r - first] at distance r; the last entry applies to all larger distances. `ahead`
    holds the largest entry from each one on, if known. With `shares` the index is a share."""

    table: Tensor
    first: int
    ahead: Tensor | None = None
    shares: Shares | None = None

    @property
    def flat(self) -> int:
        """The distance of the last entry."""
        return self.first + self.table.shape[1] - 1


class Start(NamedTuple):
    """The running softmax of the rows from `top` on: its output and log-sum-exp."""

    out: Tensor
    lse: Tensor
    top: int = 0


class BandCall(NamedTuple):
    """One band of a softmax: its tensors, the distance that bounds the weights of each head of each
    sequence (`reach`), and the chunks that its pairs are restricted to."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None
    band: Band
    scale: float
    reach: Tensor | None = None
    chunk: Chunk | None = None


class BandGradients(NamedTuple):
    """Gradients of q, k, v and, where needed, of the bias table, without its last entry where the
    band extends beyond the table."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None


class BandKernels(NamedTuple):
    """forward(call, start) returns the output and log-sum-exp, possibly written over the start's;
    backward(call, grad, out, lse, table, wide) the gradients, with the table's if `table`, in
    float32 if `wide`; together(pairs, pieces, v, scale, rows, out) is the forward of all bands."""

    forward: Callable[[BandCall, Start | None], tuple[Tensor, Tensor]]
    backward: Callable[[BandCall, Tensor, Tensor, Tensor, bool, bool], BandGradients]
    together: Callable[..., tuple[Tensor, Tensor]] | None = None


def reach_of(call: BandCall) -> Int[Tensor, "b h"] | None:
    """Return for each head the distance from which on weights are negligible, or None if unknown.

    A score is at most |q||k| scale plus the largest bias at its distance or beyond. The largest
    score of a row is at least -|q||k| scale plus the bias of its nearest key, which every row sees.
    If the first is `NEGLIGIBLE` below the second, the weight is below 2^-32 of the largest.
    """
    q, k, _, bias, band, scale, *_ = call
    assert bias is not None
    if band.lo > 0 or q.shape[2] - band.lo > k.shape[2]:  # some row lacks its nearest key
        return None
    dtype = accum_dtype(q)
    q_norm, k_norm = (torch.linalg.vector_norm(x, dim=-1, dtype=dtype).amax(-1) for x in (q, k))
    by_group = q_norm.unflatten(1, (k.shape[1], -1)) * k_norm[..., None]  # (b hkv group)
    largest = by_group.flatten(1) * abs(scale)
    ahead = largest_ahead(bias.table) if bias.ahead is None else bias.ahead
    nearest = max(band.lo - bias.first, 0)
    threshold = bias.table[:, nearest, None] - 2 * largest[..., None] - NEGLIGIBLE  # (b h 1)
    significant = ahead >= threshold
    reach = significant.sum(-1, dtype=torch.int32) + bias.first
    return torch.where(significant[..., -1], 2**30, reach).to(torch.int32)


def largest_ahead(table: Tensor) -> Tensor:
    """Return for each distance the largest entry from there on."""
    return table.detach().flip(1).cummax(1).values.flip(1)
