"""Areas over contiguous positions as tiles that plain kernels run: rectangles and triangles.

Over ranges of positions an area's staircase is a rectangle, a lower triangle (causal attention) or
an upper one (causal attention with rows and columns reversed). A band of width w becomes blocks of
w rows, each with a lower triangle on its diagonal and an upper one before it: no kernel needs a
window argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from longitude.core.region import FAR, Area

Kind = Literal["full", "lower", "upper"]


@dataclass(frozen=True)
class Tile:
    """Rows top … top+height-1 of q against columns left … left+width-1 of k.

    "lower": row r sees columns 0 … r; "upper": columns r … width-1; both are square.
    """

    top: int
    height: int
    left: int
    width: int
    kind: Kind = "full"


@lru_cache(maxsize=1024)
def tiles(areas: tuple[Area, ...], q: range, k: range) -> tuple[Tile, ...]:
    """Disjoint tiles that cover exactly the areas' pairs, in indices of q and k."""
    found = [
        replace(t, top=t.top - q.start, left=t.left - k.start)
        for area in areas
        for t in _area(area, q.start, q.stop, k.start, k.stop)
    ]
    return tuple(_joined(found) if len(q) == 1 else found)


def _joined(found: list[Tile]) -> list[Tile]:
    """A single query's tiles with touching columns as one: decoding is then one plain call."""
    row: list[Tile] = []
    for t in sorted((replace(t, kind="full") for t in found), key=lambda t: t.left):
        if row and row[-1].left + row[-1].width == t.left:
            row[-1] = replace(row[-1], width=row[-1].width + t.width)
        else:
            row.append(t)
    return row


def _area(area: Area, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    """Tiles of one area, in positions."""
    q0, q1 = max(q0, _or(area.top, -FAR)), min(q1, _or(area.bottom, FAR))
    k0, k1 = max(k0, _or(area.first, -FAR)), min(k1, _or(area.last, FAR))
    if not area.chunks:
        yield from _band(_or(area.lo, -FAR), _or(area.hi, FAR), q0, q1, k0, k1)
        return
    chunk, rest = area.chunks[0], replace(area, chunks=area.chunks[1:])
    for c in range(q0 // chunk.size, (q1 - 1) // chunk.size + 1 if q1 > q0 else q0 // chunk.size):
        first = (c - _or(chunk.hi, FAR) + 1) * chunk.size
        last = (c - _or(chunk.lo, -FAR) + 1) * chunk.size
        top, bottom = max(q0, c * chunk.size), min(q1, (c + 1) * chunk.size)
        yield from _area(rest, top, bottom, max(k0, first), min(k1, last))


def _or(bound: int | None, otherwise: int) -> int:
    return otherwise if bound is None else bound


def _band(lo: int, hi: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Tile]:
    """Tiles of lo <= i - j < hi."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi - 1)  # rows that see anything at all
    if q0 >= q1 or k0 >= k1 or lo >= hi:
        return
    if hi >= q1 - k0:  # no row is so far down that the band's lower edge hides a key
        yield from _below(lo, q0, q1, k0, k1)
    elif lo <= q0 - k1 + 1:
        yield from _above(hi, q0, q1, k0, k1)
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


def split(tile: Tile, finest: int) -> Iterator[Tile]:
    """A triangle as rectangles and triangles no larger than `finest`.

    Kernels that step through keys in large blocks compute much of a triangle in vain; rectangles
    waste nothing. Cutting at powers of two gives few shapes, and tiles of one shape run as one
    batch.
    """
    if tile.kind == "full" or tile.height <= finest:
        yield tile
        return
    cut = 1 << ((tile.height - 1).bit_length() - 1)
    rest = tile.height - cut
    yield from split(Tile(tile.top, cut, tile.left, cut, tile.kind), finest)
    yield from split(Tile(tile.top + cut, rest, tile.left + cut, rest, tile.kind), finest)
    if tile.kind == "lower":
        yield Tile(tile.top + cut, rest, tile.left, cut)
    else:
        yield Tile(tile.top, cut, tile.left + cut, rest)


def batches(found: list[Tile]) -> list[list[Tile]]:
    """Tiles of one shape together, in the order of their first."""
    same: dict[tuple[int, int, Kind], list[Tile]] = {}
    for t in found:
        same.setdefault((t.height, t.width, t.kind), []).append(t)
    return list(same.values())
