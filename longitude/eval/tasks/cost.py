"""What a length costs: prefill speed, decoding time, peak memory; and both speeds against the
baseline.

A random prompt is prefilled and continued through the cache, `length` tokens in all. Time is wall
clock with the device synchronised; decoding is the median of its steps. Runs of a method alternate
with runs of the baseline, each after a warm-up, so that neither a cold start nor a busy machine is
attributed to the method: `speed` (of prefill) and `decode_speed` are the median ratio over rounds,
with its range. In a process group all ranks take part; times and memory are the first rank's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.eval.records import COST, ResultKey
from longitude.eval.tasks import Metric, Session, Value

STATM = Path("/proc/self/statm")
SAMPLE_INTERVAL = 0.002  # seconds between two samples of the memory
WARM_UP = 64  # tokens prefilled before the clock runs
ROUNDS = 3  # at most: two that agree are enough
ROUND_STEPS = 5  # tokens decoded in each; with a remap the first two also rotate the prompt's keys
AGREE = 0.05  # relative difference of two timings of the same thing


def cost(
    model: Any,
    length: int,
    *,
    new: int = 16,
    baseline: Callable[[], AbstractContextManager[None]] | None = None,
) -> Value:
    """The numbers of a row: prefill `length - new` random tokens and decode `new`, `ROUND_STEPS` at
    most, after a warm-up run. With `baseline`, a context in which the model runs its own scheme,
    rounds alternate with it."""
    import torch

    from longitude.eval.perplexity import is_out_of_memory
    from longitude.eval.prefill import input_device, text_config
    from longitude.hf.ranks import ranks_of

    if not 1 <= new < length:
        raise UserError(
            f"a cost takes 1 new token or more and a prompt before them, but got {shown(new)} of "
            f"{shown(length)}: give a greater length."
        )
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config(model).vocab_size, (length - new,), generator=rng)
    ids = ids[None].to(input_device(model))
    _timed_run(model, ids[:, :WARM_UP], min(new, 2))
    with peak_memory(model) as peak:
        _timed_run(model, ids, 1)  # the first run at a length is cold: its time says nothing
    decoded, prefills, steps = min(new, ROUND_STEPS), [], []
    ratios: list[float] = []  # of seconds, the baseline's over ours
    decode_ratios: list[float] = []
    while baseline and len(ratios) < ROUNDS:
        try:
            with baseline():
                _timed_run(model, ids[:, :WARM_UP], 0)
                theirs, their_steps = _timed_run(model, ids, decoded)
        except Exception as error:  # a method may reach where the baseline can't
            if not is_out_of_memory(error) or ranks_of(model) is not None:
                raise
            break
        _timed_run(model, ids[:, :WARM_UP], 0)
        ours, our_steps = _timed_run(model, ids, decoded)
        prefills.append(ours)
        steps += our_steps
        ratios.append(theirs / ours)
        decode_ratios.append(median(their_steps) / median(our_steps))
        if len(ratios) > 1 and max(ratios) <= (1 + AGREE) * min(ratios):
            break
    if not ratios:
        ours, steps = _timed_run(model, ids, decoded)
        prefills = [ours]
    speeds = {"speed": ratios, "decode_speed": decode_ratios} if ratios else {}
    return {
        "prefill": ids.shape[1] / median(prefills),
        "decode": 1e3 * median(steps),
        "peak": peak(),
        "rounds": len(prefills),
        **{name: (median(r), min(r), max(r)) for name, r in speeds.items()},
    }


def _timed_run(model: Any, ids: Any, new: int) -> tuple[float, list[float]]:
    """Seconds of the prefill, and of each token after it."""
    import torch

    from longitude.eval.prefill import decode_step, prefill
    from longitude.hf.ranks import ranks_of

    def now() -> float:
        if ids.device.type != "cpu":
            torch.accelerator.synchronize(ids.device)
        return time.perf_counter()

    marks = [now()]
    *_, state = prefill(model, ids, keep_cache=True)
    marks.append(now())
    for _ in range(new):
        state = decode_step(model, state.logits.argmax(-1), state)
        marks.append(now())
    seconds, ranks = [after - before for before, after in pairwise(marks)], ranks_of(model)
    if ranks is not None:  # rounds end on all ranks at once
        seconds = ranks.from_first(seconds, ids.device)
    return seconds[0], seconds[1:]


@contextmanager
def peak_memory(model: Any) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory in bytes once the context is left: the weights
    and everything else at that moment. On CUDA it is the most that was allocated; elsewhere the
    weights plus the growth of the process, sampled every few milliseconds, which misses memory that
    the process had free already."""
    import torch

    from longitude.eval.prefill import input_device

    device = input_device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    weights = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())  # tied: once
    before = most = _resident_bytes()
    done = Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(SAMPLE_INTERVAL):
            most = max(most, _resident_bytes())

    sampler = Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield lambda: weights + most - before
    finally:
        done.set()
        sampler.join()
        most = max(most, _resident_bytes())


def _resident_bytes() -> int:
    """Resident memory of this process; its peak where the system gives no current number."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    from resource import RUSAGE_SELF, getrusage

    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """The cost at each length; the baseline's relative speed is 1."""
    rows = []
    for key in keys:
        new = key.protocol["new"]
        rounds = session.baseline_reaches and not session.is_baseline
        beside = session.baseline if rounds else None
        rows.append(cost(session.model, key.length, new=new, baseline=beside))
        if session.is_baseline:
            rows[-1] |= dict.fromkeys(("speed", "decode_speed"), (1.0, 1.0, 1.0))
    return rows


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _metric(name: str, **more: Any) -> Metric:
    shared: dict[str, Any] = {
        "measure": measure,
        "rows": COST,
        "selectable": False,
        "settings": lambda protocol: {"new": protocol.new_tokens},
        "seeded": False,
        "tie": 0.05,
        "help": "Prefill speed, decoding time and peak memory on the machine named below, in "
        "rounds that alternate with the baseline's; two less than 5 % apart count as tied.",
    }
    return Metric(name=name, **{**shared, **more})


METRICS = (
    _metric("prefill", title="Prefill", unit="tokens per second", better="higher", field="prefill",
            format=three_digits, order=90),
    _metric("decode", title="Decoding", unit="milliseconds per token", better="lower",
            field="decode", format=three_digits, order=91),
    _metric("memory", title="Peak memory", unit="bytes", better="lower", field="peak",
            format=_bytes, order=92),
)  # fmt: skip
