"""How the charts of `longitude extend` look: colours by theme, and a stroke for each method.

Okabe and Ito's colours, which the colour-blind can tell apart, lighter on a dark page; the
untouched model is grey. A spec names no colour of the theme, so that one spec serves both.
"""

from __future__ import annotations

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
LIGHT = ("#6b6b6b", "#0072B2", "#D55E00", "#009E73", "#B4508B", "#C98500", "#3A9BD9", "#6A4FB3")
DARK = ("#a8a8a8", "#5AA9E6", "#F08A4B", "#3CC79B", "#E59AC4", "#F0B93A", "#8FD0F5", "#A895E8")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
HEAT = {"light": ["#f6efe8", "#bcd5e6", "#5f9fcb", "#005f96"], "dark": ["#2b2927", "#2c4a60"]}
HEAT["dark"] += ["#3f82b3", "#9ad2f7"]


def place(index: int) -> tuple[int, int]:
    """Which colour and which dash the method with this index has; the first is grey."""
    around = len(LIGHT) - 1
    return (0, 0) if index == 0 else (1 + (index - 1) % around, (index - 1) // around % len(DASHES))


def colours(count: int, dark: bool = False) -> list[str]:
    """A colour for each of so many methods."""
    return [(DARK if dark else LIGHT)[place(n)[0]] for n in range(count)]


def dashes(count: int) -> list[list[int]]:
    """A dash for each of so many methods."""
    return [DASHES[place(n)[1]] for n in range(count)]


def config(count: int, dark: bool = False) -> dict[str, Any]:
    """Vega-Lite's configuration of a theme, for so many methods."""
    ink, soft, line = (
        ("#e8e6e3", "#a9a6a1", "#3a3836") if dark else ("#262422", "#6d6964", "#e9e5e0")
    )
    text = {"labelColor": soft, "titleColor": soft, "titleFontWeight": "normal"}
    sizes = {"labelFontSize": 11.5, "titleFontSize": 12, "titlePadding": 10}
    lines = {"gridColor": line, "domainColor": line, "tickColor": line, "labelPadding": 6}
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {**text, **sizes, **lines},
        "legend": {"labelColor": ink, "titleColor": soft, "labelFont": "ui-monospace, monospace"},
        "title": {"color": ink, "subtitleColor": soft, "anchor": "start", "fontSize": 15},
        "text": {"color": ink},
        "rule": {"color": soft},
        "range": {"category": colours(count, dark), "heatmap": HEAT["dark" if dark else "light"]},
    }
