"""What a length costs: tokens a second of prefill, milliseconds a token of decoding, peak memory.

A random text is read as reading.py reads one and written on through the cache, `length` tokens in
all. Time is the wall clock's, the device being waited for; decoding is the median of its steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.eval.prefill import decode_step as step
from longitude.eval.prefill import input_device, prefill, text_config

STATM = Path("/proc/self/statm")
EVERY = 0.002  # seconds between two looks at the memory
WARM = 64  # tokens read and written before the clock runs


@dataclass(frozen=True)
class Cost:
    """`peak` is the weights and all that stood beside them at once. On CUDA it is the most that was
    allocated; elsewhere the weights and by how much the process grew, looked at every few
    milliseconds: what it had free already is not seen."""

    prefill: float  # tokens a second
    decode: float  # milliseconds a token
    peak: int  # bytes


def cost(model: nn.Module, length: int, *, new: int = 16, seed: int = 0) -> Cost:
    """Read `length - new` random tokens and write `new`, behind a short run to warm up."""
    if not 1 <= new < length:
        raise UserError(
            f"a cost takes 1 new token or more and a prompt before them, but got {shown(new)} of "
            f"{shown(length)}: give a greater length."
        )
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(text_config(model).vocab_size, (length - new,), generator=rng)
    ids = ids[None].to(input_device(model))
    _run(model, ids[:, :WARM], min(new, 2))
    with _watched(model) as peak:
        read, steps = _run(model, ids, new)
    return Cost(ids.shape[1] / read, 1e3 * median(steps), peak())


def _run(model: nn.Module, ids: Int[Tensor, "1 n"], new: int) -> tuple[float, list[float]]:
    """Seconds of reading, and of each token behind it."""
    marks = [_now(ids.device)]
    *_, read = prefill(model, ids, keep_cache=True)
    marks.append(_now(ids.device))
    for _ in range(new):
        read = step(model, read.logits.argmax(-1), read)
        marks.append(_now(ids.device))
    taken = [after - before for before, after in pairwise(marks)]
    return taken[0], taken[1:]


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _watched(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Has the peak of memory, once the context is left."""
    device = input_device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    held = {p.data_ptr(): p.nbytes for p in model.parameters()}  # tied weights count once
    with _growth() as grown:
        yield lambda: sum(held.values()) + grown()


@contextmanager
def _growth() -> Iterator[Callable[[], int]]:
    """By how many bytes the process grew, at most."""
    before = most = _resident()
    done = Event()

    def look() -> None:
        nonlocal most
        while not done.wait(EVERY):
            most = max(most, _resident())

    watch = Thread(target=look, daemon=True)
    watch.start()
    try:
        yield lambda: most - before
    finally:
        done.set()
        watch.join()
        most = max(most, _resident())


def _resident() -> int:
    """Bytes of this process that are in memory; where the system does not say, the most ever."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
