"""A few queries over unturned keys by our own kernel: when it suits, and what it is given.

`native` comes here for a call over contiguous positions, a cache for one step of decoding. What the
queries see is settled on the host, once for every layer of a step, and nothing is read back from
the device; a captured graph reads it anew each time, and `Sight.renew` takes it to a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longitude.core.scheme import Scheme
from longitude.ops.decode_plan import Head, Latest, Sight, sight
from longitude.ops.kernels.launch import usable
from longitude.ops.kv_segments import Line, Places, fits

MANY = 16  # queries of one sequence; more of them are a prefill
_latest = Latest(sight)


def refuses(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel does not run queries over keys, or None."""
    if not usable(q):
        return "it needs a CUDA device and Triton"
    if q.shape[2] > MANY:
        return f"it takes up to {MANY} queries"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "it has no gradients"
    if not fits(scheme):
        return "scores must be q·k alone, of keys that turn evenly"
    return _kernel().refuses(q, k, v)


def look(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, length: int, lines: Sequence[Line], at: Places
) -> Sight | None:
    """What queries at these places see of lines, made once for all layers that ask alike; None
    where the kernel can't run it."""
    if refuses(scheme, q, k, v) is not None:
        return None
    head = Head(q.shape[-1], length, torch.float32, q.device)
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    blocks = _kernel().blocks_for(max(q.shape[-1], v.shape[-1]), q.dtype, rows)
    return _latest(scheme, head, lines, at, blocks.keys)


def run(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, seen: Sight, scale: float,
    sinks: Tensor | None, padding: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention over what is seen."""
    pairs = "half" if scheme.rotary is None else scheme.rotary.pairs
    return _kernel().decode(q, k, v, seen, pairs, scale, sinks, padding)


@cache
def _kernel() -> Any:
    """The kernel's module, imported when it is wanted: Triton may be missing."""
    return import_module("longitude.ops.kernels.decode")
