"""Every command's own help, as the command line prints it."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from longitude.cli.main import app

WIDTH = "86"


@dataclass(frozen=True)
class Command:
    """A command, what it does in a line, and its help."""

    name: str
    does: str
    help: str


def commands() -> list[Command]:
    """Every command, in the order of `longitude --help`."""
    return [_command(name) for name in names()]


def names() -> list[str]:
    """The commands that there are."""
    made = app.registered_commands
    return [c.name or getattr(c.callback, "__name__", "") for c in made]


def _command(name: str) -> Command:
    ran = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": WIDTH, "NO_COLOR": "1"})
    if ran.exit_code:
        raise RuntimeError(f"longitude {name} --help: {ran.output}")
    does = next(line for line in ran.output.split("\n\n")[1:] if line.strip())
    return Command(name, " ".join(does.split()), ran.output.strip())
