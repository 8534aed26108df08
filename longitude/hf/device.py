"""Device and dtype of a model where the user leaves them open, and transformers without its logs.

On CUDA a model gets the dtype of its own file. On a CPU it gets float32, which every CPU computes
well; bfloat16 only if the file is bfloat16 itself, so that nothing is lost, and this CPU is faster
with it: some have instructions for it, others are a hundred times slower.
"""

from __future__ import annotations

import functools
import io
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr

import torch
import torch.nn.functional as F

from longitude.core.validate import UserError, shown

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
MIN_SPEEDUP = 1.2  # of bfloat16 over float32: a tie goes to float32
NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"  # asks no bot on the Hub to convert a checkpoint


def device_of(wanted: str | torch.device) -> torch.device:
    """The device of this name, if there is one here; `auto` is CUDA if there is CUDA."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(
            f"no device is called {shown(wanted)}: use auto, cpu, cuda or mps."
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"device {device} is not among the {count} CUDA devices here: use auto.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps is not available here: use auto or cpu.")
    return device


def dtype_of(
    wanted: str | torch.dtype, own: torch.dtype | None, device: torch.device
) -> tuple[torch.dtype, str]:
    """The dtype to load in, and why; `own` is the file's, None if it has several or is unknown."""
    if wanted != "auto":
        dtype = DTYPES.get(wanted) if isinstance(wanted, str) else wanted
        if dtype is None or dtype not in DTYPES.values():
            raise UserError(f"no dtype is called {shown(wanted)}: use auto or {', '.join(DTYPES)}.")
        return dtype, "as requested"
    if device.type != "cpu":
        return (own, "the file's own") if own else (torch.bfloat16, "the file has none")
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if own != torch.bfloat16 or ranks:  # ranks must agree, and each would time it for itself
        return torch.float32, "the default on a CPU"
    if bfloat16_is_faster():
        return torch.bfloat16, "the file's own, and faster here than float32"
    return torch.float32, "the file's own bfloat16 is no faster here"


@functools.cache
def bfloat16_is_faster() -> bool:
    """Whether this CPU multiplies and attends faster in bfloat16; timed once per process."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # torch warns if there are no instructions for it
        return MIN_SPEEDUP * seconds_in(torch.bfloat16) < seconds_in(torch.float32)


def seconds_in(dtype: torch.dtype) -> float:
    """The least time of three for a small linear layer and a small attention, after a warm-up."""
    x, w = torch.ones(32, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    q = torch.ones(1, 4, 32, 64, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        F.linear(x, w)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        times.append(time.perf_counter() - start)
    return min(times[1:])


@contextmanager
def quiet_transformers(*, bars: bool) -> Iterator[None]:
    """No logged warnings, and no progress bars unless wanted; nothing is sent to the Hub."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    def switch_bars(on: bool) -> None:
        with warnings.catch_warnings():  # huggingface_hub's, if the environment already decides
            warnings.simplefilter("ignore")
            logging.enable_progress_bar() if on else logging.disable_progress_bar()

    with ExitStack() as stack:
        for log in (logging, hub):
            stack.callback(log.set_verbosity, log.get_verbosity())
            log.set_verbosity_error()
        before = {k: v for k, v in os.environ.items() if k == NO_CONVERSION}
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.pop, NO_CONVERSION, None)
        os.environ[NO_CONVERSION] = "1"
        if not bars:
            stack.callback(switch_bars, logging.is_progress_bar_enabled())
            # the bar of GGUF files is tqdm's own, which only looks at the stream
            stack.enter_context(redirect_stderr(io.StringIO()))
            switch_bars(False)
        yield
