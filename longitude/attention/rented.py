"""Two kernels for one shape: the one that starts at once, until the one that must plan has paid.

cuDNN's attention is the fastest on Hopper, but plans each new shape, for 70 milliseconds. A text
is read at its own length once, a training step at the same length a million times. So a shape runs
on flash attention until what that took longer adds up to a plan, and on cuDNN from then on: as with
skis, who rents until the rent has come to the price never pays more than twice the best.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longitude.attention.cudnn import CUDNN, cudnn_for
from longitude.attention.operators import FLASH, Operator, Ran, operator_for

PLAN = 0.07  # seconds that a plan takes on an H200
LONGER = 1 / 315e12 - 1 / 554e12  # seconds that an operation of flash attention takes longer
PRICE = PLAN / LONGER  # operations
SHAPES = 4096  # whose rent is remembered


@dataclass(frozen=True)
class Rented:
    """Which of two operators runs a call: the planned one once its shape has paid for the plan."""

    ready: Operator
    planned: Operator
    price: float = PRICE
    paid: OrderedDict[tuple[Any, ...], float] = field(default_factory=OrderedDict)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
        """The forward of either; what its backward needs says which."""
        chosen = self._chosen(q, k, causal)
        ran = chosen.forward(q, k, v, causal, scale)
        return Ran(ran.out, ran.lse, (chosen, *ran.extra))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The backward of the one that ran forward."""
        chosen, *extra = ran.extra
        return chosen.backward(grad, q, k, v, Ran(ran.out, ran.lse, tuple(extra)), causal, scale)

    def _chosen(self, q: Tensor, k: Tensor, causal: bool) -> Operator:
        shape = (q.device, q.dtype, tuple(q.shape), k.shape[2], causal)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.planned if self.paid.get(shape, 0.0) >= self.price else self.ready
        paid = self.paid.pop(shape, 0.0)
        self.paid[shape] = paid + _operations(q, k, causal)
        if len(self.paid) > SHAPES:
            self.paid.popitem(last=False)
        return self.planned if paid >= self.price else self.ready


def _operations(q: Tensor, k: Tensor, causal: bool) -> float:
    """Of the two products."""
    return 4.0 * q.numel() * k.shape[2] * (0.5 if causal else 1.0)


def quickest_for(q: Tensor) -> Operator | None:
    """The operator for tiles of this tensor: on Hopper rented, elsewhere the one there is."""
    ready = operator_for(q)
    return HOPPER if ready is FLASH and cudnn_for(q) is not None else ready


_hopper = Rented(FLASH, CUDNN)
HOPPER = Operator(_hopper.forward, _hopper.backward)
