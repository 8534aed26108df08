"""`longitude`: the commands, and how their errors are reported.

Nothing here imports torch, so that help appears at once. A user's mistake is one line on stderr and
exit code 2; a bug of ours is one line and exit code 1; `--debug` adds the traceback to either.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from longitude import __version__
from longitude.cli.bench import bench, env
from longitude.cli.generate import read, stream
from longitude.cli.measure import extend, lab, probe, report, train, tune
from longitude.cli.schemes import check, explore, export, inspect, lint, schemes, show, verify
from longitude.core.store import StoreError
from longitude.core.validate import UserError, short

app = typer.Typer(
    name="longitude",
    help="Position encodings for transformers: list, draw, train, compare and stream with them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (  # in the order of the help
    *(schemes, show, explore, check, train, extend, tune, export, lint, verify, probe),
    *(inspect, lab, report, read, stream, bench, env),
):
    app.command()(command)


def _version(given: bool) -> bool:
    if given:
        typer.echo(f"longitude {__version__}")
        raise typer.Exit
    return given


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which this is.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """The options of every command; both are handled before a command runs."""


def main() -> None:
    """Run one command and exit; SIGTERM is handled like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command and return the exit code."""
    debug = "--debug" in args  # anywhere: most often it is added at the end
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # a terminal without braille gets question marks
    try:
        rest = [a for a in args if a != "--debug"] or ["--help"]
        code = app(args=rest, prog_name="longitude", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader closed the pipe; flushing at exit must not write to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        if debug:
            traceback.print_exc()
        sentence, code = _explained(e)
        print(f"longitude: {' '.join(sentence.split())}", file=sys.stderr)
        return code


def _explained(error: Exception) -> tuple[str, int]:
    """The error as a sentence, and the exit code."""
    usage = getattr(error, "format_message", None)  # click's, wherever typer keeps it
    if isinstance(error, UserError | StoreError):
        return str(error), 2
    if usage is not None:
        return f"{usage().rstrip('.')}. See longitude --help.", 2
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename}.", 1
    from longitude.eval.perplexity import is_out_of_memory

    if is_out_of_memory(error):
        return f"memory ran out ({short(str(error), 160)}): give smaller sizes.", 1
    return (
        f"{type(error).__name__}: {error} (a fault of longitude's: run it with --debug and report "
        "the traceback with the output of `longitude env`).",
        1,
    )
