"""Where output goes: data to stdout, everything else to stderr, colours only on a terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


# JSON leaves C1 control characters as they are, and a terminal may obey them
CONTROLS = {n: f"\\u{n:04x}" for n in range(0x7F, 0xA0)}


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
