"""What commands share: their options, each with its help, and where output goes.

Data goes to stdout, everything else to stderr, with colours only on a terminal. The one progress
display is a bar on a terminal, elsewhere a line every 15 seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from typer import Argument, Option

from longitude.core.progress import Event, Progress
from longitude.core.validate import UserError

if TYPE_CHECKING:
    from rich.console import Console

LOG_INTERVAL = 15.0  # seconds between two lines of a log
# JSON leaves C1 control characters as they are, and a terminal may obey them
CONTROLS = {n: f"\\u{n:04x}" for n in range(0x7F, 0xA0)}
# options of training, then of a model
Text = Annotated[
    list[str] | None,
    Option(
        "--text",
        help="A file, a folder or a `datasets` name (owner/name:config:split); as often as you "
        "like. Without: the sources of the standard library and the help topics of this Python.",
    ),
]
Length = Annotated[int, Option(help="Tokens (bytes) in a training window.")]
Size = Annotated[str, Option(help="nano, tiny, small or 125m.")]
Steps = Annotated[int | None, Option(help="As suits the size if not given.")]
Batch = Annotated[int | None, Option(help="Sequences a step, over all processes.")]
Rate = Annotated[float | None, Option(help="The highest learning rate.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
ModelDevice = Annotated[str, Option("--device", help="auto, cpu, cuda or mps.")]
DType = Annotated[str, Option(help="auto (bfloat16 on CUDA), float32 or bfloat16.")]
Every = Annotated[float, Option(help="Seconds between two checkpoints.")]
Deterministic = Annotated[
    bool, Option("--deterministic", help="Bit for bit on CUDA too, at a price.")
]
Compile = Annotated[
    bool | None, Option("--compile/--no-compile", help="torch.compile; by default on CUDA.")
]
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a .gguf file, or tiny-rope, tiny-alibi or tiny-learned.",
    ),
]
ModelDType = Annotated[
    str,
    Option(
        "--dtype",
        help="auto (the file's own on CUDA; on a CPU float32, or the file's bfloat16 where that is "
        "faster), float32, bfloat16, float16 or float64.",
    ),
]
Target = Annotated[
    str | None,
    Option(
        help="Target length: 32768, 32k, or 4x the trained window. [default: 4x; 8x for tiny-rope]"
    ),
]
Served = Annotated[
    str | None, Option(help="Tokens to serve: 32768, 32k, 4x. [default: by the scheme's factor]")
]
Revision = Annotated[str | None, Option(help="A branch, tag or commit on the Hub.")]
Trust = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, Option("--json", help="Print data.")]
Quiet = Annotated[bool, Option("--quiet", help="Print nothing but the result.")]
SamplingSeed = Annotated[int | None, Option("--seed", help="Of the sampling.")]


def without(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A command's arguments but for those that are no options of its function."""
    return {name: value for name, value in given.items() if name not in names}


def names(text: str) -> tuple[str, ...]:
    """Names joined by commas; none of them where the text is none."""
    items = (item.strip() for item in text.split(","))
    return () if text.strip() == "none" else tuple(item for item in items if item)


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Integers, each once, in rising order."""
    try:
        return tuple(sorted({int(item) for item in text.split(",")})) if text else ()
    except ValueError:
        example = f"--{option} takes whole numbers, but got {text!r}: write 512,2048."
        raise UserError(example) from None


class Result(Protocol):
    """What every command's function returns."""

    def table(self, *, color: bool = False, width: int = 100) -> str: ...
    def to_json(self) -> Any: ...


def console() -> Console:
    """Stdout; rich leaves colours out under NO_COLOR and where it is no terminal."""
    from rich.console import Console

    return Console(highlight=False)


def print_result(result: Result, as_json: bool) -> None:
    """Print a result on stdout: its JSON, or its table as wide as the terminal."""
    if as_json:
        return print_json(result.to_json())
    out = console()
    print(result.table(color=out.color_system is not None, width=out.width))


def print_json(value: Any) -> None:
    """JSON on stdout, and nothing else."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    print(text.translate(CONTROLS))


def say(message: str) -> None:
    """A line on stderr: for the person, not for the pipe."""
    print(message, file=sys.stderr)


@contextmanager
def display(quiet: bool = False, resumes: bool = False) -> Iterator[Progress]:
    """Show events on stderr; after Ctrl-C, say how a run that `resumes` is continued."""
    from rich import progress as p
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    drawn = console.is_terminal and not quiet
    columns = (
        p.TextColumn("{task.description}", markup=False),
        p.BarColumn(),
        p.TaskProgressColumn(),
        p.TextColumn("{task.fields[figures]}", markup=False),
        p.TextColumn("{task.fields[left]}", markup=False),
    )
    started, printed, job = time.monotonic(), float("-inf"), None
    with p.Progress(*columns, console=console, disable=not drawn, transient=True) as bars:
        bar = bars.add_task("", total=1.0, figures="", left="")

        def show(event: Event) -> None:
            nonlocal started, printed, job
            if not event.total:  # a message
                return None if quiet else say(event.stage)
            now = time.monotonic()
            if event.job != job:
                job, started, printed = event.job, now, float("-inf")
            name = ": ".join(filter(None, (event.job, event.stage)))
            figures = ", ".join(f"{key} {value}" for key, value in event.figures.items())
            seconds = event.seconds_left
            if seconds is None and event.done > 0:
                seconds = (now - started) * (event.total - event.done) / event.done
            left = "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
            if drawn:
                fields: dict[str, Any] = {"description": name, "figures": figures, "left": left}
                bars.update(bar, total=event.total, completed=event.done, **fields)
            elif not quiet and now - printed >= LOG_INTERVAL:
                done = f"{name} {event.done:,.0f}/{event.total:,.0f}"
                say(", ".join(filter(None, (done, figures, left))))
                printed = now

        try:
            yield show
        except KeyboardInterrupt as stop:
            if stop.args or resumes:
                say(str(stop) or "stopped: the same command resumes from here.")
            raise
