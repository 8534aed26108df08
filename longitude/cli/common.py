"""What commands share: their options, each with its help, and where output goes.

Data goes to stdout, everything else to stderr, with colours only on a terminal. Progress is shown
as a bar on a terminal, and elsewhere as a line every 15 seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from datetime import timedelta
from functools import wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from typer import Argument, Option

from longitude.core.progress import Event, Progress, silent

if TYPE_CHECKING:
    from rich.console import Console

LOG_INTERVAL = 15.0  # seconds between two progress lines where there is no terminal
# JSON leaves C1 control characters as they are, and a terminal may interpret them
CONTROLS = {n: f"\\u{n:04x}" for n in range(0x7F, 0xA0)}
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a .gguf file, or tiny-rope, tiny-alibi or tiny-learned.",
    ),
]
Target = Annotated[
    str | None,
    Option(
        help="Target length: 32768, 32k, or 4x the trained window. [default: 4x; 8x for tiny-rope]"
    ),
]
Json = Annotated[bool, Option("--json", help="Print data.")]
Quiet = Annotated[bool, Option("--quiet", help="Print nothing but the result.")]


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a dataclass, passed as its first argument; the help lists them
    before the command's keyword-only options."""
    hints, by_name = get_type_hints(options), {f.name: f for f in fields(options)}
    offered = [by_name[name] for name in signature(options).parameters if by_name[name].metadata]

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @wraps(run)
        def call(**given: Any) -> None:
            run(options(**{f.name: given.pop(f.name) for f in offered}), **given)

        own = list(signature(run, eval_str=True).parameters.values())[1:]
        first = [p for p in own if p.kind is not Parameter.KEYWORD_ONLY]
        merged = [*first, *(_parameter(f, hints[f.name]) for f in offered), *own[len(first) :]]
        keywords = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in merged]
        call.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter(option: Field[Any], hint: Any) -> Parameter:
    """An option as typer reads it: a union as its first type, a tuple as a string or a list."""
    settings: Any = dict(option.metadata)
    default: Any = option.default
    flag, joined = settings.pop("flag"), settings.pop("joined", False)
    if joined or hint == tuple[int, ...]:
        hint, default = str | None, ",".join(map(str, default)) or None
    elif get_origin(hint) is tuple:
        hint, default = list[str] | None, None
    elif len(kinds := get_args(hint)) > 1:
        hint = kinds[0] | None if NoneType in kinds else kinds[0]
    if default is False:  # without a --no-… form
        flag = "--" + option.name.replace("_", "-")
    kind = Annotated[hint, Option(*filter(None, [flag]), **settings)]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


class Result(Protocol):
    """What every command's function returns."""

    def table(self, *, color: bool = False, width: int = 100) -> str: ...
    def to_json(self) -> Any: ...


def console() -> Console:
    """A console on stdout; rich omits colours under NO_COLOR and where stdout is no terminal."""
    from rich.console import Console

    return Console(highlight=False)


def print_result(result: Result, as_json: bool) -> None:
    """Print a result on stdout: its JSON, or its table as wide as the terminal."""
    if as_json:
        return print_json(result.to_json())
    out = console()
    print(result.table(color=out.color_system is not None, width=out.width))


def print_json(value: Any) -> None:
    """Print JSON on stdout, and nothing else."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    print(text.translate(CONTROLS))


def say(message: str) -> None:
    """Print a line on stderr: for the person, not for the pipe."""
    print(message, file=sys.stderr)


@contextmanager
def display(quiet: bool = False, resumes: bool = False) -> Iterator[Progress]:
    """Show progress on stderr; after Ctrl-C, say how to continue a run that `resumes`."""
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
                return say(event.stage)
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
            elif now - printed >= LOG_INTERVAL:
                done = f"{name} {event.done:,.0f}/{event.total:,.0f}"
                say(", ".join(filter(None, (done, figures, left))))
                printed = now

        try:
            yield silent if quiet else show
        except KeyboardInterrupt as stop:
            if stop.args or resumes:
                say(str(stop) or "stopped: the same command resumes from here.")
            raise
