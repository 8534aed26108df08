"""Decay: what a scheme does to a key's score as its distance r from the last query grows.

- rotation: the mean cosine (1/h) Σ_t cos(r θ_t) over the h rotary pairs, which is the score of a
  query with a key that says the same, next to its score at r = 0;
- bound: the mean of |S_1|, …, |S_h| with S_j = Σ_(t<j) e^(i r θ_t). By Abel's transformation a
  score of pairs h_t = q_t k*_t is at most max |h_(t+1) - h_t| times their sum (Su et al. 2021,
  section 3.4.3): an upper bound, which itself stops falling;
- bias: its mean over heads, for content of zeros;
- embedding: the cosine between the vectors of the two positions.

Remaps, frequencies, decays of pairs and position policies are in r θ_t as the scheme has them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.inspection.curves import sample
from longitude.inspection.rows import Curve
from longitude.inspection.score_variance import Field

EVERY = 65_536  # distances that are all computed; of more, some between each two rows
WITHIN = 256
AT_ONCE = 8192
FLAT = 1e-6
Values = Float[Tensor, " _"]
Tokens = Int[Tensor, " #n"]


def decay(field: Field, reach: int) -> tuple[Curve, ...]:
    """A curve for each thing that the scheme has, over the first `reach` tokens."""
    known: dict[str, Callable[[Field, Tokens, Tokens], Values]] = {}
    known |= {"rotation": rotation, "bound": bound} if field.scheme.rotary else {}
    known |= {"bias": bias} if field.scheme.bias else {}
    known |= {"embedding": embedding} if field.scheme.embed else {}
    edges = sample(reach, even=False)[: -1 if reach > 2 else None]  # the last has one distance
    r = torch.arange(reach) if reach <= EVERY else _some(edges, reach)
    return tuple(
        _curve(name, edges, r, _values(field, make, r, reach)) for name, make in known.items()
    )


def rotation(field: Field, i: Tokens, j: Tokens) -> Values:
    """The mean cosine over rotary pairs."""
    return field.turns(i, j)[0].mean(-1)


def bound(field: Field, i: Tokens, j: Tokens) -> Values:
    """The mean size of the partial sums of Abel's transformation."""
    return torch.complex(*field.turns(i, j)).cumsum(-1).abs().mean(-1)


def bias(field: Field, i: Tokens, j: Tokens) -> Values:
    """The mean bias over heads."""
    return field.added(i, j, blank=True).mean(-1)


def embedding(field: Field, i: Tokens, j: Tokens) -> Values:
    """The cosine between two positions' vectors."""
    return torch.cosine_similarity(field.codes(i), field.codes(j), -1)


def _values(
    field: Field, make: Callable[[Field, Tokens, Tokens], Values], r: Tokens, reach: int
) -> Values:
    """A curve at these distances from the last query; nan where it sees no key."""
    last = torch.tensor([reach - 1])
    found = [make(field, last, reach - 1 - part) for part in r.split(AT_ONCE)]
    return torch.cat(found).where(field.seen(last, reach - 1 - r), torch.nan)


def _curve(name: str, edges: list[int], r: Tokens, values: Values) -> Curve:
    places = torch.searchsorted(r, torch.tensor([*edges[1:], int(r[-1]) + 1]))
    bins = [values[a:b] for a, b in pairwise([0, *places.tolist()])]
    means = torch.stack([part.nanmean() for part in bins])
    found = means[~means.isnan()]
    close = FLAT * float(found.max() - found.min())  # a curve that goes flat has got there at once
    low = int((means <= found.min() + close).nonzero()[0])
    shown = values[~values.isnan()]
    below = r[values < 0]
    steps = values.diff()[r.diff() == 1]
    steps = steps[~steps.isnan()]
    rows = tuple(
        (edge, None if mean != mean else mean)
        for edge, mean in zip(edges, means.tolist(), strict=True)
    )
    return Curve(
        name=name,
        rows=rows,
        start=float(shown[0]),
        least=float(means[low]),
        falls_to=edges[low],
        last=float(found[-1]),
        negative=int(below[0]) if len(below) else None,
        rises=float((steps > 0).double().mean()) if len(steps) else 0.0,
    )


def _some(edges: list[int], reach: int) -> Tokens:
    """Distances between each two edges, evenly spread."""
    found = [
        a + s * (b - a) // min(b - a, WITHIN)
        for a, b in pairwise([*edges, reach])
        for s in range(min(b - a, WITHIN))
    ]
    return torch.tensor(found)
