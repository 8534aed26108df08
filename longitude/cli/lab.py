"""`longitude lab`: schemes trained short on the same data, and tested long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o


def lab(
    schemes: Annotated[
        str, typer.Option(help="Schemes joined by ;, or all: every encoding that can be trained.")
    ] = "rope(); alibi()",
    length: o.Length = 256,
    test: Annotated[
        str | None, typer.Option(help="Lengths to test at; without, 1 to 16 windows.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="What to train and test on: text,passkey,copy:2 …, with shares.")
    ] = "text",
    size: o.Size = "nano",
    text: o.Text = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    rate: o.Rate = None,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    seeds: Annotated[str, typer.Option(help="As in 0,1,2.")] = "0",
    out: Annotated[Path, typer.Option(help="Folder of rows, runs, table and chart.")] = Path(
        "runs/lab"
    ),
    excerpts: Annotated[int, typer.Option(help="Test excerpts of text.")] = 16,
    problems: Annotated[int, typer.Option(help="Test problems of each other task.")] = 64,
    every: o.Every = 60.0,
    deterministic: o.Deterministic = False,
    compile: o.Compile = None,
    as_json: o.Json = False,
) -> None:
    """Train each scheme on the same data, order, seed and steps; test each at every length.

    Rows go to rows.sqlite (and rows.jsonl) in --out; stored rows are not computed again. The table
    and the curves are printed and drawn into lab.html: loss of the last half window of the same
    text with more and more context before it, and exact answers on the tasks.
    """
    given = {k: v for k, v in locals().items() if k not in ("schemes", "as_json")}
    from longitude.cli.output import print_result, say
    from longitude.cli.progress import display
    from longitude.training.api import LabOptions, is_first_process
    from longitude.training.api import lab as run

    given |= {"text": tuple(text or ())}
    given |= {name: _integers(name, given[name]) for name in ("test", "seeds")}
    with display(quiet=not is_first_process()) as progress:
        result = run(schemes, options=LabOptions(**given, progress=progress))
    if is_first_process():
        print_result(result, as_json)
        say(f"wrote {out / 'rows.jsonl'} and {out / 'lab.html'}")


def _integers(name: str, text: str | None) -> tuple[int, ...]:
    """Integers, each once, in rising order."""
    from longitude.core.validate import UserError

    try:
        return tuple(sorted({int(item) for item in text.split(",")})) if text else ()
    except ValueError:
        raise UserError(f"--{name} takes whole numbers, but got {text!r}: write 256,512.") from None
