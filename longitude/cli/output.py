"""Where output goes: data to stdout alone, news to stderr, colours only where they are wanted."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

# JSON leaves these as they are, and a terminal may obey them
CONTROLS = {n: f"\\u{n:04x}" for n in range(0x7F, 0xA0)}


def console() -> Console:
    """Stdout; rich leaves colours out under NO_COLOR and where it is no terminal."""
    return Console(highlight=False)


def print_json(value: Any) -> None:
    """Data on stdout, and nothing else."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    print(text.translate(CONTROLS))


def say(news: str) -> None:
    """A line for the person, not for the pipe."""
    print(news, file=sys.stderr)
