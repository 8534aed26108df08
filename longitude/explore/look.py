"""How the page's pictures look, in light and dark.

The schemes beside each other have three of the reports' colours, which the colour-blind can tell
apart; what lies past the trained window has a fourth, and nothing else has it.
"""

from __future__ import annotations

from longitude.explore.marks import Spec
from longitude.explore.seen import STATES
from longitude.report.extending.look import DARK, LIGHT, config

SCHEMES = (1, 4, 3)  # of the reports' colours: blue, pink and green
PASSED = 2  # orange
HEADS = (1, 4, 3, 6)
FAINT = {"light": "#d9d4cd", "dark": "#3b3836"}


def themes() -> dict[str, Spec]:
    """Vega-Lite's configuration in light and dark, the schemes' colours first."""
    return {name: _theme(name == "dark") for name in ("light", "dark")}


def _theme(dark: bool) -> Spec:
    every = DARK if dark else LIGHT
    look, name = config(1, dark), "dark" if dark else "light"
    states = dict(zip(STATES, (FAINT[name], every[0], every[1], every[PASSED]), strict=True))
    ranges = {
        "category": [every[n] for n in SCHEMES],
        "ordinal": [every[n] for n in HEADS],
        "diverging": [states[s] for s in STATES],
        "heatmap": look["range"]["heatmap"],
        "ramp": ["#4a3326", every[PASSED]] if dark else ["#fbe3d3", every[PASSED]],
    }
    past = {"color": every[PASSED], "opacity": 0.13 if dark else 0.09}
    styles = {"past": past, "hidden": {"color": FAINT[name], "opacity": 0.55}}
    return {**look, "range": ranges, "style": styles}
