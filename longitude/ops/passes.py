"""From a scheme to passes and tiles: which rotations of q and k a call needs, and where they apply.

A pass is ordinary attention over one rotation of q and k, restricted to some areas; the passes of a
call are disjoint. Rotation is deferred until a kernel needs certain rows and columns. A single
query needs one pass: q stays pre-RoPE and key j is rotated to minus the distance that its region
assigns to the pair, so that q·k sees that distance in any region (`single_query_pass`).

Over ranges of positions an area is a set of tiles that plain kernels run: rectangles, lower
triangles (causal attention) and upper ones (causal attention with rows and columns reversed). A
band of width w becomes blocks of w rows, each with a lower triangle on its diagonal and an upper
one before it: no kernel needs a window argument. For a kernel that has one, a band is one tile. A
CPU's kernel computes every pair of triangles of up to 512 rows: there a band becomes blocks of few
rows, each a rectangle under a mask, and a triangle small ones on its diagonal and squares below.
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
Cut = Literal["triangles", "small", "windows"]  # what a band is cut into
BAND_ROWS = 32  # of a block under a mask: as many as torch's CPU kernel processes at once
MAX_TRIANGLE = 512  # columns of that kernel's blocks, which it skips only as a whole
MAX_BAND = 1024  # width beyond which a block's keys and values do not stay in cache
MAX_SCHEMES = 16  # whose latest results are kept
ALL = slice(None)
T = TypeVar("T")


class Latest(Generic[T]):
    """The latest result of `make` for each of a few schemes: all layers of a step need the same."""

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
                self.results.pop(oldest, None)  # another thread may have removed it
        return last[1]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The tables that rotate q and k, with a row per token."""

    q: Tables
    k: Tables
    pairs: Pairs

    @cached_property
    def in_one_launch(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Rotates q and k by our kernel; it inspects the tables once, since layers share them."""
        from longitude.ops.kernels.rope import rotate_qk  # deferred: it imports Triton

        tables = {"q_tables": self.q, "k_tables": self.k, "pairs": self.pairs}
        return partial(rotate_qk, **tables, shapes=tuple(map(shape, (*self.q, *self.k))))

    def cut(self, rows: slice, cols: slice) -> Rotation:
        """Return the rotation of these rows of q and columns of k."""
        (c, s), (kc, ks) = self.q, self.k
        of_k = (sliced(kc, cols), sliced(ks, cols))
        return Rotation((sliced(c, rows), sliced(s, rows)), of_k, self.pairs)

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k: in one launch where Triton runs, else one after the other."""
        if triton_available(q.device):
            return self.in_one_launch(q, k)
        return apply_rotary(q, *self.q, self.pairs), apply_rotary(k, *self.k, self.pairs)


@dataclass(frozen=True, eq=False)
class Pass:
    """One rotation of q and k, and the disjoint areas where it applies."""

    inputs: AttentionInputs
    areas: tuple[Area, ...]
    region: Region | None = None

    def rotated(self, rows: slice = ALL, cols: slice = ALL) -> tuple[Tensor, Tensor]:
        """Return these rows of q and columns of k, rotated for this pass."""
        rotation = self.rotation(rows, cols)
        q, k = sliced(self.inputs.q, rows), sliced(self.inputs.k, cols)
        return (q, k) if rotation is None else rotation.apply(q, k)

    def rotation(self, rows: slice = ALL, cols: slice = ALL) -> Rotation | None:
        """Return the rotation of these rows of q and columns of k, or None if there is none."""
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
        size, target = p.q.shape[-1], (accum_dtype(p.q), p.q.device, centre)
        if p.scale_in_tables:
            q_tables = _scaled_tables(p.scheme, self.region, q_pos, size, q_length, *target)
        else:
            q_tables = cos_sin(rope, self.region, "q", q_pos, size, q_length, *target)
        fixed = not any(isinstance(x, Tensor) for x in (q_pos, k_pos, q_length, k_length))
        shareable = fixed and (q_pos, q_length) == (k_pos, k_length) and not p.scale_in_tables
        if shareable and _same_tables(rope, self.region, q_length):
            return Rotation(q_tables, q_tables, rope.pairs)
        k_tables = cos_sin(rope, self.region, "k", k_pos, size, k_length, *target)
        return Rotation(q_tables, k_tables, rope.pairs)


def make_passes(p: AttentionInputs) -> tuple[Pass, ...]:
    """Return the passes of a call."""
    return tuple(Pass(p, areas, region) for region, areas in region_areas(p.scheme, query_rows(p)))


def query_rows(p: AttentionInputs) -> QueryRows | None:
    """Return the query positions that matter if frequencies change with them."""
    rope = p.scheme.rotary
    return None if rope is None or not p.q.shape[2] else rope.query_rows(p.q_pos)


@lru_cache(maxsize=1024)
def region_areas(
    scheme: Scheme, rows: QueryRows | None
) -> tuple[tuple[Region | None, tuple[Area, ...]], ...]:
    """Return the regions of a scheme with the areas where its masks show them.

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
    """Return the tables of q, multiplied by the factors of ④."""
    assert scheme.rotary is not None
    wide = (torch.float64, device, centre)
    cos, sin = cos_sin(scheme.rotary, region, "q", pos, size, length, *wide)
    factor = scale_factors(scheme, as_rows(pos, device))[..., None]
    return (cos * factor).to(dtype), (sin * factor).to(dtype)


@lru_cache(maxsize=256)
def _same_tables(rope: Rope, region: Region, length: int) -> bool:
    """Whether queries and keys at equal positions are rotated by the same tables."""
    gain = (region.frequencies or rope.frequencies).gain(length)
    return gain == 1.0 and region.q == region.k and rope.decay is None


def accum_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which sums over x are accumulated."""
    return torch.promote_types(x.dtype, torch.float32)


def dense(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors unless their last dimension is contiguous, as kernels require."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def sliced(x: Tensor, part: slice) -> Tensor:
    """Slice tokens of x; returns x itself for all tokens, since even a view takes time."""
    return x if part.start in (None, 0) and part.stop in (None, x.shape[2]) else x[:, :, part]


RegionAreas = tuple[tuple[Region, tuple[Area, ...]], ...]


def single_query_pass(p: AttentionInputs) -> Pass:
    """Return the one pass of a single query, with keys rotated by their distance."""
    rope, passes = p.scheme.rotary, make_passes(p)
    if rope is None or len(passes) == 1:
        return passes[0]
    regions = tuple((one.region, one.areas) for one in passes if one.region is not None)
    target = (p.k.shape[-1], p.k_length, accum_dtype(p.k), p.k.device)
    cos, sin = _pair_tables(rope, regions, p.q_pos, p.k_pos, *target)
    rotated = replace(p, k=apply_rotary(p.k, cos, sin, rope.pairs))
    return Pass(rotated, tuple(area for one in passes for area in one.areas))


@Memo
def _pair_tables(rope: Rope, regions: RegionAreas, q_pos: Pos, k_pos: Pos, size: int,
                 length: Length, dtype: torch.dtype, device: torch.device) -> Tables:  # fmt: skip
    """Return tables that rotate every key to minus its distance, as assigned by its region."""
    q, k = (as_rows(pos, device) for pos in (q_pos, k_pos))
    cos, sin = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
    pairs = rope.dim(size) // 2
    for region, areas in regions:
        plain = Region(frequencies=region.frequencies)
        distance = region.q.by_pair(q, pairs) - region.k.by_pair(k, pairs)
        tables = cos_sin(rope, plain, "pair", -distance, size, length, dtype, device)
        here = visible(areas, q, k)[:, None, :, None]
        cos, sin = torch.where(here, tables[0], cos), torch.where(here, tables[1], sin)
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
            return self._pairs_beyond(self.lo) - self._pairs_beyond(self.hi)
        return self.height * self.width * (1.0 if self.kind == "full" else 0.5)

    def _pairs_beyond(self, least: int) -> float:
        """Count the pairs with r - c >= least in closed form, since a call may have many rows."""

        def below(rows: int) -> float:  # of a triangle cut off at this width
            cut = max(0, rows - self.width)
            return (max(0, rows) * (max(0, rows) + 1) - cut * (cut + 1)) / 2

        return below(self.height - least) - below(-least)

    @property
    def window(self) -> Window:
        """The window as a kernel's arguments."""
        offset = self.width - self.height
        left = None if self.hi >= self.height else self.hi - 1 + offset
        return Window(left, None if self.lo <= 1 - self.width else -self.lo - offset)


class Window(NamedTuple):
    """The columns from `left` before to `right` behind the diagonal that ends in the last row and
    column; None: unbounded."""

    left: int | None
    right: int | None


@lru_cache(maxsize=1024)
def tiles(areas: tuple[Area, ...], q: range, k: range, cut: Cut = "triangles") -> tuple[Tile, ...]:
    """Cut areas into disjoint tiles that cover exactly their pairs, in indices of q and k: small
    tiles for a kernel that takes a mask and skips nothing within a block of `MAX_TRIANGLE` columns,
    windows for one that takes those."""
    pieces = [
        replace(t, top=t.top - q.start, left=t.left - k.start)
        for area in areas
        for t in _area(area, q.start, q.stop, k.start, k.stop, cut)
    ]
    if cut == "small":
        pieces = [half for t in pieces for half in _halves(t)]
    return tuple(_joined(pieces) if len(q) == 1 else pieces)


def _joined(row_tiles: list[Tile]) -> list[Tile]:
    """Merge a single query's tiles where columns touch: decoding is then one plain call."""
    row: list[Tile] = []
    for t in sorted((replace(t, kind="full") for t in row_tiles), key=lambda t: t.left):
        if row and row[-1].left + row[-1].width == t.left:
            row[-1] = replace(row[-1], width=row[-1].width + t.width)
        else:
            row.append(t)
    return row


def _area(area: Area, q0: int, q1: int, k0: int, k1: int, cut: Cut) -> Iterator[Tile]:
    """Yield the tiles of one area, in positions."""
    q0, q1 = max(q0, _or(area.top, -FAR)), min(q1, _or(area.bottom, FAR))
    k0, k1 = max(k0, _or(area.first, -FAR)), min(k1, _or(area.last, FAR))
    if not area.chunks:
        yield from _band(_or(area.lo, -FAR), _or(area.hi, FAR), q0, q1, k0, k1, cut)
        return
    chunk, rest = area.chunks[0], replace(area, chunks=area.chunks[1:])
    lo = _or(chunk.lo, -FAR)
    far = cut != "small" and chunk.hi is None and lo >= 0 and replace(rest, lo=None) == Area()
    if far and (cut == "triangles" or q1 - k0 > (lo + 2) * chunk.size):
        # it has every pair that far apart: one triangle, and remainders of chunks of one shape
        distance = max(lo * chunk.size, _or(rest.lo, -FAR))
        yield from _band(distance, FAR, q0, q1, k0, k1, cut)
        chunk, rest = replace(chunk, hi=lo + 1), replace(rest, hi=distance)
    for c in range(q0 // chunk.size, (q1 - 1) // chunk.size + 1 if q1 > q0 else q0 // chunk.size):
        first = (c - _or(chunk.hi, FAR) + 1) * chunk.size
        last = (c - _or(chunk.lo, -FAR) + 1) * chunk.size
        top, bottom = max(q0, c * chunk.size), min(q1, (c + 1) * chunk.size)
        yield from _area(rest, top, bottom, max(k0, first), min(k1, last), cut)


def _or(bound: int | None, otherwise: int) -> int:
    return otherwise if bound is None else bound


def _band(lo: int, hi: int, q0: int, q1: int, k0: int, k1: int, cut: Cut) -> Iterator[Tile]:
    """Yield tiles of lo <= i - j < hi."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi - 1)  # rows that see any column
    if q0 >= q1 or k0 >= k1 or lo >= hi:
        return
    if cut == "windows":
        k0, k1 = max(k0, q0 - hi + 1), min(k1, q1 - lo)  # columns that any row sees
        height, width, offset = q1 - q0, k1 - k0, q0 - k0
        lo, hi = max(lo - offset, 1 - width), min(hi - offset, height)
        if hi == height and (lo == 1 - width or (lo == 0 and width == height)):
            yield Tile(q0, height, k0, width, "lower" if lo == 0 < width - 1 else "full")
        else:
            yield Tile(q0, height, k0, width, "window", lo, hi)
    elif hi >= q1 - k0:  # no row is far enough from column k0 for hi to hide a key
        yield from _below(lo, q0, q1, k0, k1)
    elif lo <= q0 - k1 + 1:
        yield from _above(hi, q0, q1, k0, k1)
    elif cut == "small" and hi - lo <= MAX_BAND and max(q0, k0 + hi) < min(q1, k1 + lo) - 1:
        first, last = max(q0, k0 + hi), min(q1, k1 + lo)
        yield from _band(lo, hi, q0, first, k0, k1, cut)  # rows whose band begins before k0
        for top in range(first, last, BAND_ROWS):
            rows = min(BAND_ROWS, last - top)  # with one hidden column, for whole vectors
            yield Tile(top, rows, top - hi, rows + hi - lo, "band")
        yield from _band(lo, hi, last, q1, k0, k1, cut)  # rows whose band ends beyond k1
    else:
        width = hi - lo
        for top in range(q0, q1, width):
            bottom, corner = min(top + width, q1), top - lo
            yield from _below(lo, top, bottom, max(k0, corner), k1)
            yield from _above(hi, top, bottom, k0, min(k1, corner))


def _below(lo: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    """Yield tiles of j <= i - lo: a rectangle, a lower triangle, a rectangle below it."""
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
    """Yield tiles of j > i - hi: a rectangle, an upper triangle, a rectangle right of it."""
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
    """Cut a lower triangle into triangles of up to `MAX_TRIANGLE` rows and the squares below them,
    mostly of one size; yield other tiles unchanged."""
    size = size or -(-t.height // 2 ** ((t.height - 1) // MAX_TRIANGLE).bit_length())
    if t.kind != "lower" or t.height <= size:
        yield t
        return
    half = size << ((t.height - 1) // size).bit_length() - 1  # largest size · 2^n below the height
    rest, top, left = t.height - half, t.top + half, t.left + half
    yield from _halves(replace(t, height=half, width=half), size)
    yield Tile(top, rest, t.left, half)
    yield from _halves(Tile(top, rest, left, rest, "lower"), size)


def batches(pieces: Sequence[Tile]) -> list[list[Tile]]:
    """Group tiles of one shape, in the order of each shape's first tile."""
    same: dict[tuple[Any, ...], list[Tile]] = {}
    for t in pieces:
        same.setdefault((t.height, t.width, t.kind, t.lo, t.hi), []).append(t)
    return list(same.values())


@lru_cache(maxsize=64)
def band_mask(height: int, width: int, dtype: torch.dtype, copies: int = 1) -> Tensor:
    """Mask all but columns r + 1 … r + width - height in row r, `copies` times over."""
    with torch.inference_mode(False):  # memoised: training may use it later
        hidden = torch.full((1, 1, height, width), float("-inf"), dtype=dtype)
        return (hidden.triu(width - height + 1) + hidden.tril()).repeat(1, 1, copies, 1)


class Windows(NamedTuple):
    """The slices x[:, :, start : start+size] for each of `starts`, of an x (b h n d)."""

    x: Tensor
    starts: list[int]
    size: int


def windows(x: Tensor, starts: list[int], size: int) -> Tensor:
    """Return x[:, :, start : start+size] for each start, stacked (t b h size d): as a view if they
    are evenly spaced, which is read-only if they overlap."""
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
