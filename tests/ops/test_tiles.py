"""Tiles cover exactly an area's visible pairs, once each, for any area and any two ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import attention, explain
from longitude.core.region import Area, Chunks
from longitude.ops.passes import Cut, Tile, batches, tiles

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
        if t.kind == "band":
            shape = shape.triu(1).tril(t.width - t.height)
            assert shape.sum() == t.pairs
        elif t.kind == "window":
            shape = shape.tril(-t.lo).triu(1 - t.hi)
            left, right = (t.width + t.height if x is None else x for x in t.window)
            assert left >= 0 and right >= 0, "others mean something else to a kernel"
            last = t.width - t.height  # the diagonal that ends in the last row and column
            assert torch.equal(shape, torch.ones_like(shape).tril(last + right).triu(last - left))
            assert shape.sum() == t.pairs
        elif t.kind != "full":
            assert t.height == t.width
            shape = shape.tril() if t.kind == "lower" else shape.triu()
        count[t.top : t.top + t.height, t.left : t.left + t.width] += shape
    return count


@settings(max_examples=250, deadline=None, derandomize=True)
@given(AREAS, RANGES, RANGES, st.sampled_from(["triangles", "small", "windows"]))
def test_tiles_cover_an_area_exactly(area: Area, q: range, k: range, cut: Cut) -> None:
    found = list(tiles((area,), q, k, cut))
    i, j = (
        torch.tensor(list(q), dtype=torch.int64)[:, None],
        torch.tensor(list(k), dtype=torch.int64),
    )
    want = area.visible(i, j[None]).to(torch.int64)
    assert torch.equal(covered(found, len(q), len(k)), want)
    assert sorted(map(repr, (t for batch in batches(found) for t in batch))) == sorted(
        map(repr, found)
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(some(-20, 20), some(-20, 25), RANGES, RANGES)
def test_a_band_is_one_window_of_exactly_its_pairs(
    lo: int | None, hi: int | None, q: range, k: range
) -> None:
    found = list(tiles((Area(lo=lo, hi=hi),), q, k, "windows"))
    i, j = (torch.tensor(list(x), dtype=torch.int64) for x in (q, k))
    want = Area(lo=lo, hi=hi).visible(i[:, None], j[None]).to(torch.int64)
    assert torch.equal(covered(found, len(q), len(k)), want) and len(found) == bool(want.any())


def test_a_far_band_is_one_causal_triangle() -> None:
    assert tiles((Area(lo=1024),), range(4096), range(4096)) == (
        Tile(1024, 3072, 0, 3072, "lower"),
    )


def test_a_near_band_is_a_batch_of_diagonal_blocks_and_one_of_blocks_before_them() -> None:
    found = list(tiles((Area(lo=0, hi=1024),), range(4096), range(4096)))
    assert [len(batch) for batch in batches(found)] == [4, 3]
    assert {(t.height, t.kind) for t in found} == {(1024, "lower"), (1023, "upper")}


def test_of_small_tiles_a_narrow_band_is_one_batch_of_blocks_of_a_few_rows() -> None:
    first, *blocks = tiles((Area(lo=0, hi=128),), range(1024), range(1024), "small")
    assert first == Tile(0, 128, 0, 128, "lower")
    assert [b.top for b in blocks] == [*range(128, 1024, 32)]
    assert {(b.top - b.left, b.height, b.width, b.kind) for b in blocks} == {(128, 32, 160, "band")}
    wide = tiles((Area(lo=0, hi=2048),), range(6144), range(6144), "small")
    assert {t.kind for t in wide} == {"lower", "upper", "full"}, "it would cost more than triangles"


@pytest.mark.parametrize("n", [1, 512, 513, 700, 1024, 1984, 2500])
def test_a_triangle_in_halves_is_the_same_triangle(n: int) -> None:
    found = list(tiles((Area(lo=3),), range(n + 3), range(n + 3), "small"))
    want = torch.ones(n + 3, n + 3, dtype=torch.int64).tril(-3)
    assert torch.equal(covered(found, n + 3, n + 3), want)
    assert max(t.height for t in found if t.kind == "lower") <= 512
    assert len(batches(found)) <= 8, "a call each"


def test_as_windows_every_band_is_one_tile() -> None:
    near, far = Area(lo=0, hi=1024), Area(lo=1024)
    assert tiles((near, far), range(4096), range(4096), "windows") == (
        Tile(0, 4096, 0, 4096, "window", 0, 1024),
        Tile(1024, 3072, 0, 3072, "lower"),
    )
    (chunk,) = tiles((Area(lo=0),), range(100, 150), range(150), "windows")
    assert chunk == Tile(0, 50, 0, 150, "window", -100, 50) and chunk.window == (None, 0)


def test_chunked_prefill_is_a_rectangle_and_a_triangle() -> None:
    found = tiles((Area(lo=0),), range(100, 150), range(150))
    assert set(found) == {Tile(0, 50, 0, 100), Tile(0, 50, 100, 50, "lower")}


def test_a_single_query_is_one_row() -> None:
    near, far = Area(lo=0, hi=64), Area(lo=64)
    assert tiles((near, far), range(511, 512), range(512)) == (Tile(0, 1, 0, 512),)
    assert tiles((near,), range(511, 512), range(512), "small") == (Tile(0, 1, 448, 64),)
    window = (Area(lo=0, hi=8), Area(lo=8, last=4))
    assert tiles(window, range(99, 100), range(100)) == (Tile(0, 1, 0, 4), Tile(0, 1, 92, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top", "n"), [(0, 700), (0, 200), (600, 700), (137, 700), (650, 700)])
@pytest.mark.parametrize("text", ["rope(remap=rerope(64))", "rope() + window(100, sinks=4)"])
def test_small_tiles_give_what_the_score_matrix_gives(
    text: str, top: int, n: int, dtype: torch.dtype
) -> None:
    heads, draw = (2, 1, 1), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=draw, dtype=torch.float64) for h in heads)
    call = (q[:, :, top:], k, v, range(top, n), range(n))
    want = attention(text, *call, backend="eager")
    found = attention(text, q[:, :, top:].to(dtype), k.to(dtype), v.to(dtype), *call[3:])
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double(), want, atol=close, rtol=close)
    assert "band" in str(explain(text, *call)) or top > 600
