"""Chooses a model's device and dtype where the user leaves them open, and silences transformers.

On CUDA a model gets the dtype of its file. On a CPU it gets float32, which every CPU runs well, or
bfloat16 if the file is bfloat16 (so nothing is lost) and this CPU has instructions for it: without
them bfloat16 is a hundred times slower.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path

import torch

from longitude.core.validate import UserError, shown

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # CPU flags on x86 (the first two) and on Arm
NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"  # if set, no Hub bot is asked to convert files


def device_of(wanted: str | torch.device) -> torch.device:
    """Return the device of this name; `auto` is CUDA if available. Raise if it is not here."""
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
    """Return the dtype to load in, and why. `own` is the file's, or None if mixed or unknown."""
    if wanted != "auto":
        dtype = DTYPES.get(wanted) if isinstance(wanted, str) else wanted
        if dtype is None or dtype not in DTYPES.values():
            raise UserError(f"no dtype is called {shown(wanted)}: use auto or {', '.join(DTYPES)}.")
        return dtype, "as requested"
    if device.type != "cpu":
        return (own, "the file's own") if own else (torch.bfloat16, "the file has no single dtype")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if own != torch.bfloat16 or distributed:  # ranks must agree, whatever CPUs they run on
        return torch.float32, "the default on a CPU"
    if has_bfloat16():
        return torch.bfloat16, "the file's own, for which this CPU has instructions"
    return torch.float32, "this CPU has no instructions for the file's own bfloat16"


@functools.cache
def has_bfloat16() -> bool:
    """Whether Linux lists instructions for bfloat16 products for this CPU. A timing could choose
    another dtype from one run to the next, and results are stored by dtype."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return not flags.isdisjoint(BFLOAT16)


@contextmanager
def quiet_transformers(*, bars: bool) -> Iterator[None]:
    """Silence logged warnings and, unless `bars`, progress bars; send nothing to the Hub."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    def switch_bars(on: bool) -> None:
        with warnings.catch_warnings():  # by huggingface_hub, if the environment sets this already
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
            # the progress bar of GGUF files is plain tqdm, which only checks the stream
            stack.enter_context(redirect_stderr(io.StringIO()))
            switch_bars(False)
        yield
