"""What was measured of a checkpoint, in the terminal: every number stands where it belongs."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console

from longitude.inspection.rows import (
    Band,
    Bin,
    HeadRow,
    HeadTerms,
    LayerRow,
    Moved,
    QKTerms,
    ScoreStatistics,
    Term,
)
from longitude.viz.checkpoint import score_plots, show_scores

NEAR, FAR = Band(60, 1.5, 2.0, -3.25, 7.75, 0.75), Band(40, -1.0, 2.0, -9.5, 30.5, 0.25)
BINS = (Bin(0, NEAR), Bin(8, FAR))


def head(index: int, position: float, sink: float) -> HeadRow:
    return HeadRow(index, NEAR, FAR, position, sink, 12.0, Moved(8.5, 33.5, 44.5), BINS)


def measured() -> ScoreStatistics:
    layers = tuple(LayerRow(n, "rope()", (head(0, 0.5, 0.01), head(1, 0.0, 0.9))) for n in range(3))
    terms = QKTerms(
        0, 50, (HeadTerms(0, (Term("content–content", 9.0, 4.25),), Term("score", 1.0, 6.5)),)
    )
    return ScoreStatistics("a model", "rope()", 8, 16, 4, "a text", layers, terms, ("A note.",))


def printed(found: ScoreStatistics, width: int = 80) -> str:
    show_scores(found, console := Console(file=io.StringIO(), width=width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_number_is_printed() -> None:
    out = printed(measured())
    for text in ("-3.2 … 7.8", "-9.5 … 30.5", "8.5", "33.5", "44.5", "4.25", "6.50", "A note."):
        assert text in out, text
    line = next(line for line in out.splitlines() if line.strip().startswith("1 "))
    assert line.rstrip().endswith("▇") and "▄" in line  # a block a head: half, none; none, most
    said = " ".join(out.split())
    assert "3 of 6 heads use position" in said and "0.0, 1.0, 2.0." in said
    assert "3 leave 30% or more of their attention on the first token: 0.1, 1.1, 2.1." in said
    assert all(cell_len(line) <= 80 for line in out.splitlines())


def test_many_heads_take_several_lines() -> None:
    found = measured()
    rows = tuple(replace(row, heads=row.heads * 16) for row in found.layers)
    out = printed(replace(found, layers=rows, terms=None))
    assert out.count("▄") == 3 * 16 and out.count("▇") == 3 * 16
    assert all(cell_len(line) <= 80 for line in out.splitlines())


def test_what_was_not_measured_is_left_out() -> None:
    found = measured()
    rows = tuple(
        replace(row, heads=tuple(replace(h, past=None, moved=None) for h in row.heads))
        for row in found.layers
    )
    out = printed(replace(found, layers=rows, terms=None, trained=None))
    assert "bound" not in out and "past" not in out and "four terms" not in out


def test_attention_adds_up_to_all() -> None:
    _, plot = score_plots(measured())
    assert plot.mark == ("trained", 8.0)
    for line in plot.lines:
        assert [*line.points] == [(7, 0.75), (15, 1.0)]
