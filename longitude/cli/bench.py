"""`longitude bench`: what attention under a scheme costs, beside plain attention and the peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from benchmarks.suites.rows import Row
    from longitude.core.store import Store

ROWS, TABLE, DRAWN = ".jsonl", ".md", (".html", ".png", ".svg")
TITLE = "Speed of attention under a scheme"


def bench(
    suite: Annotated[str, typer.Option(help="turn, attention, decode, extend or all.")] = "all",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also what is installed of what one would use instead.")
    ] = False,
    device: o.Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16 on CUDA), float32, bfloat16 or float16.")
    ] = "auto",
    tokens: Annotated[
        str | None, typer.Option(help="Lengths, as in 8192,32768, instead of the device's own.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds in which all ways take turns.")] = 5,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no case after so many minutes.")
    ] = None,
    given: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Rows to show instead of measuring; as often as you like."),
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also write rows (.jsonl), the tables (.md) or a chart (.html, .png, .svg); "
            "as often as you like."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each row, as it comes.")
    ] = False,
) -> None:
    """Time turning, attention, decoding and whole models, each against the best it could be.

    Ways take turns within rounds; numbers are medians. Speed is the baseline's time over a way's
    own: 1 is as fast as a copy (turn), as turning and plain attention (attention), as SDPA over
    rotated keys (decode), as the model untouched (extend). Errors are against float64.
    """
    _check(out or [], rounds)
    end = float("inf") if minutes is None else 60 * minutes
    asked = Asked(suite, peers, device, dtype, _lengths(tokens), rounds, end, as_json)
    _bench(asked, given or [], out or [])


class Asked(NamedTuple):
    """What is to be measured, and whether rows are printed as they come."""

    suite: str
    peers: bool
    device: str
    dtype: str
    tokens: tuple[int, ...]
    rounds: int
    seconds: float
    as_json: bool


def _bench(asked: Asked, given: list[Path], out: list[Path]) -> None:
    from benchmarks.suites.rows import load
    from longitude.core.store import Store

    with Store(":memory:") as store:
        rows = load(store, given) if given else _measured(asked, store, out)
        if not asked.as_json:
            _show(rows)
        elif given:
            _print(rows)
        for path in out:
            _write(store, rows, path)


def _measured(asked: Asked, store: Store, out: list[Path]) -> list[Row]:
    """Measure; rows are printed and written as they come, so that a kill keeps them."""
    from benchmarks.suites.rows import keep, recorded
    from benchmarks.suites.run import chosen, run
    from benchmarks.suites.setup import setup
    from longitude.cli.output import say

    made = setup(asked.device, asked.dtype, asked.peers, asked.tokens)
    for rows in run(made, chosen(asked.suite), asked.rounds, asked.seconds, say):
        keep(store, rows)
        for path in (p for p in out if p.suffix == ROWS):
            store.export(path)
        if asked.as_json:
            _print(rows)
    return recorded(store)


def _show(rows: list[Row]) -> None:
    from benchmarks.suites.show import show
    from longitude.cli.output import console

    show(rows, console())


def _write(store: Store, rows: list[Row], path: Path) -> None:
    from longitude.cli.output import say

    if path.suffix == ROWS:
        store.export(path)
    elif path.suffix == TABLE:
        from benchmarks.suites.show import markdown
        from longitude.viz.files import replace_file

        replace_file(path, markdown(rows).encode())
    else:
        from benchmarks.suites.chart import write

        write(rows, path, TITLE)
    say(f"wrote {path}")


def _print(rows: list[Row]) -> None:
    import json

    from benchmarks.suites.rows import plain

    for row in rows:
        print(json.dumps(plain(row), ensure_ascii=False, allow_nan=False), flush=True)


def _check(out: list[Path], rounds: int) -> None:
    """What can be known before any work is done."""
    from longitude.core.validate import UserError

    kinds = (ROWS, TABLE, *DRAWN)
    for path in out:
        if path.suffix not in kinds:
            raise UserError(f"--out {path} names no kind of file: end it in {', '.join(kinds)}.")
    if rounds < 1:
        raise UserError(f"--rounds must be 1 or more, but got {rounds}.")


def _lengths(text: str | None) -> tuple[int, ...]:
    from longitude.core.validate import UserError

    try:
        return tuple(int(n) for n in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"--tokens takes whole numbers, but got {text!r}: write 256,512.") from None
