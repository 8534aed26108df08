"""From a scheme to passes and tiles: which rotations of q and k a call needs, and where each holds.

A pass is ordinary attention over one rotation of q and k, restricted to some areas; the passes of a
call are disjoint. Rotating waits until a kernel asks for the rows and columns it will use. A single
query needs one pass: q stays pre-RoPE and key j is rotated to minus the distance that its region
gives the pair, so q·k sees that distance whatever the region (`single_query_pass`).

Over ranges of positions an area is a set of tiles that plain kernels run: rectangles, lower
triangles (causal attention) and upper ones (causal attention with rows and columns reversed). A
band of width w becomes blocks of w rows, each with a lower triangle on its diagonal and an upper
one before it: no kernel needs a window argument. For a kernel that has one, a band is one tile. A
CPU's kernel computes every pair of triangles of up to 512 rows: there a band is blocks of few rows,
each a rectangle under a mask, and a triangle is small ones on its diagonal and squares below them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from longitude.core.part import Pos, QueryRows, Region, as_rows
from longitude.core.region import FAR, Area, meet, visible
from longitude.core.scheme import Scheme
from longitude.ops.inputs import AttentionInputs, Length, cut_tokens, scale_factors
from longitude.ops.kernels.launch import shape, triton_available
from longitude.parts.rope import Pairs, Rope, apply_rotary
from longitude.parts.rotary_tables import Memo, Tables, cos_sin

Kind = Literal["full", "lower", "upper", "band", "window"]
Cut = Literal["triangles", "small", "windows"]  # what a band becomes
BAND_ROWS = 32  # of a block under a mask: as many as torch's CPU kernel works on at once
MAX_TRIANGLE = 512  # columns of the blocks that it works in: it skips whole ones only
MAX_BAND = 1024  # wider than this, the keys and values of a block would not stay in cache
MAX_SCHEMES = 16  # whose latest results are kept
ALL = slice(None)
T = TypeVar("T")


class Latest(Generic[T]):
    """What `make` gave last for each of a few schemes: every layer of a step asks for the same."""

    def __init__(self, make: Callable[..., T], schemes: int = MAX_SCHEMES) -> None:
        self.make, self.schemes = make, schemes
        self.results: dict[str, tuple[tuple[Any, ...], T]] = {}

    def __call__(self, scheme: Scheme, *rest: Any) -> T:
        arguments = (scheme, *rest)
        last = self.results.get(scheme.written)
        if last is None or last[0] != arguments:
            self.results.pop(scheme.written, None)
            last = self.results[scheme.written] = arguments, self.make(*arguments)
            for oldest in [*self.results][: -self.schemes]:
                self.results.pop(oldest, None)  # another thread may have been here
        return last[1]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The tables that rotate q and k, a row per token."""

    q: Tables
    k: Tables
    pairs: Pairs

    @cached_property
    def in_one_launch(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """What rotates q and k by our kernel; layers share the tables, which it looks at once."""
        from longitude.ops.kernels.rope import rotate_qk  # late: it imports Triton

        tables = {"q_tables": self.q, "k_tables": self.k, "pairs": self.pairs}
        return partial(rotate_qk, **tables, shapes=tuple(map(shape, (*self.q, *self.k))))

    def cut(self, rows: slice, cols: slice) -> Rotation:
        """The same for some rows of q and columns of k."""
        (c, s), (kc, ks) = self.q, self.k
        of_k = (some(kc, cols), some(ks, cols))
        return Rotation((some(c, rows), some(s, rows)), of_k, self.pairs)

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k rotated: in one launch where kernels run, else each by itself."""
        if triton_available(q.device):
            return self.in_one_launch(q, k)
        return apply_rotary(q, *self.q, self.pairs), apply_rotary(k, *self.k, self.pairs)


@dataclass(frozen=True, eq=False)
class Pass:
    """One rotation of q and k, and the disjoint areas where it holds."""

    inputs: AttentionInputs
    areas: tuple[Area, ...]
    region: Region | None = None

    def rotated(self, rows: slice = ALL, cols: slice = ALL) -> tuple[Tensor, Tensor]:
        """These rows of q and columns of k, rotated for this pass."""
        rotation = self.rotation(rows, cols)
        q, k = some(self.inputs.q, rows), some(self.inputs.k, cols)
        return (q, k) if rotation is None else rotation.apply(q, k)

    def rotation(self, rows: slice = ALL, cols: slice = ALL) -> Rotation | None:
        """How these rows of q and columns of k are rotated, None where they are not."""
        ends = (rows.start, rows.stop, cols.start, cols.stop)
        return self.inputs.once((self.region, ends), lambda: self._rotation(rows, cols))

    def _rotation(self, rows: slice, cols: slice) -> Rotation | None:
        p, rope = self.inputs, self.inputs.scheme.rotary
        if self.region is None or rope is None:
            return None
        q_pos, q_length = cut_tokens(p.q_pos, rows), cut_tokens(p.q_length, rows)
        k_pos, k_length = cut_tokens(p.k_pos, cols), cut_tokens(p.k_length, cols)
        centre = 0.0
        if rope.decay and p.q.shape[2]:
            centre = float(q_pos[-1] if isinstance(q_pos, range) else q_pos.max())
        size, how = p.q.shape[-1], (accum_dtype(p.q), p.q.device, centre)
        if p.scale_in_tables:
            q_tables = _scaled_tables(p.scheme, self.region, q_pos, size, q_length, *how)
        else:
            q_tables = cos_sin(rope, self.region, "q", q_pos, size, q_length, *how)
        fixed = not any(isinstance(x, Tensor) for x in (q_pos, k_pos, q_length, k_length))
        alike = fixed and (q_pos, q_length) == (k_pos, k_length) and not p.scale_in_tables
        if alike and _same_tables(rope, self.region, q_length):
            return Rotation(q_tables, q_tables, rope.pairs)
        k_tables = cos_sin(rope, self.region, "k", k_pos, size, k_length, *how)
        return Rotation(q_tables, k_tables, rope.pairs)


def make_passes(p: AttentionInputs) -> tuple[Pass, ...]:
    """The passes of a call."""
    return tuple(Pass(p, areas, region) for region, areas in region_areas(p.scheme, query_rows(p)))


def query_rows(p: AttentionInputs) -> QueryRows | None:
    """The query positions that matter, where frequencies change with them."""
    rope = p.scheme.rotary
    return None if rope is None or not p.q.shape[2] else rope.query_rows(p.q_pos)


@lru_cache(maxsize=1024)
def region_areas(
    scheme: Scheme, rows: QueryRows | None
) -> tuple[tuple[Region | None, tuple[Area, ...]], ...]:
    """The regions of a scheme with the areas where its masks show them.

    Where frequencies change by rows, only those of queries at these positions.
    """
    if scheme.rotary is None:
        return ((None, scheme.areas()),)
    masks = [m.areas() for m in scheme.mask]
    if rows is not None:
        masks.append((Area(top=rows[0], bottom=rows[-1] + 1),))
    regions = scheme.rotary.regions(rows)
    met = [(region, meet(*masks, (region.where,))) for region in regions]
    return tuple((region, areas) for region, areas in met if areas)


@Memo
def _scaled_tables(scheme: Scheme, region: Region, pos: Pos, size: int, length: Length,
                   dtype: torch.dtype, device: torch.device, centre: float) -> Tables:  # fmt: skip
    """The tables of q, multiplied by the factors of ④."""
    assert scheme.rotary is not None
    wide = (torch.float64, device, centre)
    cos, sin = cos_sin(scheme.rotary, region, "q", pos, size, length, *wide)
    factor = scale_factors(scheme, as_rows(pos, device))[..., None]
    return (cos * factor).to(dtype), (sin * factor).to(dtype)


@lru_cache(maxsize=256)
def _same_tables(rope: Rope, region: Region, length: int) -> bool:
    """Whether queries and keys at equal positions are rotated by the very same tables."""
    gain = (region.frequencies or rope.frequencies).gain(length)
    return gain == 1.0 and region.q == region.k and rope.decay is None


def accum_dtype(x: Tensor) -> torch.dtype:
    """The type that sums over x are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def dense(*tensors: Tensor) -> list[Tensor]:
    """Tensors, copied unless their last dimension is contiguous, as kernels read it."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def some(x: Tensor, part: slice) -> Tensor:
    """Some tokens of x: x itself where they are all, since a view takes its time too."""
    return x if part.start in (None, 0) and part.stop in (None, x.shape[2]) else x[:, :, part]


RegionAreas = tuple[tuple[Region, tuple[Area, ...]], ...]


def single_query_pass(p: AttentionInputs) -> Pass:
    """The single pass of a single query: its keys rotated by their distance."""
    rope, passes = p.scheme.rotary, make_passes(p)
    if rope is None or len(passes) == 1:
        return passes[0]
    regions = tuple((one.region, one.areas) for one in passes if one.region is not None)
    how = (p.k.shape[-1], p.k_length, accum_dtype(p.k), p.k.device)
    cos, sin = _pair_tables(rope, regions, p.q_pos, p.k_pos, *how)
    rotated = replace(p, k=apply_rotary(p.k, cos, sin, rope.pairs))
    return Pass(rotated, tuple(area for one in passes for area in one.areas))


@Memo
def _pair_tables(rope: Rope, regions: RegionAreas, q_pos: Pos, k_pos: Pos, size: int,
                 length: Length, dtype: torch.dtype, device: torch.device) -> Tables:  # fmt: skip
    """Tables that rotate every key to minus its distance, as the region it lies in gives it."""
    q, k = (as_rows(pos, device) for pos in (q_pos, k_pos))
    cos, sin = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
    pairs = rope.dim(size) // 2
    for region, areas in regions:
        plain = Region(frequencies=region.frequencies)
        away = region.q.by_pair(q, pairs) - region.k.by_pair(k, pairs)
        made = cos_sin(rope, plain, "pair", -away, size, length, dtype, device)
        here = visible(areas, q, k)[:, None, :, None]
        cos, sin = torch.where(here, made[0], cos), torch.where(here, made[1], sin)
    return cos, sin


@dataclass(frozen=True)
class Tile:
    """Rows top … top+height-1 of q against columns left … left+width-1 of k.

    "lower": row r sees columns 0 … r; "upper": columns r … width-1; both are square. "band": row r
    sees columns r + 1 … r + width - height. "window": it sees the columns c with lo <= r - c < hi.
    """

    top: int
    height: int
    left: int
    width: int
    kind: Kind = "full"
    lo: int = 0
    hi: int = 0

    @property
    def pairs(self) -> float:
        if self.kind == "band":
            return self.height * (float(self.width - self.height))
        if self.kind == "window":
            return self._apart(self.lo) - self._apart(self.hi)
        return self.height * self.width * (1.0 if self.kind == "full" else 0.5)

    def _apart(self, least: int) -> float:
        """How many pairs lie r - c >= least apart, in closed form: rows of a call are many."""

        def below(rows: int) -> float:  # of a triangle that is cut off at this width
            cut = max(0, rows - self.width)
            return (max(0, rows) * (max(0, rows) + 1) - cut * (cut + 1)) / 2

        return below(self.height - least) - below(-least)

    @property
    def window(self) -> Window:
        """What a kernel with a window argument takes."""
        offset = self.width - self.height
        left = None if self.hi >= self.height else self.hi - 1 + offset
        return Window(left, None if self.lo <= 1 - self.width else -self.lo - offset)


class Window(NamedTuple):
    """The columns `left` before to `right` behind the diagonal that ends in the last row and
    column; None: all."""

    left: int | None
    right: int | None


@lru_cache(maxsize=1024)
def tiles(areas: tuple[Area, ...], q: range, k: range, cut: Cut = "triangles") -> tuple[Tile, ...]:
    """Disjoint tiles that cover exactly the areas' pairs, in indices of q and k; small ones for a
    kernel that takes a mask and skips nothing in a block of `MAX_TRIANGLE` columns, windows for
    one that takes those."""
    pieces = [
        replace(t, top=t.top - q.start, left=t.left - k.start)
        for area in areas
        for t in _area(area, q.start, q.stop, k.start, k.stop, cut)
    ]
    if cut == "small":
        pieces = [half for t in pieces for half in _halves(t)]
    return tuple(_joined(pieces) if len(q) == 1 else pieces)


def _joined(row_tiles: list[Tile]) -> list[Tile]:
    """A single query's tiles with touching columns as one: decoding is then one plain call."""
    row: list[Tile] = []
    for t in sorted((replace(t, kind="full") for t in row_tiles), key=lambda t: t.left):
        if row and row[-1].left + row[-1].width == t.left:
            row[-1] = replace(row[-1], width=row[-1].width + t.width)
        else:
            row.append(t)
    return row


def _area(area: Area, q0: int, q1: int, k0: int, k1: int, cut: Cut) -> Iterator[Tile]:
    """Tiles of one area, in positions."""
    q0, q1 = max(q0, _or(area.top, -FAR)), min(q1, _or(area.bottom, FAR))
    k0, k1 = max(k0, _or(area.first, -FAR)), min(k1, _or(area.last, FAR))
    if not area.chunks:
        yield from _band(_or(area.lo, -FAR), _or(area.hi, FAR), q0, q1, k0, k1, cut)
        return
    chunk, rest = area.chunks[0], replace(area, chunks=area.chunks[1:])
    lo = _or(chunk.lo, -FAR)
    far = cut != "small" and chunk.hi is None and lo >= 0 and replace(rest, lo=None) == Area()
    if far and (cut == "triangles" or q1 - k0 > (lo + 2) * chunk.size):
        # all pairs so far apart are in it: one triangle, and one shape for what is left of chunks
        away = max(lo * chunk.size, _or(rest.lo, -FAR))
        yield from _band(away, FAR, q0, q1, k0, k1, cut)
        chunk, rest = replace(chunk, hi=lo + 1), replace(rest, hi=away)
    for c in range(q0 // chunk.size, (q1 - 1) // chunk.size + 1 if q1 > q0 else q0 // chunk.size):
        first = (c - _or(chunk.hi, FAR) + 1) * chunk.size
        last = (c - _or(chunk.lo, -FAR) + 1) * chunk.size
        top, bottom = max(q0, c * chunk.size), min(q1, (c + 1) * chunk.size)
        yield from _area(rest, top, bottom, max(k0, first), min(k1, last), cut)


def _or(bound: int | None, otherwise: int) -> int:
    return otherwise if bound is None else bound


def _band(lo: int, hi: int, q0: int, q1: int, k0: int, k1: int, cut: Cut) -> Iterator[Tile]:
    """Tiles of lo <= i - j < hi."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi - 1)  # rows that see anything at all
    if q0 >= q1 or k0 >= k1 or lo >= hi:
        return
    if cut == "windows":
        k0, k1 = max(k0, q0 - hi + 1), min(k1, q1 - lo)  # columns that any row sees
        height, width, away = q1 - q0, k1 - k0, q0 - k0
        lo, hi = max(lo - away, 1 - width), min(hi - away, height)
        if hi == height and (lo == 1 - width or (lo == 0 and width == height)):
            yield Tile(q0, height, k0, width, "lower" if lo == 0 < width - 1 else "full")
        else:
            yield Tile(q0, height, k0, width, "window", lo, hi)
    elif hi >= q1 - k0:  # no row is so far down that the band's lower edge hides a key
        yield from _below(lo, q0, q1, k0, k1)
    elif lo <= q0 - k1 + 1:
        yield from _above(hi, q0, q1, k0, k1)
    elif cut == "small" and hi - lo <= MAX_BAND and max(q0, k0 + hi) < min(q1, k1 + lo) - 1:
        first, last = max(q0, k0 + hi), min(q1, k1 + lo)
        yield from _band(lo, hi, q0, first, k0, k1, cut)  # whose band begins before k0
        for top in range(first, last, BAND_ROWS):
            rows = min(BAND_ROWS, last - top)  # one column more, which is hidden: whole vectors
            yield Tile(top, rows, top - hi, rows + hi - lo, "band")
        yield from _band(lo, hi, last, q1, k0, k1, cut)  # whose band ends behind k1
    else:
        width = hi - lo
        for top in range(q0, q1, width):
            bottom, corner = min(top + width, q1), top - lo
            yield from _below(lo, top, bottom, max(k0, corner), k1)
            yield from _above(hi, top, bottom, k0, min(k1, corner))


def _below(lo: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    """Tiles of j <= i - lo: a rectangle, a lower triangle, a rectangle below it."""
    q0 = max(q0, k0 + lo)
    if q0 >= q1 or k0 >= k1:
        return
    corner, end = q0 - lo, min(q1, k1 + lo)
    if end > q0:
        if corner > k0:
            yield Tile(q0, end - q0, k0, corner - k0)
        yield Tile(q0, end - q0, corner, end - q0, "lower")
    if q1 > max(end, q0):
        top = max(end, q0)
        yield Tile(top, q1 - top, k0, k1 - k0)


def _above(hi: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    """Tiles of j > i - hi: a rectangle, an upper triangle, a rectangle right of it."""
    q1 = min(q1, k1 + hi - 1)
    if q0 >= q1 or k0 >= k1:
        return
    start = max(q0, min(q1, k0 + hi))
    if start > q0:
        yield Tile(q0, start - q0, k0, k1 - k0)
    if q1 > start:
        left, size = start - hi + 1, q1 - start
        yield Tile(start, size, left, size, "upper")
        if k1 > left + size:
            yield Tile(start, size, left + size, k1 - left - size)


def _halves(t: Tile, size: int = 0) -> Iterator[Tile]:
    """A lower triangle as triangles of up to `MAX_TRIANGLE` rows and the squares below them, most
    of one size; other tiles as they are."""
    size = size or -(-t.height // 2 ** ((t.height - 1) // MAX_TRIANGLE).bit_length())
    if t.kind != "lower" or t.height <= size:
        yield t
        return
    half = size << ((t.height - 1) // size).bit_length() - 1  # the most doublings that are less
    rest, top, left = t.height - half, t.top + half, t.left + half
    yield from _halves(replace(t, height=half, width=half), size)
    yield Tile(top, rest, t.left, half)
    yield from _halves(Tile(top, rest, left, rest, "lower"), size)


def batches(pieces: Sequence[Tile]) -> list[list[Tile]]:
    """Tiles of one shape together, in the order of their first."""
    same: dict[tuple[Any, ...], list[Tile]] = {}
    for t in pieces:
        same.setdefault((t.height, t.width, t.kind, t.lo, t.hi), []).append(t)
    return list(same.values())


@lru_cache(maxsize=64)
def band_mask(height: int, width: int, dtype: torch.dtype, copies: int = 1) -> Tensor:
    """What hides all but columns r + 1 … r + width - height from row r, `copies` times over."""
    with torch.inference_mode(False):  # memoised: may serve training later
        hidden = torch.full((1, 1, height, width), float("-inf"), dtype=dtype)
        return (hidden.triu(width - height + 1) + hidden.tril()).repeat(1, 1, copies, 1)


class Windows(NamedTuple):
    """x[:, :, start : start+size] for each of `starts`, of an x (b h n d)."""

    x: Tensor
    starts: list[int]
    size: int


def windows(x: Tensor, starts: list[int], size: int) -> Tensor:
    """x[:, :, start : start+size] for each start, stacked (t b h size d): a view where they are
    evenly spaced, to be read only where they overlap."""
    steps = spacings(starts)
    if len(steps) > 1 or min(steps, default=0) < 0:
        return torch.stack([x[:, :, s : s + size] for s in starts])
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    b, h, n, d = x.stride()
    shape = (len(starts), *x.shape[:2], size, x.shape[3])
    return x.as_strided(shape, (step * n, b, h, n, d), x.storage_offset() + starts[0] * n)


def evenly_spaced(starts: list[int], size: int) -> bool:
    """Whether windows of this size are evenly spaced and do not overlap."""
    steps = spacings(starts)
    return len(steps) == 0 or (len(steps) == 1 and min(steps) >= size)


def spacings(starts: list[int]) -> set[int]:
    return {b - a for a, b in pairwise(starts)}
