"""What the last query of a text sees, what a cache keeps for it, and what training never showed.

A pair of dimensions that turns less than once inside the trained window has met the angles up to
window × θ and no others (Liu et al. 2023, arXiv:2310.05209). A rotation that turns it at θ' for a
believed distance d is inside what it knows while d θ' <= window θ; pairs that go full circle inside
the window know every angle. So the least window × θ/θ' over slow pairs bounds d. For a bias, d is
the distance it stands for in the model's own, and the window bounds it; vectors at the input are
known by position, as far as their table goes.
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

DROPPED, HIDDEN, KNOWN, PAST = "dropped", "hidden", "known", "past"
HEADS = 8  # whose slopes are compared
ROUNDING = 1e-9  # a hair beyond: 4096 × θ/θ' with a factor of exactly 4 is 16384
STEPS = 64  # into which the tokens between two looks are cut
STATES = (DROPPED, HIDDEN, KNOWN, PAST)


class Run(NamedTuple):
    """Neighbouring tokens, first to last, that are all alike."""

    first: int
    last: int
    state: str


class Keys(NamedTuple):
    """The tokens of a text, as the last one of it meets them."""

    runs: tuple[Run, ...]
    kept: int  # tokens in a cache
    reach: int | None  # the greatest distance (or position) before the first one past, if any is


def bound(scheme: Scheme, own: Scheme, window: int, length: int, head_dim: int) -> float:
    """The greatest believed distance that training has shown: infinite where all have been."""
    if scheme.rotary is None or own.rotary is None:
        return _by_bias(scheme, own, window)
    new, old = (
        s.rotary.frequencies.inv_freq(s.rotary.dim(head_dim), s.rotary.base, length)
        for s in (scheme, own)
        if s.rotary
    )
    if new.shape != old.shape:
        return float(window)
    slow = (old * window < 2 * math.pi) & (new > 0)
    return (window * old[slow] / new[slow]).amin().item() if slow.any() else math.inf


def at_input(scheme: Scheme) -> bool:
    """Whether a token is known by its position, not by its distance."""
    return scheme.embed is not None and scheme.rotary is None


def _by_bias(scheme: Scheme, own: Scheme, window: int) -> float:
    """Of a bias that is linear in the distance, the window in steps of its own; else the window."""
    new, old = (next((b for b in s.bias if isinstance(b, LINEAR)), None) for s in (scheme, own))
    if new and old:
        return window * (slopes(old, HEADS) / slopes(new, HEADS)).amin().item()
    if at_input(scheme):
        rows = getattr(scheme.embed, "reach", getattr(scheme.embed, "length", window))
        return math.inf if rows is None else rows - 1.0  # the last position that has a vector
    flat = all(b.flat_beyond is not None and b.flat_beyond <= window for b in scheme.bias)
    return math.inf if flat and scheme.rotary is None else float(window)


def keys(scheme: Scheme, most: float, length: int) -> Keys:
    """What becomes of each token, in runs; `most` is the believed distance that is still known, or
    the position where positions enter at the input."""
    absolute = at_input(scheme)

    def state(tokens: Tensor) -> Tensor:
        where = positions(scheme, length, tokens)
        last = positions(scheme, length, torch.tensor(length - 1))
        told = remapped_distance(scheme, last, where)
        code = torch.full_like(tokens, STATES.index(DROPPED))
        for area in scheme.areas():
            code[area.ever(last, where)] = STATES.index(HIDDEN)
        code[~told.isnan()] = STATES.index(KNOWN)
        told = torch.where(told.isnan(), told, where.to(told)) if absolute else told
        code[told.abs() > most * (1 + ROUNDING)] = STATES.index(PAST)
        return code

    found = runs(state, length)
    past = [run.first if absolute else length - 1 - run.last for run in found if run.state == PAST]
    kept = sum(run.last - run.first + 1 for run in found if run.state != DROPPED)
    return Keys(found, kept, min(past) - 1 if past else None)


def runs(state: Callable[[Tensor], Tensor], length: int) -> tuple[Run, ...]:
    """Runs of tokens of one state, whose ends are found by ever closer looks between the first few
    hundred."""
    looks = _looks(length)
    found = state(looks)
    changes = (found[1:] != found[:-1]).nonzero()[:, 0]
    low, high, before = looks[changes], looks[changes + 1], found[changes]
    while (high - low > 1).any():
        step = -(-(high - low) // STEPS)
        inside = torch.minimum(
            low[:, None] + step[:, None] * torch.arange(STEPS + 1), high[:, None]
        )
        same = state(inside.flatten()).view_as(inside) == before[:, None]
        at = same.int().argmin(1)  # the first look at another state
        high = inside.gather(1, at[:, None])[:, 0]
        low = torch.maximum(low, high - step)
    ends = [*low.tolist(), length - 1]
    starts = [0, *(n + 1 for n in low.tolist())]
    kinds = [*before.tolist(), int(found[-1])]
    return tuple(Run(a, b, STATES[k]) for a, b, k in zip(starts, ends, kinds, strict=True))


@lru_cache(maxsize=64)
def _looks(length: int) -> Tensor:
    """Tokens close to each other at both ends of a text, where things change."""
    near = sample(length)
    return torch.tensor(sorted({*near, *(length - 1 - n for n in near)}))
