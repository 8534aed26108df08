"""Whether Triton's kernels can run: on a CUDA device, or on a CPU under Triton's interpreter.

Triton is no dependency: where it is missing, or the device too old, every caller goes on by the
plain torch that stands beside its kernel. The interpreter (`TRITON_INTERPRET=1`, set before Triton
is first imported) runs a kernel's own text on CPU tensors, thousands of times slower: it is there
for tests, and never chosen for a user.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from longitude.fields import Mistake

OLDEST = (8, 0)  # the first generation whose cores multiply bfloat16


def usable(x: Tensor) -> bool:
    """Whether kernels are the way to go for this tensor, outside a graph that is being traced."""
    return x.is_cuda and not torch.compiler.is_compiling() and _runs_on(x.device)


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1" and installed()


def require(where: Tensor | torch.device) -> None:
    """A sentence for a tensor or device that no kernel runs on."""
    device = where.device if isinstance(where, Tensor) else where
    if not (_runs_on(device) if device.type == "cuda" else interpreted()):
        raise Mistake(
            f"Triton's kernels need a CUDA device of capability {OLDEST[0]}.{OLDEST[1]} and Triton "
            f"installed, and got a tensor on {device}: use the plain function beside the kernel."
        )


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Where a kernel over x has to be launched: Triton launches on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


@cache
def _runs_on(device: torch.device) -> bool:
    return installed() and torch.cuda.get_device_capability(device) >= OLDEST
