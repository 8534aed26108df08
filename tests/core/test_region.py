"""Areas, shifts and their algebra against brute force over small grids."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.region import SAME, Area, Chunks, Shift, at, meet, visible

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

N = 14  # positions 0 … N-1 on both sides
LATE = 4 * N  # beyond every bound below: what no query before it sees, none ever will
i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]

bound = st.none() | st.integers(-N, N)
edge = st.none() | st.integers(-2, N + 2)
chunks = st.builds(
    Chunks, st.integers(1, 6), st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 3)
)
areas = st.builds(
    Area, bound, bound, edge, edge, edge, edge, st.lists(chunks, max_size=2, unique=True).map(tuple)
)
many = settings(max_examples=60, deadline=None)


def inside(a: Area, i: int, j: int) -> bool:
    """The definition, pair by pair."""

    def between(x: int, lo: int | None, hi: int | None) -> bool:
        return (lo is None or lo <= x) and (hi is None or x < hi)

    return (
        between(i - j, a.lo, a.hi)
        and between(j, a.first, a.last)
        and between(i, a.top, a.bottom)
        and all(between(i // c.size - j // c.size, c.lo, c.hi) for c in a.chunks)
    )


def plane(a: Area, rows: int = N, cols: int = N) -> list[list[bool]]:
    return [[inside(a, i, j) for j in range(cols)] for i in range(rows)]


@many
@given(areas)
def test_visible_is_the_definition(a):
    assert a.visible(i, j).tolist() == plane(a)


@many
@given(areas)
def test_interval_holds_exactly_the_visible_keys(a):
    start, stop = a.interval(torch.arange(N))
    assert (start <= stop).all() and (start >= 0).all()
    for row, (lo, hi) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        assert [lo <= c < hi for c in range(2 * N)] == [inside(a, row, c) for c in range(2 * N)]


@many
@given(areas, st.integers(0, N))
def test_ever_is_whether_a_later_query_sees_the_key(a, now):
    kept = a.ever(torch.tensor(now), torch.arange(N)).tolist()
    assert kept == [any(inside(a, q, k) for q in range(now, LATE)) for k in range(N)]


@many
@given(areas, areas)
def test_and_is_intersection(a, b):
    assert (a & b).visible(i, j).tolist() == (a.visible(i, j) & b.visible(i, j)).tolist()


@many
@given(areas)
def test_an_empty_area_holds_no_pair(a):
    if a.empty:
        assert not any(map(any, plane(a, 4 * N, 4 * N)))


def test_empty_knows_what_lowering_must_drop():
    """The pieces that a causal mask hides, so that no pass runs for nothing."""
    causal = Area(lo=0)
    assert (causal & Area(hi=0)).empty and not (causal & Area(hi=1)).empty
    assert (causal & Area(chunks=(Chunks(4, None, 0),))).empty
    assert not (causal & Area(chunks=(Chunks(4, 0, 1),))).empty
    assert (Area(hi=1) & Area(chunks=(Chunks(4, 1, 2),))).empty
    assert not (Area(hi=1) & Area(chunks=(Chunks(4, 0, 1),))).empty
    assert not (causal & Area(chunks=(Chunks(4, None, 1),))).empty
    assert (Area(top=5) & Area(bottom=5)).empty and (Area(first=3) & Area(last=3)).empty
    assert not Area().empty


unions = st.lists(areas, max_size=3).map(tuple)


@many
@given(unions, unions)
def test_meet_is_the_intersection_of_unions(a, b):
    both = visible(a, i, j) & visible(b, i, j)
    assert visible(meet(a, b), i, j).tolist() == both.tolist()


@many
@given(unions)
def test_a_union_sees_what_any_of_its_areas_sees(a):
    expected = [[any(inside(one, r, c) for one in a) for c in range(N)] for r in range(N)]
    assert visible(a, i, j).tolist() == expected


def test_meet_keeps_disjoint_unions_disjoint():
    near, far = Area(lo=0, hi=4), Area(lo=4)
    here, before = Area(chunks=(Chunks(5, 0, 1),)), Area(chunks=(Chunks(5, 1, None),))
    pieces = meet((near, far), (here, before))
    assert len(pieces) == 4
    assert sum(p.visible(i, j).int() for p in pieces).tolist() == (i >= j).int().tolist()


shifts = st.builds(
    Shift,
    modulo=st.none() | st.integers(1, 9),
    divide=st.sampled_from([1, 2, 3, 8, 0.25, 1.7, math.inf]),
    floor=st.booleans(),
    add=st.floats(-20, 20),
    least=st.none() | st.floats(-20, 40),
)


@many
@given(shifts, st.lists(st.integers(0, 10**7), min_size=1, max_size=8))
def test_shift_is_its_formula(s, positions):
    def one(p: float) -> float:
        p = p % s.modulo if s.modulo else p
        p = p / s.divide
        p = math.floor(p) if s.floor else p
        return min(p + s.add, math.inf if s.least is None else s.least)

    got = s(torch.tensor(positions))
    assert got.dtype == torch.float64
    assert got.tolist() == [one(p) for p in positions]


def test_shifts_with_names():
    p = torch.tensor([0, 3, 10**9 + 7])
    assert SAME(p).tolist() == p.tolist()
    assert at(5.5)(p).tolist() == [5.5] * 3


def test_areas_and_shifts_are_values():
    assert Area(lo=1) == Area(1) and hash(Area(lo=1)) == hash(Area(1))
    assert {Shift(divide=8): 1}[Shift(divide=8.0)] == 1
    with pytest.raises(AttributeError):
        Area().lo = 3  # type: ignore[misc]
