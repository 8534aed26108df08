"""Which kernels a device can run, and launches of Triton kernels that skip Triton's own lookup.

Kernels run on a CUDA device, or on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`, set
before Triton is first imported): thousands of times slower, for tests, and never chosen for a user.
Triton is not a dependency: where it is missing, or the device is too old, callers use the plain
torch reference.

Triton inspects every argument of every launch to find the kernel compiled for their dtypes, for
which integers are 1 or divisible by 16, and for the alignment of pointers. That takes as long as a
small kernel. All of it follows from the tensors' shapes, strides and dtypes, which the caller gives
as a key. A launch with an unaligned pointer goes through Triton's own launcher.
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

OLDEST = (8, 0)  # the first generation whose tensor cores support bfloat16
HOPPER = (9, 0)  # on older GPUs FlashAttention 2 is as fast as cuDNN
GLUON = ((3, 6), (3, 9))  # the oldest and newest tested versions of Triton


def usable(x: Tensor) -> bool:
    """Whether kernels can run on this tensor now: not while a compiler traces a graph."""
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
    """What a device supports: our Triton kernels, cuDNN's attention as the fastest one in torch,
    FlashAttention 4, and our warp-specialised Hopper kernel."""

    type: str
    triton: bool = False
    cudnn: bool = False
    flash4: bool = False
    hopper: bool = False


def compiles_gluon(version: str) -> bool:
    """Whether our Gluon kernels are tested with this version of Triton; Gluon is experimental."""
    return GLUON[0] <= tuple(int(n) for n in version.split(".")[:2]) <= GLUON[1]


@cache
def device_of(device: torch.device) -> Device:
    """What a device supports; memoised, so that every call gets the same answer."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    cudnn = capability >= HOPPER and torch.backends.cudnn.is_available()
    triton, flash4, hopper = triton_available(device), False, False
    if capability == HOPPER:  # both are faster here, and ours is written for Hopper
        with suppress(ImportError):  # the package of an older version may fail on import
            flash4 = find_spec("flash_attn.cute") is not None
        hopper = triton and compiles_gluon(import_module("triton").__version__)
    return Device(device.type, triton, cudnn, flash4, hopper)


def require(where: Tensor | torch.device) -> None:
    """Raise a UserError for a tensor or device that no kernel runs on."""
    device = where.device if isinstance(where, Tensor) else where
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and installed()
    if not (triton_available(device) if device.type == "cuda" else interpreted):
        raise UserError(
            f"Triton's kernels need a CUDA device of capability {OLDEST[0]}.{OLDEST[1]} and Triton "
            f"installed, but got a tensor on {device}: use another backend."
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
    """Run a kernel on tensors, numbers and tuples of them.

    `tensors` are the tensors of `given` that may be unaligned or, with `pointers_first`, all
    tensors, passed before `given`: that is faster. The first is on the device to run on. `key`
    determines the constants, and all numbers except those the kernel is not specialized on.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            return launch(kernel, grid, given, tensors, key, constants, pointers_first)
    pointers = [x.data_ptr() for x in tensors]
    cache_key, aligned = (kernel.fn, device, *key), reduce(or_, pointers) % 16 == 0
    first, pointers = (tensors, pointers) if pointers_first else ((), ())
    if aligned and (entry := _compiled.get(cache_key)) is not None:
        built, const_values, runtime = entry
        hooked = not runtime or getattr(runtime.launch_enter_hook, "calls", True)
        if hooked or getattr(runtime.launch_exit_hook, "calls", True):
            built[grid](*first, *given, *const_values)
        else:  # the same launch, without the metadata that hooks would read
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            built.run(*grid, stream, built.function, built.packed_metadata, None, None, None,
                      *pointers, *given, *const_values)  # fmt: skip
        return
    const_args = constants()
    built = kernel[grid](*first, *given, **const_args, enable_fp_fusion=True)
    if aligned and built is not None:  # the interpreter returns None
        if len(_compiled) >= MAX_COMPILED:
            _compiled.clear()
        const_values = [const_args[name] for name in kernel.arg_names if name in const_args]
        _compiled[cache_key] = built, const_values, _runtime() if device.type == "cuda" else None


@cache
def _runtime() -> Any:
    """Triton's launch settings, in versions where bypassing its launcher is tested; else None."""
    triton = import_module("triton")
    return triton.knobs.runtime if compiles_gluon(triton.__version__) else None


Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


def shape(x: Tensor) -> Shape:
    """What a launch key holds of a tensor."""
    return (x.shape, x.stride(), x.dtype)
