"""The biases of a call as one table: a row a head, an entry a distance.

Making one takes a handful of small launches. Where nothing in it is learned (ALiBi, Sandwich) it is
made once for all calls that ask for the same distances; weights can be written to behind any
memo's back, so what is learned is made from them anew. Of T5's table only which row each distance
has is kept, and one launch reads them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.part import Bias, Weights
from longitude.ops.inputs import AttentionInputs, weights_of
from longitude.parts.distance_bias import ByDistance
from longitude.parts.rotary_tables import Memo, Tables

KEPT = 2**24  # numbers of all tables together


def table_of(
    p: AttentionInputs, first: int, last: int, reached: bool
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
    query = torch.empty(1, count, 1, 1, device=device)  # a bias of the distance asks its sizes only
    here = torch.empty(1, 1, dtype=torch.int64, device=device)
    values = []
    for part in bias:
        term = part.term(query, query, here, here, weights_of(part.name, weights), 1.0)
        assert isinstance(term, ByDistance)
        if term.rows is not None:
            values.append(term.rows[_entries(part, first, last, device)].mT.float())
            continue
        away = torch.arange(first, last + 1, device=device)[None]
        values.append(term.value(torch.arange(count, device=device)[:, None], away).float())
    return sum(values[1:], values[0]).expand(count, -1)


def _entries(part: Bias, first: int, last: int, device: torch.device) -> Tensor:
    """The row of each distance, kept unless a CUDA graph is recording it."""
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_entries_once.__wrapped__ if recording else _entries_once)(part, first, last, device)


@lru_cache(maxsize=64)
def _entries_once(part: Bias, first: int, last: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # what is kept may serve a training step
        return part.entry(torch.arange(first, last + 1, device=device))  # type: ignore[attr-defined]


def _ahead(table: Tensor) -> Tensor:
    return table.detach().flip(1).cummax(1).values.flip(1)


def _made(
    bias: tuple[Bias, ...], count: int, first: int, last: int, device: torch.device
) -> Tables:
    table = _sum(bias, count, first, last, device, {})
    return table, _ahead(table)


_kept = Memo(_made, KEPT)
