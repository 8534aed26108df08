"""What the last query of a text sees, what a cache keeps for it, and what training never showed.

A rotary pair that completes less than one rotation in the trained window has seen the angles up to
window × θ and no others (Liu et al. 2023, arXiv:2310.05209). Rotated at θ' for a distance d, it is
inside that range while d θ' <= window θ; pairs that complete a rotation have seen every angle. So
the minimum of window × θ/θ' over slow pairs bounds d. For a bias, d is the distance in units of the
model's own slopes, and the window bounds it; embeddings are bounded by position, as far as their
table goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.core.scheme import Scheme
from longitude.hf.families.alibi import LINEAR, slopes
from longitude.inspection.curves import sample
from longitude.inspection.score_variance import positions, remapped_distance

DROPPED, HIDDEN, KNOWN, PAST = STATES = ("dropped", "hidden", "known", "past")
HEADS = 8  # whose slopes are compared
ROUNDING = 1e-9  # relative: 4096 × θ/θ' with a factor of exactly 4 is 16384
STEPS = 64  # probes between two samples in each round


class Run(NamedTuple):
    """Consecutive tokens, first to last, of one state."""

    first: int
    last: int
    state: str


class Keys(NamedTuple):
    """The tokens of a text as the last one sees them."""

    runs: tuple[Run, ...]
    kept: int  # tokens in a cache
    reach: int | None  # the largest distance (or position) before the first one past, if any is


def at_input(scheme: Scheme) -> bool:
    """Whether positions enter by an embedding alone, so that positions count and not distances."""
    return scheme.embed is not None and scheme.rotary is None


def bound(scheme: Scheme, own: Scheme, window: int, length: int, head_dim: int) -> float:
    """The largest distance that training has shown: infinite where it has shown all."""
    if scheme.rotary and own.rotary:
        new, old = (
            rope.inv_freq(rope.dim(head_dim), length) for rope in (scheme.rotary, own.rotary)
        )
        if new.shape != old.shape:
            return float(window)
        slow = (old * window < 2 * math.pi) & (new > 0)
        return (window * old[slow] / new[slow]).amin().item() if slow.any() else math.inf
    new, old = (next((b for b in s.bias if isinstance(b, LINEAR)), None) for s in (scheme, own))
    if new and old:
        return window * (slopes(old, HEADS) / slopes(new, HEADS)).amin().item()
    if at_input(scheme):
        rows = getattr(scheme.embed, "reach", getattr(scheme.embed, "length", window))
        return math.inf if rows is None else rows - 1.0  # the last position that has a vector
    flat = all(b.flat_beyond is not None and b.flat_beyond <= window for b in scheme.bias)
    return math.inf if flat and scheme.rotary is None else float(window)


def keys(scheme: Scheme, most: float, length: int) -> Keys:
    """The state of each token, in runs; `most` is the largest known distance, or the largest known
    position where positions enter at the input."""
    absolute = at_input(scheme)

    def state(tokens: Tensor) -> Tensor:
        at = positions(scheme, length, tokens)
        last = positions(scheme, length, torch.tensor(length - 1))
        distance = remapped_distance(scheme, last, at)
        code = torch.full_like(tokens, STATES.index(DROPPED))
        for area in scheme.areas():
            code[area.ever(last, at)] = STATES.index(HIDDEN)
        code[~distance.isnan()] = STATES.index(KNOWN)
        value = torch.where(distance.isnan(), distance, at.to(distance)) if absolute else distance
        code[value.abs() > most * (1 + ROUNDING)] = STATES.index(PAST)
        return code

    found = runs(state, length)
    past = [run.first if absolute else length - 1 - run.last for run in found if run.state == PAST]
    kept = sum(run.last - run.first + 1 for run in found if run.state != DROPPED)
    return Keys(found, kept, min(past) - 1 if past else None)


def runs(state: Callable[[Tensor], Tensor], length: int) -> tuple[Run, ...]:
    """Runs of tokens of one state: their ends are searched for between a few hundred samples."""
    samples = _samples(length)
    codes = state(samples)
    changes = (codes[1:] != codes[:-1]).nonzero()[:, 0]
    low, high, before = samples[changes], samples[changes + 1], codes[changes]
    while (high - low > 1).any():
        step = -(-(high - low) // STEPS)
        probes = low[:, None] + step[:, None] * torch.arange(STEPS + 1)
        probes = torch.minimum(probes, high[:, None])
        same = state(probes.flatten()).view_as(probes) == before[:, None]
        first = same.int().argmin(1)  # the first probe in another state
        high = probes.gather(1, first[:, None])[:, 0]
        low = torch.maximum(low, high - step)
    ends = [*low.tolist(), length - 1]
    starts = [0, *(n + 1 for n in low.tolist())]
    kinds = [*before.tolist(), int(codes[-1])]
    return tuple(Run(a, b, STATES[k]) for a, b, k in zip(starts, ends, kinds, strict=True))


@lru_cache(maxsize=64)
def _samples(length: int) -> Tensor:
    """Tokens, dense at both ends of a text, where states change."""
    near = sample(length)
    return torch.tensor(sorted({*near, *(length - 1 - n for n in near)}))
