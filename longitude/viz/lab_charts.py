"""A lab run as charts, written in Vega-Lite: for each task its curves, and beside them its table.

The table is the key to the curves too: each scheme's stroke stands before its name. Colours are
those that the colour-blind can tell apart; past seven schemes, dashes tell them apart as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from longitude.training.lab.rows import Bin, Score, Spread, curves
from longitude.viz.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    VERMILION,
    Put,
    document,
    inner,
)
from longitude.viz.table import Board, boards, points, printable, round_positions, tidy

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, "#56B4E9", INK)
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
WORSE, BETTER = ["#fcf6f2", "#f3b48f"], ["#f4f8fb", "#94c9e6"]  # tints of losses, of accuracies
WIDTH, HEIGHT = 460, 300  # of a task's curves
COLUMN, ROW, ROOMY = 78, 24, 32  # of a table's cell, with many schemes and with few
STROKE = 26  # the length of the stroke before a scheme's name
COUNT = "format(datum.value, ',')"
CHOSEN: dict[str, Any] = {  # the scheme that is pointed at: the others grow faint
    "name": "chosen",
    "select": {"type": "point", "fields": ["label"], "on": "pointerover", "clear": "pointerout"},
}
FAINT: Any = {"condition": {"param": "chosen", "value": 1}, "value": 0.15}


def lab_spec(scores: Iterable[Score], title: str) -> dict[str, Any]:
    """Every task, one under the other, as a Vega-Lite document."""
    found = tidy(scores)
    every, bins = boards(found), curves(found)
    labels = [*dict.fromkeys(label for board in every for label in board.labels)]

    def body(put: Put) -> dict[str, Any]:
        rows = [Drawing(board, labels, put).row(bins) for board in every]
        head = {"text": printable(title), "fontSize": 18, "offset": 20}
        return {"title": head, "vconcat": rows, "spacing": 44}

    return _pointed_at(document(body))


class Drawing:
    """One board's charts, and what they share: colours and dashes."""

    def __init__(self, board: Board, labels: list[str], put: Put) -> None:
        self.board, self.put = board, put
        colours = [COLOURS[n % len(COLOURS)] for n in range(len(labels))]
        dashes = [DASHES[n // len(COLOURS) % len(DASHES)] for n in range(len(labels))]
        scale = alt.Scale(domain=labels, range=colours)
        self.colour = alt.Color("label:N", scale=scale, legend=None)
        scale = alt.Scale(domain=labels, range=dashes)
        self.dash = alt.StrokeDash("label:N", scale=scale, legend=None)

    def row(self, bins: Sequence[Bin]) -> dict[str, Any]:
        """The curves, if there are any, and the table beside them.

        Put together by hand: altair would copy every chart some ten times on the way.
        """
        board = self.board
        mine = [b for b in bins if board.by_loss and b.trained == board.trained]
        drawn = [*(self.by_position(mine) if mine else self.by_length()), self.table()]
        notes = [line for r in board.reasons() for line in textwrap.wrap(f"– {r}", 150)]
        title = {
            "text": f"{board.task}, trained at {board.trained:,}",
            "subtitle": [board.measure, *notes],
            "fontSize": 14,
            "subtitleFontSize": 11,
            "offset": 14,
        }
        return {"title": title, "hconcat": [*map(inner, drawn)], "spacing": 36, "center": True}

    def by_position(self, bins: list[Bin]) -> list[alt.LayerChart]:
        """Loss by position in the longest text."""
        rows = [
            _point(label, x, s)
            for label in dict.fromkeys(b.label for b in bins)
            for x, s in points(b for b in bins if b.label == label)
        ]
        ticks = round_positions(self.board.trained, max(b.past for b in bins))
        return [self._curves(rows, "position in the longest text (tokens)", ticks, size=9)]

    def by_length(self) -> list[alt.LayerChart]:
        """Values by test length; one length alone makes no curve."""
        cells = sorted(self.board.cells.values(), key=lambda c: c.length)
        rows = [_point(c.label, c.length, c.spread) for c in cells if c.spread]
        if len({r["x"] for r in rows}) < 2:
            return []
        return [self._curves(rows, "test length (tokens)", self.board.lengths, size=40)]

    def table(self) -> alt.LayerChart:
        """The board, tinted by value; before a scheme's name, its stroke."""
        board, rows, put = self.board, self._cells(), self.put
        x, y = self._columns(), self._names()
        cell: dict[str, Any] = {"stroke": "white", "strokeWidth": 2}
        empty = alt.Chart(put(r for r in rows if not r["seeds"])).mark_rect(color=PALE, **cell)
        full = alt.Chart(put(r for r in rows if r["seeds"]), name="cells").mark_rect(**cell)
        stroke = alt.Chart(put({"label": s} for s in board.labels)).mark_rule(strokeWidth=2.2)
        ends = {"x": alt.value(-STROKE - 6), "x2": alt.value(-6)}
        why = [_tip("label", "scheme"), _tip("length", kind="Q"), _tip("refused")]
        layers = [
            empty.encode(x, y, tooltip=why),
            full.encode(x, y, self._tint(), tooltip=_tips("length"), opacity=FAINT),
            stroke.encode(y, self.colour, self.dash, **ends),
            *(
                _words(put(r for r in rows if r["best"] == best), best, x, y)
                for best in (False, True)
            ),
        ]
        row = ROW if len(board.labels) > 8 else ROOMY
        size = {"width": COLUMN * len(board.lengths), "height": row * len(board.labels)}
        chart: Any = alt.layer(*layers).properties(**size)
        return chart.resolve_scale(color="independent")

    def _curves(
        self, rows: list[dict[str, Any]], title: str, ticks: Sequence[int], size: int
    ) -> alt.LayerChart:
        """A curve for each scheme, its seeds as a band; dots to point at."""
        data = self.put(rows)
        scale = alt.Scale(type="log", base=2, nice=False, padding=14)
        axis = alt.Axis(values=sorted(ticks), labelExpr=COUNT, labelOverlap=True)
        x, y = alt.X("x:Q", title=title, scale=scale, axis=axis), self._y(rows)
        band = alt.Chart(self.put(r for r in rows if r["seeds"] > 1)).mark_area(opacity=0.16)
        line = alt.Chart(data).mark_line(strokeWidth=2.2, strokeCap="round")
        dot = alt.Chart(data, name="dots").mark_circle(size=size, opacity=1)
        layers = [
            *self._trained([r["x"] for r in rows], x),
            band.encode(x, alt.Y("least:Q"), alt.Y2("greatest:Q"), self.colour),
            line.encode(x, y, self.colour, self.dash, opacity=FAINT),
            dot.encode(x, y, self.colour, opacity=FAINT, tooltip=_tips("x", title)),
        ]
        chart: Any = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
        return chart

    def _y(self, rows: list[dict[str, Any]]) -> alt.Y:
        axis = alt.Axis(titlePadding=10, tickCount=6)
        if not self.board.by_loss:
            scale = alt.Scale(domain=[0, 1])
            return alt.Y("mean:Q", title="exact answers", scale=scale, axis=axis)
        low, high = min(r["least"] for r in rows), max(r["greatest"] for r in rows)
        scale = alt.Scale()  # equal ratios look equal, but there are none to 0
        if low > 0:
            scale = alt.Scale(type="log", domain=[low / 1.06, high * 1.06], nice=False)
        return alt.Y("mean:Q", title="loss (nats a byte)", scale=scale, axis=axis)

    def _columns(self) -> alt.X:
        """Lengths above the table; every label has two lines, so that all stand level."""
        named = f"[datum.value == {self.board.trained} ? 'trained' : '', {COUNT}]"
        look: dict[str, Any] = {"labelAngle": 0, "labelPadding": 18, "domain": False}
        axis = alt.Axis(orient="top", labelExpr=named, ticks=False, **look)
        return alt.X("length:O", title="test length (tokens)", axis=axis)

    def _names(self) -> alt.Y:
        look: dict[str, Any] = {"labelPadding": STROKE + 12, "labelLimit": 280, "labelFontSize": 11}
        axis = alt.Axis(domain=False, ticks=False, **look)
        return alt.Y("label:N", title=None, sort=[*self.board.labels], axis=axis)

    def _tint(self) -> alt.Color:
        """The deeper, the worse (a loss; deepest at twice the best or more) or the better."""
        found = [c.spread.mean for c in self.board.cells.values() if c.spread]
        low, high, tints, kind = 0.0, 1.0, BETTER, "linear"
        if self.board.by_loss and found and min(found) > 0:
            low, high, tints, kind = min(found), max(*found, 2 * min(found)), WORSE, "log"
        scale = alt.Scale(type=kind, domain=[low, high], range=tints, interpolate="rgb")
        return alt.Color("mean:Q", scale=scale, legend=None)

    def _cells(self) -> list[dict[str, Any]]:
        board = self.board
        return [
            _point(c.label, c.length, c.spread)
            | {
                "length": c.length,
                "shown": f"{board.value(c.label, c.length)} {board.swing(c.label, c.length)}",
                "best": board.best(c.label, c.length),
                "refused": c.refused,
            }
            for c in board.cells.values()
        ]

    def _trained(self, xs: list[float], x: alt.X) -> list[Any]:
        """The trained window, upright, where it lies in the picture."""
        at = self.board.trained
        if not min(xs) <= at <= max(xs):
            return []
        data = alt.Chart(self.put([{"x": at, "name": f"trained {at:,}"}]))
        text = data.mark_text(baseline="bottom", color=INK, fontSize=10)
        return [
            data.mark_rule(color=GREY, strokeDash=[6, 4]).encode(x),
            text.encode(x, text="name:N", y=alt.value(-6)),
        ]


def _pointed_at(spec: dict[str, Any]) -> dict[str, Any]:
    """The document with the views named that choose a scheme; altair would warn of the parameter
    that they share, and takes names for its own."""
    layers = [v for row in spec["vconcat"] for chart in row["hconcat"] for v in chart["layer"]]
    named = {f"view-{n}": layer for n, layer in enumerate(layers) if "name" in layer}
    for name, layer in named.items():
        layer["name"] = name
    return spec | {"params": [CHOSEN | {"views": [*named]}]}


def _words(data: alt.NamedData, best: bool, x: alt.X, y: alt.Y) -> alt.Chart:
    weight: Any = "bold" if best else "normal"
    mark = alt.Chart(data).mark_text(color=INK, fontSize=11, fontWeight=weight)
    return mark.encode(x, y, text="shown:N")


def _point(label: str, x: float, s: Spread | None) -> dict[str, Any]:
    mean, least, greatest, n = s or (None, None, None, 0)
    return {"label": label, "x": x, "mean": mean, "least": least, "greatest": greatest, "seeds": n}


def _tip(field: str, title: str | None = None, kind: str = "N") -> alt.Tooltip:
    return alt.Tooltip(f"{field}:{kind}", title=title or field)


def _tips(field: str, title: str | None = None) -> list[alt.Tooltip]:
    numbers = [_tip(name, kind="Q") for name in ("mean", "least", "greatest", "seeds")]
    return [_tip("label", "scheme"), _tip(field, title, "Q"), *numbers]
