"""The clock: ways take turns, ratios are taken within rounds, and short runs fill a reading."""

from __future__ import annotations

import pytest

from benchmarks.suites import timing as clock


class Faked:
    """A time that only runs when a way says so."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, ""

    def way(self, name: str, *takes: float):
        left = list(takes)

        def run() -> None:
            self.ran += name
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    time = Faked()
    monkeypatch.setattr(clock.time, "process_time", lambda: time.now)
    return time


def test_ways_take_turns_after_one_run_to_warm_up(faked: Faked) -> None:
    ways = {name: faked.way(name, 1.0) for name in "abc"}
    assert clock.readings(ways, 3, False) == {name: [1.0] * 3 for name in "abc"}
    assert faked.ran == "abc" + "abc" * 3


def test_a_speed_is_the_median_of_ratios_within_rounds(faked: Faked) -> None:
    # the machine is ten times as slow in the second round: both ways feel it
    a = faked.way("a", 9.0, 2.0, 20.0, 2.0)
    b = faked.way("b", 9.0, 1.0, 10.0, 4.0)
    found = clock.timed({"a": a, "b": b}, "a", 3, False)
    assert found["a"] == (2000.0, 1.0, 1.0, 1.0)
    assert found["b"] == (4000.0, 2.0, 0.5, 2.0)  # of 2, 2 and 1/2


def test_there_is_no_speed_without_the_baseline(faked: Faked) -> None:
    assert clock.timed({"a": faked.way("a", 1.0)}, "missing", 1, False)["a"].speed is None


def test_short_runs_fill_a_reading(faked: Faked) -> None:
    taken = clock.readings({"a": faked.way("a", 0.5)}, 1, False, fill=4.0)
    assert taken == {"a": [0.5]} and len(faked.ran) == 1 + 8
    faked.ran = ""
    clock.readings({"a": faked.way("a", 1e-9)}, 1, False, fill=4.0)
    assert len(faked.ran) == 1 + clock.MOST
