"""A case: numbers for what runs, a reason for what does not."""

from __future__ import annotations

from typing import Any

from benchmarks.suites.case import Case, Way, measure
from benchmarks.suites.peers import Unfit, found, peer
from benchmarks.suites.rows import BASELINE, OURS, PEER, Row, Work

WORK = Work("rope", "work", "sizes", 8, "the best")


def rows(*ways: Way, **more: Any) -> dict[str, Row]:
    first = Way("the best", lambda: 2.0, error=lambda made: made / 100)
    return {r.way: r for r in measure(Case(WORK, [first, *ways], **more), 2, False)}


def broken() -> object:
    raise ValueError("it broke\nand told more")


def test_numbers_are_against_the_first_way() -> None:
    found = rows(Way("ours", lambda: 3.0, error=lambda made: made / 100), amount=6.0, unit="B/s")
    first, own = found["the best"], found["ours"]
    assert (first.kind, own.kind) == (BASELINE, OURS)
    assert (first.speed, first.error_ratio) == (1.0, 1.0)
    assert own.error == 0.03 and abs((own.error_ratio or 0) - 1.5) < 1e-12
    assert own.ms is not None and own.rate == 6.0 / (own.ms / 1e3) and own.unit == "B/s"
    assert own.speed and own.peak is None and [r.order for r in found.values()] == [0, 1]


def test_what_breaks_is_a_row_and_not_the_end() -> None:
    judged = Way("judged wrong", lambda: None, error=lambda made: made / 100)
    found = rows(Way("broken", broken), judged, Way("ours", lambda: 1.0))
    assert found["broken"].refused == "ValueError: it broke" and found["broken"].ms is None
    assert "TypeError" in (found["judged wrong"].refused or "")
    assert found["ours"].speed and found["ours"].refused is None


def test_a_baseline_that_breaks_leaves_times_without_speeds() -> None:
    case = Case(WORK, [Way("the best", broken), Way("ours", lambda: 1.0)])
    best, own = measure(case, 1, False)
    assert best.refused and own.ms and own.speed is None


def test_peers_say_why_they_are_not_there() -> None:
    def unfit() -> Any:
        raise Unfit("it turns adjacent pairs only")

    none = peer("n", "no_such_package", lambda: found("no_such_package.rope", "rope")[0])
    assert (none.run, none.kind, none.why) == (None, PEER, "not installed")
    other = peer("n", "json", lambda: found("json", "no_such_function")[0])
    assert other.run is None and "json has no no_such_function" in other.why
    assert peer("n", "", unfit).why == "it turns adjacent pairs only"
    assert "ValueError: it broke" in peer("n", "", broken).why
    assert rows(none)["n"].refused == "not installed"
    there = peer("n", "json", lambda: found("json", "dumps")[0])
    assert there.run is not None and not there.why
