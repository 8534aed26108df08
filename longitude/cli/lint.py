"""`longitude lint`: what runtimes really compute from a model's settings, and its traps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from longitude.runtimes.issues import Trap
    from longitude.runtimes.lint import Lint, Row

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A config.json, a folder, an adapter's folder, a name on the Hub, a .gguf file or "
        "tiny-rope.",
    ),
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        help="Runtimes with commas between them, each with a version if you like, as "
        "vllm,transformers==4.51.3; or all.",
    ),
]
Told = Annotated[
    str | None,
    typer.Option(
        "--with",
        help='What is said at the start besides, as JSON: {"--hf-overrides": {…}, '
        '"--max-model-len": 32768}, {"-c": 32768, "--rope-scaling": "yarn"}, …',
    ),
]
SchemeText = Annotated[
    str | None, typer.Option("--scheme", help="What is wanted, if not what the settings mean.")
]


def lint(
    model: Source,
    runtimes: For = "all",
    scheme: SchemeText = None,
    told: Told = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Show what each runtime would compute from a model's settings, beside what they mean.

    The largest relative difference of a frequency, the factor on cosine and sine, and the longest
    input, with the trap behind each difference and its cure. The exit code is 1 if any differs.
    """
    from longitude.cli.output import console, print_json
    from longitude.core.scheme import Layers
    from longitude.core.text import parse
    from longitude.core.validate import UserError
    from longitude.runtimes.adapters import intended
    from longitude.runtimes.lint import known, settings_of
    from longitude.runtimes.lint import lint as linted

    wanted = parse(scheme) if scheme else None
    if isinstance(wanted, Layers):
        raise UserError("--scheme of lint is one for all layers: leave layers(…) out.")
    named = known(runtimes)
    settings = {**settings_of(model, revision), **_said(told)}
    own, wrong = (None, ()) if model.endswith(".json") else intended(model, revision)
    found = linted(settings, named, wanted or own, wrong)
    if as_json:
        print_json(plain(found))
    else:
        show(found, console())
    if not found.same:
        raise typer.Exit(1)


def _said(told: str | None) -> dict[str, Any]:
    from longitude.core.validate import UserError, shown

    try:
        found = json.loads(told or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"--with takes a JSON object, but got {shown(told)}: write one in braces.")
    return found


def plain(found: Lint) -> dict[str, Any]:
    """What was found, as JSON has it."""
    return {
        "same": found.same,
        "meant": {"attention": found.meant.attention, "length": found.meant.length}
        | {"inv_freq": list(found.meant.inv_freq)},
        "faults": [vars(fault) for fault in found.faults],
        "notes": [_told(trap) for trap in found.notes],
        "runtimes": [_plain_row(row) for row in found.rows],
    }


def _plain_row(row: Row) -> dict[str, Any]:
    apart, off = row.apart, row.apart.frequencies
    return {
        "runtime": row.runtime,
        "version": row.version,
        "same": apart.same,
        "starts": apart.starts,
        "frequencies_off": off if off != float("inf") else None,
        "attention": row.found.attention,
        "length": row.found.length,
        "inv_freq": list(row.found.inv_freq),
        "traps": [_told(trap) for trap in apart.traps],
        "notes": [_told(trap) for trap in apart.notes],
    }


def _told(trap: Trap) -> dict[str, str]:
    return {"name": trap.name, "sentence": trap.sentence, "cure": trap.cure}


def show(found: Lint, console: Console) -> None:
    """Print what was found, a row for each runtime."""
    from rich.padding import Padding
    from rich.text import Text

    for fault in found.faults:
        console.print(Text(f"{fault.name}: ", style="bold").append(fault.sentence, style="default"))
    if found.meant.starts:
        console.print(_table(found))
    for name, sentence in _lines(found):
        console.print(Text(name, style="bold"))
        console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    if found.same:
        console.print(Text("every runtime computes what the settings mean", style="green"))


def _table(found: Lint) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("runtime")
    for head in ("frequencies off by", "cos, sin ×", "longest input"):
        table.add_column(head, justify="right")
    meant = found.meant
    table.add_row("meant", "", f"{meant.attention:.4f}", f"{meant.length:,}", style="bold")
    for row in found.rows:
        style = "" if row.apart.same else "yellow"
        table.add_row(f"{row.runtime} {row.version}", *_cells(row), style=style)
    return table


def _cells(row: Row) -> tuple[str, str, str]:
    apart = row.apart
    if not apart.starts:
        return "does not start", "", ""
    off = f"{apart.frequencies:.2%}" if apart.frequencies < 1e9 else "other pairs"
    same = apart.frequencies <= 1e-6
    return "–" if same else off, f"{row.found.attention:.4f}", f"{row.found.length:,}"


def _lines(found: Lint) -> Iterator[tuple[str, str]]:
    """Each trap once, with the runtimes that have it; then notes."""
    for words, traps in (
        ("", [(r, t) for r in found.rows for t in r.apart.traps]),
        (" (a note)", [(r, t) for r in found.rows for t in r.apart.notes]),
    ):
        for trap in dict.fromkeys(t for _, t in traps):
            where = _joined(r.runtime for r, t in traps if t == trap)
            yield f"{trap.name}: {where}{words}", f"{trap.sentence} → {trap.cure}"
    for trap in found.notes:
        yield f"{trap.name} (a note)", f"{trap.sentence} → {trap.cure}"


def _joined(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
