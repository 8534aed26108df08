"""Whether Triton's kernels can run: on a CUDA device, or on a CPU under Triton's interpreter.

Triton is no dependency: where it is missing, or the device too old, every caller goes on by the
plain torch that stands beside its kernel. The interpreter (`TRITON_INTERPRET=1`, set before Triton
is first imported) runs a kernel's own text on CPU tensors, thousands of times slower: it is there
for tests, and never chosen for a user.

A launch whose kernel is known looks nothing up.

Triton looks at every argument of every launch to find the kernel that was compiled for their types,
for which of the numbers are 1 or divide by 16, and for how pointers are aligned: as long as a small
kernel takes. All of that follows from the tensors' shapes, strides and types, which the caller
gives as a key; a pointer that is not aligned goes the long way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longitude.core.validate import UserError

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
        raise UserError(
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


KEPT = 4096
_known: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    given: tuple[Any, ...],
    tensors: Iterable[Tensor],
    key: tuple[Any, ...],
    constants: Callable[[], dict[str, Any]],
) -> None:
    """Run a kernel over tensors, numbers and tuples of them.

    `tensors` are those of `given`, the first on the device to run on. `key` says all that its
    numbers and constants follow from, but for how many programs there are.
    """
    pointers, first = 0, None
    for x in tensors:
        first = x if first is None else first
        pointers |= x.data_ptr()
    assert first is not None
    wanted, aligned = (kernel.fn, first.device, *key), pointers % 16 == 0
    with on_device(first):
        if aligned and (found := _known.get(wanted)) is not None:
            made, rest = found
            made[programs, 1, 1](*given, *rest)
            return
        fixed = constants()
        made = kernel[(programs,)](*given, **fixed, enable_fp_fusion=True)
    if aligned and made is not None:  # the interpreter gives nothing
        if len(_known) >= KEPT:
            _known.clear()
        _known[wanted] = (made, [fixed[name] for name in kernel.arg_names if name in fixed])


def shape(x: Tensor) -> tuple[Any, ...]:
    """What a key says of a tensor."""
    return (x.shape, x.stride(), x.dtype)
