"""`longitude read`: a question about texts longer than a model's window, answered from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from longitude.cli import options as o
from longitude.cli.output import display, print_json, say
from longitude.core.validate import UserError
from longitude.viz.text import safe_lines

if TYPE_CHECKING:
    from longitude.reading.memwalker import Visit


def read(
    files: Annotated[
        list[str],
        Argument(metavar="FILE", help="Text, Markdown, HTML or PDF; - is standard input."),
    ],
    question: Annotated[str, Option("--question", "-q", help="What to ask about the text.")],
    model: Annotated[
        str | None,
        Option(
            help="A name on the Hub, a folder, a .gguf file; or the URL of an OpenAI-compatible "
            "server, as in http://127.0.0.1:8000/v1 or …/v1#NAME. [default: tiny-rope]"
        ),
    ] = None,
    by: Annotated[
        str, Option(help="nbce, windows, memwalker, extend, or auto, which says what it chose.")
    ] = "auto",
    show: Annotated[
        bool, Option("--show", help="Show where the answer came from, token by token.")
    ] = False,
    max_tokens: Annotated[int, Option(help="Of the answer; over 64, auto may walk a tree.")] = 64,
    temperature: Annotated[float, Option(help="0 takes the likeliest token.")] = 0.0,
    seed: o.SamplingSeed = None,
    window: Annotated[
        int | None,
        Option(
            help="Tokens of text in a window; of a server, those it takes. [default: what fits]"
        ),
    ] = None,
    most_windows: Annotated[
        int | None,
        Option(
            help="Windows that are read, those with most of the question's words; 0: all. "
            "[default: 32; parallel 8]"
        ),
    ] = None,
    runs: Annotated[Path, Option(help="Folder of `longitude extend` runs, or one of them.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path, Option(help="Folder where summaries are kept for the next question (memwalker).")
    ] = Path("runs/read"),
    key: Annotated[
        str | None,
        Option(envvar="LONGITUDE_API_KEY", help="For a server that wants one.", metavar="KEY"),
    ] = None,
    device: o.ModelDevice = "auto",
    dtype: o.ModelDType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    quiet: Annotated[bool, Option("--quiet", help="Print the answer and nothing else.")] = False,
    as_json: o.Json = False,
) -> None:
    """Answer a question about a text that is longer than the model's window.

    nbce: every window answers, and at each token the one with the lowest entropy decides. windows:
    they stand side by side, and the question sees them all. memwalker: a tree of summaries, and a
    walk to where the answer is. extend: the full text, under a scheme that `longitude extend` has
    measured.

    The answer goes to stdout as it comes, all else to stderr. The exit code is 1 if memwalker finds
    no answer.
    """
    from rich.console import Console

    from longitude.reading import api
    from longitude.viz.reading import by_path

    if quiet and show:
        raise UserError("--quiet is the answer alone, and --show is more: leave one of them out.")
    if "-" in files and not quiet and sys.stdin is not None and sys.stdin.isatty():
        say("reading the text from standard input: end it with Ctrl-D.")
    err = Console(stderr=True, highlight=False, quiet=quiet)

    def notify(message: str) -> None:
        err.print(safe_lines(message), markup=False, soft_wrap=True)

    def on_visit(visit: Visit, where: str) -> None:
        by_path(visit.plain(), where, err)

    with ExitStack() as stack:
        progress = stack.enter_context(display(quiet))
        writer = AnswerWriter(stack.close)  # the progress display would be in the way
        options = api.ReadOptions(
            model, by, max_tokens, temperature, seed, window, most_windows, runs, out, key,
            device, dtype, revision, trust_remote_code, notify=notify, progress=progress,
            on_text=api.ignore if as_json else writer.write,
            on_visit=on_visit if show and not as_json else api.ignore,
        )  # fmt: skip
        try:
            result = api.read(files, question, options=options)
        finally:
            writer.end()  # also if it breaks off
    if as_json:
        print_json(result.to_json())
    elif show and result.pieces:
        result.show_trace(err)
    if not result.found:
        raise Exit(1)


class AnswerWriter:
    """Writes an answer to stdout as it comes, without characters that a terminal would obey."""

    def __init__(self, before: Callable[[], None]) -> None:
        self.before, self.last = before, ""

    def write(self, text: str) -> None:
        """Write a piece; `before` is called first."""
        text = safe_lines(text) if self.last else safe_lines(text).lstrip()
        if text:
            self.before()
            print(text, end="", flush=True)
            self.last = text[-1]

    def end(self) -> None:
        """End the last line."""
        if self.last not in ("", "\n"):
            print(flush=True)
