"""Tiles cover exactly an area's visible pairs, once each, for any area and any two ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.region import Area, Chunks
from longitude.ops.passes import Tile, batches, tiles

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def some(low: int, high: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(low, high)


AREAS = st.builds(
    Area,
    lo=some(-20, 20),
    hi=some(-20, 25),
    first=some(0, 20),
    last=some(0, 30),
    top=some(0, 20),
    bottom=some(0, 40),
    chunks=st.lists(st.builds(Chunks, st.integers(1, 9), some(-3, 3), some(-2, 4)), max_size=2).map(
        tuple
    ),
)
RANGES = st.tuples(st.integers(0, 20), st.integers(0, 25)).map(lambda x: range(x[0], sum(x)))


def covered(found: list[Tile], nq: int, nk: int) -> torch.Tensor:
    count = torch.zeros(nq, nk, dtype=torch.int64)
    for t in found:
        assert t.height > 0 and t.width > 0 and t.top >= 0 and t.left >= 0
        assert t.top + t.height <= nq and t.left + t.width <= nk
        shape = torch.ones(t.height, t.width, dtype=torch.int64)
        if t.kind != "full":
            assert t.height == t.width
            shape = shape.tril() if t.kind == "lower" else shape.triu()
        count[t.top : t.top + t.height, t.left : t.left + t.width] += shape
    return count


@settings(max_examples=250, deadline=None, derandomize=True)
@given(AREAS, RANGES, RANGES)
def test_tiles_cover_an_area_exactly(area: Area, q: range, k: range) -> None:
    found = list(tiles((area,), q, k))
    i, j = (
        torch.tensor(list(q), dtype=torch.int64)[:, None],
        torch.tensor(list(k), dtype=torch.int64),
    )
    want = area.visible(i, j[None]).to(torch.int64)
    assert torch.equal(covered(found, len(q), len(k)), want)
    assert sorted(map(repr, (t for batch in batches(found) for t in batch))) == sorted(
        map(repr, found)
    )


def test_a_far_band_is_one_causal_triangle() -> None:
    assert tiles((Area(lo=1024),), range(4096), range(4096)) == (
        Tile(1024, 3072, 0, 3072, "lower"),
    )


def test_a_near_band_is_a_batch_of_diagonal_blocks_and_one_of_blocks_before_them() -> None:
    found = list(tiles((Area(lo=0, hi=1024),), range(4096), range(4096)))
    assert [len(batch) for batch in batches(found)] == [4, 3]
    assert {(t.height, t.kind) for t in found} == {(1024, "lower"), (1023, "upper")}


def test_chunked_prefill_is_a_rectangle_and_a_triangle() -> None:
    found = tiles((Area(lo=0),), range(100, 150), range(150))
    assert set(found) == {Tile(0, 50, 0, 100), Tile(0, 50, 100, 50, "lower")}


def test_a_single_query_is_one_row() -> None:
    near, far = Area(lo=0, hi=64), Area(lo=64)
    assert tiles((near, far), range(511, 512), range(512)) == (Tile(0, 1, 0, 512),)
    window = (Area(lo=0, hi=8), Area(lo=8, last=4))
    assert tiles(window, range(99, 100), range(100)) == (Tile(0, 1, 0, 4), Tile(0, 1, 92, 8))
