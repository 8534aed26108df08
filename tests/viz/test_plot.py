"""Plots in the terminal: an upright mark, numbers below their places, ends that y reaches."""

from __future__ import annotations

import io

from rich.console import Console

from longitude.viz.plot import Line, Plot, draw

LINE = Line("a line", [(1, 0.5), (64, 0.5)])
MARGIN = 8  # the numbers, and the axis


def drawn(plot: Plot, width: int = 48) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(plot, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_mark_stands_upright_at_its_place_and_is_named() -> None:
    plain, marked = drawn(Plot("t", "a", [LINE])), drawn(Plot("t", "a", [LINE], mark=("here", 22)))
    columns = [{n for n, c in enumerate(row[MARGIN:]) if c > " "} for row in marked[2:6]]
    assert columns == [{13}] * 4  # a third of 40 columns
    assert not any(row[MARGIN:].strip() for row in plain[2:6])
    assert marked[-1].split() == ["┊", "here"] and len(marked) == len(plain) + 1


def test_a_mark_outside_is_not_drawn() -> None:
    marked = drawn(Plot("t", "a", [LINE], mark=("here", 65)))
    assert not any(row[MARGIN:].strip() for row in marked[2:6])


def test_numbers_stand_below_their_places_as_far_as_they_have_room() -> None:
    plot = Plot("t", "a", [LINE], x_ticks=(22, 1, 64, 23))
    (row,) = [r for r in drawn(plot) if "22" in r]
    assert row.split() == ["1", "22", "64"]
    assert [row.index(n) - MARGIN for n in row.split()] == [0, 12, 38]


def test_y_reaches_its_ends_and_a_plot_its_height() -> None:
    rows = drawn(Plot("t", "a", [LINE], y_ends=(0, 1), height=7))
    assert rows[2].split()[0] == "1" and rows[8].split()[0] == "0" and "└" in rows[9]
    assert rows[5][MARGIN:].strip()  # the line, at one half
