"""How alike the vectors of two positions are: the picture of what is put into embeddings.

A row for each of some positions, a column for each of the same: the cosine of what the part adds to
embeddings there, or multiplies them by. Learned ones are shown at fresh weights.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Scheme
from longitude.inspection.lengths import default_length
from longitude.inspection.terms import SEED
from longitude.viz import figures as draw

SHOWN, CELL = 32, 8  # positions, and pixels for each
DIMS = Dims(dim=512, heads=8, head_dim=64)
TITLE = "Likeness of positions (cosine of their vectors)"


def likeness(scheme: Scheme) -> tuple[list[int], Float[Tensor, "n n"]]:
    """Some positions, and the cosine between the vectors of each two."""
    assert scheme.embed is not None
    drawn = default_length(scheme)
    reach = getattr(scheme.embed, "reach", getattr(scheme.embed, "length", None)) or drawn
    step = max(1, min(reach, drawn) // SHOWN)
    at = torch.arange(SHOWN) * step
    rng = torch.Generator().manual_seed(SEED)
    weights = scheme.embed.init(DIMS, rng)
    still, one = torch.zeros(1, SHOWN, DIMS.dim), torch.ones(1, SHOWN, DIMS.dim)
    added = scheme.embed.embed(still, at[None], weights)
    codes = added if added.any() else scheme.embed.embed(one, at[None], weights)
    unit = torch.nn.functional.normalize(codes[0], dim=-1)
    return at.tolist(), unit @ unit.T


def chart(scheme: Scheme, put: draw.Put) -> Any:
    """The cosines as coloured squares."""
    at, cosines = likeness(scheme)
    cells = [
        {"a": a, "b": b, "cosine": round(float(cosines[i, j]), 3)}
        for i, a in enumerate(at)
        for j, b in enumerate(at)
    ]
    ticks = [at[round(s * (len(at) - 1) / 4)] for s in range(5)]
    axis = alt.Axis(values=ticks, labelAngle=0, labelExpr=draw.SHORT, labelOverlap=True)
    x = alt.X("b:O", title="position", sort=at, axis=axis)
    y = alt.Y("a:O", title="position", sort=at, axis=axis)
    legend = alt.Legend(title="cosine", gradientLength=120)
    least = min(0.0, *(cell["cosine"] for cell in cells))
    scale = alt.Scale(scheme="viridis", domain=[least, 1])
    shade = alt.Color("cosine:Q", scale=scale, legend=legend)
    drawn = alt.Chart(put(cells)).mark_rect().encode(x, y, shade)
    return drawn.properties(title=TITLE, width=SHOWN * CELL, height=SHOWN * CELL)
