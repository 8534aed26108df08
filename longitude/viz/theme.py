"""Colours, dashes and Vega-Lite's configuration, for light and dark pages.

The palette is Okabe and Ito's, which colour-blind readers can distinguish, with lighter variants on
dark; index 0 is grey, the baseline's. Specs name no colours, so one spec serves both themes: marks
take theirs from the ranges and styles of `config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, monospace"
LIGHT = ("#6b6b6b", "#0072B2", "#D55E00", "#009E73", "#B4508B", "#C98500", "#3A9BD9", "#6A4FB3")
DARK = ("#a8a8a8", "#5AA9E6", "#F08A4B", "#3CC79B", "#E59AC4", "#F0B93A", "#8FD0F5", "#A895E8")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
SCHEMES = (1, 4, 3)  # colours of schemes side by side: blue, pink and green
ORDINAL = (1, 4, 3, 6, 5)  # of heads, and of what scaling does to a rotary pair
PAST = 2  # orange: past the trained window, and nothing else
INK = ("#262422", "#e8e6e3")  # in light and in dark, as the rest
SOFT, LINE = ("#6d6964", "#a9a6a1"), ("#e9e5e0", "#3a3836")
DROPPED, HIDDEN = ("#d9d4cd", "#3b3836"), ("#e9e6e2", "#2c2a28")
HEAT = (["#f6efe8", "#bcd5e6", "#5f9fcb", "#005f96"], ["#2b2927", "#2c4a60", "#3f82b3", "#9ad2f7"])
RAMP, SHADE = ("#fbe3d3", "#4a3326"), (0.09, 0.13)  # past the window: cells, and the background


def stroke(index: int) -> tuple[int, int]:
    """Colour and dash of the method with this index; the first is grey."""
    around = len(LIGHT) - 1
    return (0, 0) if index == 0 else (1 + (index - 1) % around, (index - 1) // around % len(DASHES))


def dashes(indices: Sequence[int]) -> list[list[int]]:
    """The dash of each method."""
    return [DASHES[stroke(n)[1]] for n in indices]


def config(category: Sequence[int] = SCHEMES, dark: bool = False) -> dict[str, Any]:
    """Vega-Lite's configuration; `category` are the palette's indices of schemes or methods."""
    palette = DARK if dark else LIGHT
    ink, soft, line = INK[dark], SOFT[dark], LINE[dark]
    text = {"labelColor": soft, "titleColor": soft, "titleFontWeight": "normal"}
    sizes = {"labelFontSize": 11.5, "titleFontSize": 12, "titlePadding": 10, "labelPadding": 6}
    placed = {"anchor": "start", "frame": "group"}
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {**text, **sizes, "gridColor": line, "domainColor": line, "tickColor": line},
        "legend": {"labelColor": ink, "titleColor": soft, "labelFont": MONO},
        "title": {"color": ink, "subtitleColor": soft, "fontSize": 15, **placed},
        "text": {"color": ink},
        "rule": {"color": soft},
        "range": {
            "category": [palette[n] for n in category],
            "ordinal": [palette[n] for n in ORDINAL],
            "diverging": [DROPPED[dark], palette[0], palette[1], palette[PAST]],  # of tokens
            "heatmap": HEAT[dark],
            "ramp": [RAMP[dark], palette[PAST]],
        },
        "style": {
            "past": {"color": palette[PAST], "opacity": SHADE[dark]},
            "hidden": {"color": HIDDEN[dark]},
            "faint": {"color": palette[0]},
            "better": {"color": palette[1]},
            "worse": {"color": palette[PAST]},
        },
    }


def method_config(count: int, first: int = 0, dark: bool = False) -> dict[str, Any]:
    """The configuration for so many methods; the first is the baseline's grey if `first` is 0."""
    return config([stroke(first + n)[0] for n in range(count)], dark)
