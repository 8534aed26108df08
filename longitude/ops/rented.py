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

from longitude.ops.aten import CUDNN, FLASH, Operator, Ran, cudnn_for, operator_for

PLAN = 0.07  # seconds that a plan takes on an H200
FASTEST, FLASHES = 554e12, 315e12  # operations a second there: cuDNN's, flash attention's
BANDS, BIASED = 390e12, 280e12  # and of our own bands, without a bias and with one
SHAPES = 4096  # whose rent is remembered


@dataclass(frozen=True)
class Rent:
    """What each shape has paid so far, in operations that took longer than they would have."""

    price: float
    paid: OrderedDict[tuple[Any, ...], float] = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, speed: float) -> Rent:
        """For a kernel of so many operations a second."""
        return cls(PLAN / (1 / speed - 1 / FASTEST))

    def due(self, q: Tensor, shape: tuple[Any, ...], operations: float) -> bool:
        """Whether a shape still pays rent, which this call then does; not while a CUDA graph is
        recorded, which can't plan."""
        key = (q.device, q.dtype, *shape)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.paid.get(key, 0.0) < self.price
        paid = self.paid.pop(key, 0.0)
        self.paid[key] = paid + operations
        if len(self.paid) > SHAPES:
            self.paid.popitem(last=False)
        return paid < self.price


@dataclass(frozen=True)
class Rented:
    """Which of two operators runs a call: the planned one once its shape has paid for the plan."""

    ready: Operator
    planned: Operator
    rent: Rent

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Ran:
        """The forward of either; what its backward needs says which."""
        shape = (tuple(q.shape), k.shape[2], causal)
        due = self.rent.due(q, shape, operations(q, k.shape[2], causal))
        chosen = self.ready if due else self.planned
        ran = chosen.forward(q, k, v, causal, scale)
        return Ran(ran.out, ran.lse, (chosen, *ran.extra))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Ran, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The backward of the one that ran forward."""
        chosen, *extra = ran.extra
        return chosen.backward(grad, q, k, v, Ran(ran.out, ran.lse, tuple(extra)), causal, scale)


def operations(q: Tensor, keys: int, causal: bool) -> float:
    """Of the two products."""
    return 4.0 * q.numel() * keys * (0.5 if causal else 1.0)


def quickest_for(q: Tensor) -> Operator | None:
    """The operator for tiles of this tensor: on Hopper rented, elsewhere the one there is."""
    ready = operator_for(q)
    return HOPPER if ready is FLASH and cudnn_for(q) is not None else ready


_hopper = Rented(FLASH, CUDNN, Rent.of(FLASHES))
HOPPER = Operator(_hopper.forward, _hopper.backward)
