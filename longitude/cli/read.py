"""`longitude read`: a question about texts longer than a model's window, answered from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Text, Markdown, HTML or PDF; - is standard input."),
]
Question = Annotated[str, typer.Option("--question", "-q", help="What to ask about the text.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A name on the Hub, a folder, a .gguf file; or the address of an OpenAI-compatible "
        "server, as in http://127.0.0.1:8000/v1 or …/v1#NAME. [default: tiny-rope]"
    ),
]
By = Annotated[
    str, typer.Option(help="nbce, windows, memwalker, extend, or auto: it says what it chose.")
]
Show = Annotated[
    bool, typer.Option("--show", help="Say where the answer came from, token by token.")
]
MaxTokens = Annotated[int, typer.Option(help="Of the answer; over 64, auto may walk a tree.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Of the draws.")]
Window = Annotated[
    int | None,
    typer.Option(
        help="Tokens of text in a window; of a server, those it takes. [default: what fits]"
    ),
]
MostWindows = Annotated[
    int | None,
    typer.Option(
        help="Windows that are read, those first that have most of the question's words; 0: all. "
        "[default: 32; side by side 8]"
    ),
]
Runs = Annotated[
    Path, typer.Option(help="Folder of `longitude extend` runs, or one: what was measured.")
]
Out = Annotated[
    Path, typer.Option(help="Folder where summaries are kept for the next question (memwalker).")
]
Key = Annotated[
    str | None,
    typer.Option(envvar="LONGITUDE_API_KEY", help="For a server that wants one.", metavar="KEY"),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the answer and nothing else.")]


def read(
    files: Files,
    question: Question,
    model: Model = None,
    by: By = "auto",
    show: Show = False,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    window: Window = None,
    most_windows: MostWindows = None,
    runs: Runs = Path("runs"),
    out: Out = Path("runs/read"),
    key: Key = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: o.ModelDType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    quiet: Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Answer a question about a text that is longer than the model's window.

    nbce: every window answers, and the surest is heard at each token. windows: they stand side by
    side, and the question sees them all. memwalker: a tree of summaries, and a walk to where the
    answer stands. extend: the whole text, under a scheme that `longitude extend` has measured.

    The answer goes to stdout as it comes, all else to stderr. The exit code is 1 where memwalker
    finds no answer.
    """
    from longitude.reading.options import Asked
    from longitude.reading.pipeline import answer

    asked = Asked(
        files=tuple(files), question=question, model=model, by=by, show=show,
        max_tokens=max_tokens, temperature=temperature, seed=seed, window=window,
        most_windows=most_windows, runs=runs, out=out, key=key, quiet=quiet, as_json=as_json,
        load={"device": device, "dtype": dtype, "revision": revision,
              "trust_remote_code": trust_remote_code},
    )  # fmt: skip
    answer(asked)
