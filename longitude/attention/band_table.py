"""The biases of a call as one table: a row a head, an entry a distance.

Making one takes a handful of small launches. Where nothing in it is learned (ALiBi, Sandwich) it is
made once for all calls that ask for the same distances; weights can be written to behind any
memo's back, so what is learned is made from them anew.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.attention.problem import Problem, weights_of
from longitude.part import Bias, Weights
from longitude.parts.bias.distance import ByDistance
from longitude.parts.rotary.memo import Memo, Tables

KEPT = 2**24  # numbers of all tables together


def table_of(
    p: Problem, first: int, last: int, reached: bool
) -> tuple[Float[Tensor, "h r"], Float[Tensor, "h r"] | None]:
    """The sum of all biases at distances first … last, in float32, and, where it is asked how far
    they reach, the largest from each distance on."""
    sizes = (p.q.shape[1], first, last, p.q.device)
    learned = any(weights_of(part.name, p.weights) for part in p.scheme.bias)
    # what a CUDA graph is recording has no values yet that another call could use
    recording = p.q.is_cuda and torch.cuda.is_current_stream_capturing()
    if learned or recording or torch.is_inference_mode_enabled():
        table = _sum(p.scheme.bias, *sizes, p.weights)
        return table, _ahead(table) if reached else None
    return _kept(p.scheme.bias, *sizes)


def _sum(bias: tuple[Bias, ...], count: int, first: int, last: int, device: torch.device,
         weights: Weights) -> Tensor:  # fmt: skip
    away = torch.arange(first, last + 1, device=device)[None]
    heads, here = torch.arange(count, device=device)[:, None], away[:, :1]
    query = torch.empty(1, count, 1, 1, device=device)  # a bias of the distance asks its sizes only
    terms = [
        part.term(query, query, here, here, weights_of(part.name, weights), 1.0) for part in bias
    ]
    values = [t.value(heads, away).float() for t in terms if isinstance(t, ByDistance)]
    assert len(values) == len(bias)
    return sum(values[1:], values[0]).expand(count, -1)


def _ahead(table: Tensor) -> Tensor:
    return table.detach().flip(1).cummax(1).values.flip(1)


def _made(
    bias: tuple[Bias, ...], count: int, first: int, last: int, device: torch.device
) -> Tables:
    table = _sum(bias, count, first, last, device, {})
    return table, _ahead(table)


_kept = Memo(_made, KEPT)
