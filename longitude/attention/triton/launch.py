"""A launch whose kernel is known looks nothing up.

Triton looks at every argument of every launch to find the kernel that was compiled for their types,
for which of the numbers are 1 or divide by 16, and for how pointers are aligned: as long as a small
kernel takes. Here all numbers and types are one key, so a call that comes again has its kernel at
once; a pointer that is not aligned goes the long way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from longitude.attention.triton.available import on_device

KEPT = 4096
_known: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, programs: int, given: tuple[Any, ...], constants: Mapping[str, Any]
) -> None:
    """Run a kernel over tensors, numbers and tuples of them, on the first tensor's device."""
    pointers, key = 0, [kernel.fn, *constants.values()]
    first = next(x for x in _flat(given) if isinstance(x, Tensor))
    for x in _flat(given):
        if isinstance(x, Tensor):
            pointers |= x.data_ptr()
            key.append(x.dtype)
        else:
            key.append(x)
    wanted = (first.get_device(), *key)
    aligned = pointers % 16 == 0
    with on_device(first):
        if aligned and (found := _known.get(wanted)) is not None:
            rest = [constants[name] for name in kernel.arg_names if name in constants]
            found[programs, 1, 1](*given, *rest)
            return
        made = kernel[(programs,)](*given, **constants, enable_fp_fusion=True)
    if aligned and made is not None:  # the interpreter gives nothing
        if len(_known) >= KEPT:
            _known.clear()
        _known[wanted] = made


def _flat(given: tuple[Any, ...]) -> Iterator[Any]:
    for x in given:
        if isinstance(x, tuple):
            yield from _flat(x)
        else:
            yield x
