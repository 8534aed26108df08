"""`longitude lab`: schemes trained short on the same data, and tested long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.training.distributed import World
    from longitude.training.lab.compare import Plan
    from longitude.training.lab.measure import Protocol
    from longitude.training.lab.options import Asked, How
    from longitude.training.lab.rows import Score
    from longitude.training.lab.run import Run
    from longitude.training.lab.text import Corpus


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
    compiled: o.Compile = None,
    as_json: o.Json = False,
) -> None:
    """Train each scheme on the same data, order, seed and steps; test each at every length.

    Rows go to rows.sqlite (and rows.jsonl) in --out; those that are there are not computed again.
    The table and the curves are printed and drawn into lab.html: loss of the last half window of
    the same text with more and more before it, and exact answers on the tasks.
    """
    from longitude.training.lab.measure import Protocol
    from longitude.training.lab.options import Asked, How

    asked = Asked(length, size, "llama", tasks, steps, batch, rate, dtype)
    how = How(device, every, deterministic, compiled)
    lengths, drawn = (_numbers(name, given) for name, given in (("test", test), ("seeds", seeds)))
    _lab(asked, how, schemes, text, lengths, drawn, Protocol(excerpts, problems), out, as_json)


def _lab(
    asked: Asked,
    how: How,
    schemes: str,
    text: list[str] | None,
    lengths: tuple[int, ...],
    seeds: tuple[int, ...],
    protocol: Protocol,
    out: Path,
    as_json: bool,
) -> None:
    from longitude.training.distributed import joined
    from longitude.training.lab.compare import plan
    from longitude.training.lab.text import gather

    with joined(how.device) as world:
        corpus = gather(text)
        found = plan(asked, schemes, lengths, seeds, protocol, corpus, world)
        scores = _compared(found, corpus, out, world, how)
        if world.first:
            _show(scores, out, as_json)


def _compared(plan: Plan, corpus: Corpus, out: Path, world: World, how: How) -> tuple[Score, ...]:
    """Every row of the plan; a run that is stopped keeps what it has."""
    from longitude.cli.output import say
    from longitude.cli.progress import bar
    from longitude.core.store import Store
    from longitude.training.lab.compare import Watch, compare, label
    from longitude.training.loop import Stopped

    with Store(out / "rows.sqlite") as store, bar(world.first) as shown:

        def news(index: int, run: Run, doing: str) -> None:
            name = label(run.shape.scheme)
            shown.start(f"{index + 1}/{len(plan.runs)} {name}, seed {run.seed}: {doing}")

        try:
            found = compare(
                plan, corpus, store, out, world, Watch(news, how.manner(world, shown.tell))
            )
        except Stopped:
            if world.first:
                say("stopped: the same command goes on from here.")
            raise typer.Exit(130) from None
        if world.first:
            store.export(out / "rows.jsonl")
        return found


def _show(scores: tuple[Score, ...], out: Path, as_json: bool) -> None:
    from longitude.cli.output import console, print_json, say
    from longitude.training.lab.rows import plain
    from longitude.viz import lab as report

    if as_json:
        print_json([plain(s) for s in scores])
    else:
        report.show(scores, console())
    report.write(scores, out / "lab.html", "Trained short, tested long")
    say(f"wrote {out / 'rows.jsonl'} and {out / 'lab.html'}")


def _numbers(name: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers, each once, in rising order."""
    from longitude.core.validate import UserError

    try:
        return tuple(sorted({int(item) for item in text.split(",")})) if text else ()
    except ValueError:
        raise UserError(f"--{name} takes whole numbers, but got {text!r}: write 256,512.") from None
