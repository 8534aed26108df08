"""What the charts of `longitude extend` are made of: axes, rules, colours, and a document around
them that has its rows under one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from longitude.eval.stats import Interval
from longitude.viz.extend_section import Section
from longitude.viz.extend_theme import dashes

ROWS = "rows"  # the name of a chart's data
COUNT = "format(datum.value, ',')"
CHOSEN = {"name": "chosen", "value": None}  # the label that is pointed at: the others grow faint
TESTED = "!chosen || chosen == datum.label"
HEIGHT, CELL = 300, 22
NARROW = 420  # pictures that have no room for names
STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8)  # numbers on an axis of equal ratios, times powers of ten
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A picture with its name, its heading, what one reads off it, and its rows."""

    name: str
    title: str
    reading: str
    spec: dict[str, Any]
    rows: Rows
    measure: str
    label: str | None = None  # of the one method that it is of


def document(layers: Sequence[Any], rows: Rows, height: int = HEIGHT) -> dict[str, Any]:
    """A document as wide as its box; its rows go by one name."""
    spec = alt.layer(*layers).to_dict(validate=False)
    spec.pop("config", None)
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "resize": True}}
    return {
        **spec,
        **size,
        "params": [CHOSEN],
        "datasets": {**spec.get("datasets", {}), ROWS: rows},
    }


def across(rows: Rows, title: str, log: bool = True) -> alt.X:
    scale = alt.Scale(type="log", base=2, nice=False, padding=12) if log else alt.Scale(nice=False)
    lengths = sorted({r["length"] for r in rows if "length" in r})
    ticks: dict[str, Any] = {"values": lengths} if lengths else {"tickCount": 6}
    axis = alt.Axis(labelExpr=COUNT, labelOverlap=True, grid=False, **ticks)
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def upward(title: str, name: str) -> alt.Y:
    return alt.Y(f"{name}:Q", title=title, axis=alt.Axis(tickCount=5))


def losses(rows: Rows) -> alt.Y:
    """Equal ratios look equal; there are none to 0. The means decide what is in view: an interval
    of few documents may be so wide that nothing else would be seen."""
    means = [r["mean"] for r in rows]
    low = max(min(r["low"] for r in rows), 0.85 * min(means))
    high = min(max(r["high"] for r in rows), 1.25 * max(means))
    ticks = [s * 10.0**e for e in range(-4, 5) for s in STEPS]
    scale, look = alt.Scale(zero=False, domain=[low, high], clamp=True), {"tickCount": 5}
    if low > 0 and high > 2 * low:
        low, high = low / 1.05, high * 1.05
        scale = alt.Scale(type="log", domain=[low, high], nice=False, clamp=True)
        look: dict[str, Any] = {"values": [t for t in ticks if low <= t <= high]}
    axis = alt.Axis(format=".3~g", labelOverlap=True, **look)
    return alt.Y("mean:Q", title="loss (nats a token)", scale=scale, axis=axis)


def window_rule(section: Section, rows: Rows) -> list[Any]:
    at, xs = section.subject.trained, [r["x"] for r in rows]
    if not min(xs) <= at <= max(xs):
        return []
    data = alt.Chart(alt.InlineData([{"x": at, "name": f"trained window {at:,}"}]))
    side: Any = "left" if at == min(xs) else "right" if at == max(xs) else "center"
    words = data.mark_text(baseline="bottom", fontSize=11, dy=-5, align=side)
    return [
        data.mark_rule(strokeDash=[4, 4]).encode(alt.X("x:Q")),
        words.encode(alt.X("x:Q"), text="name:N", y=alt.value(0)),
    ]


def level_rule(section: Section) -> Any:
    data = alt.Chart(alt.InlineData([{"high": section.subject.trained}]))
    return data.mark_rule(strokeDash=[4, 4]).encode(alt.Y("high:Q"))


def coloured(section: Section) -> alt.Color:
    return alt.Color("label:N", scale=alt.Scale(domain=[*section.labels]), legend=None)


def dashed(section: Section) -> alt.StrokeDash:
    scale = alt.Scale(domain=[*section.labels], range=dashes(len(section.labels)))
    return alt.StrokeDash("label:N", scale=scale, legend=None)


def faint(full: float = 1.0, faint: float = 0.12) -> Any:
    """How strong a mark is: all of them, or the chosen one alone."""
    return _strength([{"test": TESTED, "value": full}], faint)


def band(section: Section) -> Any:
    """How strong an interval is: of few methods, a shade; of many, seen when one is chosen."""
    shade = 0.14 if len(section.labels) <= 3 else 0
    chosen = {"test": "chosen == datum.label", "value": 0.22}
    return _strength([chosen, {"test": "!chosen", "value": shade}], 0)


def name_beside() -> Any:
    """How strong a name beside a dot is: unseen where there is no room for it."""
    return _strength([{"test": f"width > {NARROW} && ({TESTED})", "value": 1}], 0)


def _strength(conditions: list[Any], otherwise: float) -> alt.OpacityValue:
    """As a channel at once: altair takes long to make one of a plain mapping."""
    return alt.OpacityValue(otherwise, condition=conditions)


def interval(value: Interval) -> dict[str, Any]:
    return {"mean": value.mean, "low": value.low, "high": value.high, "n": value.n}


def tips(rows: Rows) -> list[alt.Tooltip]:
    named = [name for name in rows[0] if not (name == "x" and "length" in rows[0])]
    look: dict[str, Any] = {"format": ",.4~f"}
    numbers = ("mean", "low", "high", "x")
    return [
        alt.Tooltip(f"{n}:{'N' if n == 'label' else 'Q'}", **(look if n in numbers else {}))
        for n in named
    ]
