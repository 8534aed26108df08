"""What `longitude bench` does: run suites case by case, then show, store and draw the rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.rows import SUITES, Row, load, plain, recorded, store_rows
from longitude.cli.common import console, say
from longitude.core.store import Store
from longitude.core.validate import UserError

if TYPE_CHECKING:
    from benchmarks.suites.case import Case
    from benchmarks.suites.setup import Setup

RECOMPILES = 1024
ROWS, TABLE, CHARTS = ".jsonl", ".md", (".html", ".png", ".svg")
RENAMED = {"turn": "rope", "extend": "model"}  # the names of suites in 0.1


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and whether rows are printed as JSON as they arrive. `only` selects cases
    whose line of progress contains it."""

    suite: str = "all"
    peers: bool = False
    device: str = "auto"
    dtype: str = "auto"
    tokens: str | None = None
    rounds: int = 5
    minutes: float | None = None
    as_json: bool = False
    only: str = ""

    def suites(self) -> tuple[str, ...]:
        suite = RENAMED.get(self.suite, self.suite)
        if suite not in (*SUITES, "all"):
            raise UserError(f"no suite is called {suite!r}: use {', '.join(SUITES)} or all.")
        return SUITES if suite == "all" else (suite,)

    def lengths(self) -> tuple[int, ...]:
        try:
            return tuple(int(n) for n in self.tokens.split(",")) if self.tokens else ()
        except ValueError:
            raise UserError(
                f"--tokens takes whole numbers, but got {self.tokens!r}: write 256,512."
            ) from None


def bench(options: BenchOptions, given: Sequence[Path], out: Sequence[Path]) -> list[Row]:
    """Measure, or load the `given` rows; print them, and write each file of `out`."""
    kinds = (ROWS, TABLE, *CHARTS)
    for path in out:
        if path.suffix not in kinds:
            raise UserError(f"--out {path} has no supported suffix: end it in {', '.join(kinds)}.")
    if options.rounds < 1:
        raise UserError(f"--rounds must be 1 or more, but got {options.rounds}.")
    with Store(":memory:") as store:
        rows = load(store, given) if given else _measure_all(options, store, out)
        if given and options.as_json:
            _print_json(rows)
        elif not options.as_json:
            from benchmarks.suites.show import show

            show(rows, console())
        for path in out:
            _write(store, rows, path)
            say(f"wrote {path}")
    return rows


def _measure_all(options: BenchOptions, store: Store, out: Sequence[Path]) -> list[Row]:
    """Measure; rows are written and printed after each case, so that a killed run keeps them."""
    from benchmarks.suites.setup import setup

    seconds = float("inf") if options.minutes is None else 60 * options.minutes
    suites, lengths = options.suites(), options.lengths()
    prepared = setup(options.device, options.dtype, options.peers, lengths)
    for rows in run(prepared, suites, options.rounds, seconds, say, options.only):
        store_rows(store, rows)
        for path in (p for p in out if p.suffix == ROWS):
            store.export(path)
        if options.as_json:
            _print_json(rows)
    return recorded(store)


def _write(store: Store, rows: list[Row], path: Path) -> None:
    if path.suffix == ROWS:
        store.export(path)
    elif path.suffix == TABLE:
        from benchmarks.suites.show import markdown

        path.write_text(markdown(rows), encoding="utf-8")
    else:
        from benchmarks.suites.chart import write

        write(rows, path, "Speed of attention under a scheme")


def _print_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(plain(row), ensure_ascii=False, allow_nan=False), flush=True)


def run(
    setup: Setup,
    suites: Sequence[str],
    rounds: int,
    seconds: float = float("inf"),
    report: Callable[[str], None] = lambda _: None,
    only: str = "",
) -> Iterator[list[Row]]:
    """Yield each case's rows as it is measured; after `seconds` the remaining cases are skipped.
    `only` selects the cases whose name and sizes, as `report` receives them, contain it."""
    import torch

    end, order, matched = time.monotonic() + seconds, 0, False
    modules = [import_module(f"benchmarks.suites.{suite}") for suite in suites]
    with _recompiling(setup), torch.no_grad():
        for case in (case for module in modules for case in module.cases(setup)):
            name, late = f"{case.work.name}: {case.work.sizes}", time.monotonic() > end
            if only not in name:
                continue
            matched = True
            report(name + ", skipped: time limit reached" * late)
            if late:
                continue
            rows = _measure(case, rounds, setup.cuda)
            yield [replace(row, order=order + n) for n, row in enumerate(rows)]
            order += len(rows)
    if only and not matched:
        raise UserError(
            f"no case has {only!r} in its name or sizes: leave --only out to see what there is."
        )


def _recompiling(setup: Setup) -> AbstractContextManager[Any]:
    """Raise dynamo's limit of 8 compilations, because each length is compiled separately: past the
    limit, baselines would run uncompiled and our speed would look too good."""
    if not (setup.cuda or setup.peers) or not setup.compiles:
        return nullcontext()
    import torch._dynamo.config as config

    return config.patch({"recompile_limit": RECOMPILES, "accumulated_recompile_limit": RECOMPILES})


def _measure(case: Case, rounds: int, cuda: bool) -> list[Row]:
    """Return a case's rows; if all of it fails, a row with the reason for each method."""
    from benchmarks.suites.case import error_line, measure

    try:
        return measure(case, rounds, cuda)
    except Exception as e:  # e.g. out of memory
        return [Row(case.work, way.name, way.kind, refused=error_line(e)) for way in case.ways]
