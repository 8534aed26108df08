"""What a device can run, and launching Triton's kernels without looking their kernel up.

Kernels run on a CUDA device, or on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`, set
before Triton is first imported): thousands of times slower, for tests, and never chosen for a user.
Triton is no dependency: where it is missing, or the device too old, callers use the plain torch
reference.

Triton inspects every argument of every launch to find the kernel that was compiled for their types,
for which numbers are 1 or divide by 16, and for how pointers are aligned: that takes as long as a
small kernel. All of it follows from the tensors' shapes, strides and types, which the caller gives
as a key; a pointer that is not aligned takes the long path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, reduce
from importlib import import_module
from importlib.util import find_spec
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.core.validate import UserError

OLDEST = (8, 0)  # the first generation whose cores multiply bfloat16
HOPPER = (9, 0)  # before it, FlashAttention 2 is as fast as cuDNN
GLUON = ((3, 6), (3, 9))  # the first and the last version of Triton that were tried


def usable(x: Tensor) -> bool:
    """Whether kernels run on this tensor, outside a graph that is being traced."""
    return x.is_cuda and not torch.compiler.is_compiling() and triton_available(x.device)


@cache
def triton_available(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; its interpreter does not count."""
    if device.type != "cuda" or not installed():
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


class Device(NamedTuple):
    """What a device offers: our Triton kernels, cuDNN's attention as the fastest of torch's,
    FlashAttention 4, and our kernel of specialised warps."""

    type: str
    triton: bool = False
    cudnn: bool = False
    flash4: bool = False
    hopper: bool = False


def compiles_gluon(version: str) -> bool:
    """Whether a version of Triton is one whose Gluon, which is experimental, ours is written in."""
    return GLUON[0] <= tuple(int(n) for n in version.split(".")[:2]) <= GLUON[1]


@cache
def device_of(device: torch.device) -> Device:
    """The same for every call."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    cudnn = capability >= HOPPER and torch.backends.cudnn.is_available()
    triton, flash4, hopper = triton_available(device), False, False
    if capability == HOPPER:  # where they are faster, and the one that ours is written for
        with suppress(ImportError):  # the package of an older one may fail when it is imported
            flash4 = find_spec("flash_attn.cute") is not None
        hopper = triton and compiles_gluon(import_module("triton").__version__)
    return Device(device.type, triton, cudnn, flash4, hopper)


def require(where: Tensor | torch.device) -> None:
    """A sentence for a tensor or device that no kernel runs on."""
    device = where.device if isinstance(where, Tensor) else where
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and installed()
    if not (triton_available(device) if device.type == "cuda" else interpreted):
        raise UserError(
            f"Triton's kernels need a CUDA device of capability {OLDEST[0]}.{OLDEST[1]} and Triton "
            f"installed, and got a tensor on {device}: use the kernel's reference."
        )


MAX_COMPILED = 4096
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    given: tuple[Any, ...],
    tensors: Sequence[Tensor],
    key: tuple[Any, ...],
    constants: Callable[[], dict[str, Any]],
    pointers_first: bool = False,
) -> None:
    """Run a kernel over tensors, numbers and tuples of them.

    `tensors` are those of `given` that may not be aligned, or, with `pointers_first`, all tensors,
    which come before `given`: that takes less time. The first is on the device to run on. `key`
    says all that its numbers and constants follow from, but for those it is not specialized for.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(kernel, grid, given, tensors, key, constants, pointers_first)
    pointers = [x.data_ptr() for x in tensors]
    wanted, aligned = (kernel.fn, device, *key), reduce(or_, pointers) % 16 == 0
    first, pointers = (tensors, pointers) if pointers_first else ((), ())
    if aligned and (entry := _compiled.get(wanted)) is not None:
        made, rest, runtime = entry
        hooked = not runtime or getattr(runtime.launch_enter_hook, "calls", True)
        if hooked or getattr(runtime.launch_exit_hook, "calls", True):
            made[grid](*first, *given, *rest)
        else:  # the same, without the metadata that hooks would read
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            made.run(*grid, stream, made.function, made.packed_metadata, None, None, None,
                     *pointers, *given, *rest)  # fmt: skip
        return
    fixed = constants()
    made = kernel[grid](*first, *given, **fixed, enable_fp_fusion=True)
    if aligned and made is not None:  # the interpreter gives nothing
        if len(_compiled) >= MAX_COMPILED:
            _compiled.clear()
        rest = [fixed[name] for name in kernel.arg_names if name in fixed]
        _compiled[wanted] = made, rest, _runtime() if device.type == "cuda" else None


@cache
def _runtime() -> Any:
    """Triton's settings of launches, in the versions of which the way past them was tried."""
    triton = import_module("triton")
    return triton.knobs.runtime if compiles_gluon(triton.__version__) else None


Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


def shape(x: Tensor) -> Shape:
    """What a key says of a tensor."""
    return (x.shape, x.stride(), x.dtype)
