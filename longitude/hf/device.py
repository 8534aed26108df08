"""Which device and which type of numbers a model is loaded in, where the user leaves it open.

On CUDA a model takes the type of its own file. On a CPU it takes float32, which every CPU is good
at; bfloat16 only where the file is bfloat16 itself, so that nothing is lost, and where this CPU is
faster with it: some have instructions for it, others are a hundred times slower.

transformers without its chatter: we say in one line what it says in pages, or raise.

While it is hushed it also asks no bot on the Hub to convert a checkpoint: nothing is sent anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from longitude.core.validate import UserError, shown

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
FASTER = 1.2  # how many times as fast bfloat16 must be: a tie goes to float32


def device_of(asked: str | torch.device) -> torch.device:
    """The device asked for, if there is one here; `auto` is CUDA where there is CUDA."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise UserError(
            f"no device is called {shown(asked)}: use auto, cpu, cuda or mps."
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device} was asked for, but the CUDA devices here are "
            f"{torch.cuda.device_count()}: use auto or cpu."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps was asked for, but there is none here: use auto or cpu.")
    return device


def dtype_of(
    asked: str | torch.dtype, own: torch.dtype | None, device: torch.device
) -> tuple[torch.dtype, str]:
    """The type to load in, and why; `own` is the file's, None where it is of many or unknown."""
    if asked != "auto":
        dtype = DTYPES.get(asked) if isinstance(asked, str) else asked
        if dtype is None or dtype not in DTYPES.values():
            raise UserError(f"no dtype is called {shown(asked)}: use auto or {', '.join(DTYPES)}.")
        return dtype, "asked for"
    if device.type != "cpu":
        return (own, "the file's own") if own else (torch.bfloat16, "the file has none")
    if own != torch.bfloat16:
        return torch.float32, "as always on a CPU"
    if bfloat16_is_faster():
        return torch.bfloat16, "the file's own, and faster here than float32"
    return torch.float32, "the file's own bfloat16 is no faster here"


@functools.cache
def bfloat16_is_faster() -> bool:
    """Whether this CPU multiplies and attends faster in bfloat16; timed once a process, shortly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where there are no instructions for it
        return FASTER * _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The least time of three for one small linear layer and one small attention."""
    x, w = torch.ones(32, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
    q = torch.ones(1, 4, 32, 64, dtype=dtype)

    def work() -> None:
        F.linear(x, w)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with torch.inference_mode():
        work()
        return min(_timed(work) for _ in range(3))


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


NO_BOT = "DISABLE_SAFETENSORS_CONVERSION"


@contextlib.contextmanager
def quiet_transformers(*, bars: bool) -> Iterator[None]:
    """No warnings logged, and no progress bars unless asked for; afterwards all is as it was."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    bot = os.environ.get(NO_BOT)
    levels = [(log, log.get_verbosity()) for log in (logging, hub)]
    for log, _ in levels:
        log.set_verbosity_error()
    os.environ[NO_BOT] = "1"
    try:
        with contextlib.nullcontext() if bars else _barless():
            yield
    finally:
        for log, level in levels:
            log.set_verbosity(level)
        if bot is None:
            del os.environ[NO_BOT]
        else:
            os.environ[NO_BOT] = bot


@contextlib.contextmanager
def _barless() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    # the bar of GGUF files is tqdm's own, which only looks at the stream
    with contextlib.redirect_stderr(io.StringIO()):
        _switch(False)
        try:
            yield
        finally:
            if shown:
                _switch(True)


def _switch(on: bool) -> None:
    """Bars on or off; huggingface_hub warns where an environment variable already decides."""
    from transformers.utils import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.enable_progress_bar() if on else logging.disable_progress_bar()
