"""The loss of every training step as a picture: each step a dot, what they come to a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt

from longitude.viz.figures import BLUE, GREY, Put, document, inner
from longitude.viz.files import write_spec

WIDTH, HEIGHT = 560, 240
MEASURES = ("loss", "mean")


def write(losses: Sequence[float], last: int, title: str, path: Path) -> None:
    """Draw losses and the mean of the `last` ones into a file: .html, .png or .svg."""
    write_spec(spec(losses, last, title), title, path)


def spec(losses: Sequence[float], last: int, title: str) -> dict[str, Any]:
    """The picture as a Vega-Lite document."""
    rows = [
        {"step": n, "loss": loss, "mean": fmean(losses[max(0, n - last) : n])}
        for n, loss in enumerate(losses, 1)
    ]

    def body(put: Put) -> dict[str, Any]:
        data = put(rows)
        x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
        y = {"title": "loss (nats a token)", "scale": alt.Scale(zero=False, nice=True)}
        tips = [alt.Tooltip("step:Q"), *(alt.Tooltip(f"{n}:Q", format=".3f") for n in MEASURES)]
        dots = alt.Chart(data).mark_circle(color=GREY, size=14, opacity=0.7)
        line = alt.Chart(data).mark_line(color=BLUE, strokeWidth=2)
        layers = [
            dots.encode(x, alt.Y("loss:Q", **y), tooltip=tips),
            line.encode(x, alt.Y("mean:Q", **y)),
        ]
        head = {"text": title, "fontSize": 14, "offset": 12}
        return inner(alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)) | {"title": head}

    return document(body)
