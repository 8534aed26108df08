"""A launch whose kernel is known looks nothing up.

Triton looks at every argument of every launch to find the kernel that was compiled for their types,
for which of the numbers are 1 or divide by 16, and for how pointers are aligned: as long as a small
kernel takes. All of that follows from the tensors' shapes, strides and types, which the caller
gives as a key; a pointer that is not aligned goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from longitude.attention.triton.available import on_device

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
