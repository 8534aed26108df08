"""What a few queries see of keys that stand unturned, as pieces whose keys turn evenly.

In a piece, key positions run on and belong to one region, so the score of i and j is q turned by
θ·x_q(i) against k turned by θ·x_k(j), where both x are the region's shifts. Which keys a query sees
is a matter of whole numbers, read off the scheme's areas without touching the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from longitude.core.part import Region, by_rows
from longitude.core.region import Shift
from longitude.core.scheme import Scheme
from longitude.ops.passes import cut
from longitude.ops.tiles import tiles


class Run(NamedTuple):
    """Columns col … col+n-1 stand at positions pos … pos+n-1; `frame` turned their keys, if any."""

    col: int
    pos: int
    n: int
    frame: Region | None = None


Line = tuple[Run, ...]  # one sequence; columns that are padding belong to no run


class Which(NamedTuple):
    """A piece among those of a call: which stretch of which run lies in a region, and whether its
    keys are turned for it already."""

    region: Region | None
    turned: bool
    run: int
    stretch: int


class Seen(NamedTuple):
    """A piece of one sequence: column = position + offset, and low <= j < high for each query."""

    offset: int
    bounds: list[tuple[int, int]]

    @property
    def span(self) -> tuple[int, int]:
        """The positions that any query sees."""
        some = [(low, high) for low, high in self.bounds if low < high]
        return min(low for low, _ in some), max(high for _, high in some)


Pieces = dict[Which, dict[int, Seen]]  # for each piece, the sequences that see something of it
Places = Sequence[tuple[int, ...]]  # where the queries stand, for each sequence or one for all


def frame_of(region: Region) -> Region:
    """How the keys of a region are turned: two regions may turn them alike."""
    return Region(k=region.k, frequencies=region.frequencies)


@lru_cache(maxsize=256)
def fits(scheme: Scheme) -> bool:
    """Whether a scheme's scores are q·k alone, of keys that turn evenly."""
    rope = scheme.rotary
    if scheme.bias or (rope is not None and rope.decay is not None):
        return False
    rows = (0, 1) if _banded(scheme) else None
    return all(region is None or _even(region.k) for region, _ in cut(scheme, rows))


def pieces(scheme: Scheme, lines: Sequence[Line], at: Places) -> Pieces | None:
    """What the queries of each sequence see of its line; one line, or one row of places, may serve
    all. None where keys are turned as a region wants them that they do not lie in."""
    found: Pieces = {}
    for r in range(max(len(lines), len(at))):
        places = at[r % len(at)]
        for n, i in enumerate(places):
            for which, offset, bounds in _seen(scheme, lines[r % len(lines)], i):
                if which is None:
                    return None
                own = found.setdefault(which, {})
                own.setdefault(r, Seen(offset, [(0, 0)] * len(places))).bounds[n] = bounds
    return found


def _seen(
    scheme: Scheme, line: Line, i: int
) -> Iterator[tuple[Which | None, int, tuple[int, int]]]:
    for region, areas in cut(scheme, (i, i + 1) if _banded(scheme) else None):
        for n, run in enumerate(line):
            here = tiles(areas, range(i, i + 1), range(run.pos, run.pos + run.n))
            right = run.frame is None or (region is not None and frame_of(region) == run.frame)
            for stretch, tile in enumerate(here):
                low = run.pos + tile.left
                which = Which(region, run.frame is not None, n, stretch) if right else None
                yield which, run.col - run.pos, (low, low + tile.width)


def _banded(scheme: Scheme) -> bool:
    return scheme.rotary is not None and by_rows(scheme.rotary.frequencies)


def _even(k: Shift) -> bool:
    """Whether keys of a shift step evenly, block by block."""
    return k.least is None and not (k.floor and (k.modulo or k.divide != int(k.divide)))
