"""The report of `longitude probe`: in the terminal, as Markdown, and as a page.

Texts from a server are made printable here, and jinja escapes them on the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longitude.eval.tasks import families
from longitude.viz import files
from longitude.viz.plot import DIM
from longitude.viz.result_charts import heat_map
from longitude.viz.terminal import rich_table
from longitude.viz.text import NOTHING, printable
from longitude.viz.vega import Chart, themes

if TYPE_CHECKING:
    from longitude.probing.api import ProbeResult

Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows
MARKS = {"fault": ("✗", "bold red"), "note": ("·", DIM)}
READING = {
    "depth": "Pass keys retrieved: across, the length of the prompt in tokens; down, where the key "
    "stands (0 % is the front). The darker, the more.",
    "families": "Questions answered exactly, by family and length.",
}


def show(result: ProbeResult, console: Console) -> None:
    """Print the verdict, then the numbers behind it."""
    console.print(Text(f"{printable(result.model)} at {result.url}", style="bold"))
    runtime = result.runtime or "a runtime that does not name itself"
    spent = result.cost
    sizes = f"{printable(runtime)}, probed up to {result.to:,} tokens"
    if spent:
        sizes += f", {spent['requests']:,} requests in {spent['seconds']:,.0f} s"
    console.print(Text(sizes, style=DIM))
    console.print()
    for finding in result.findings:
        mark, style = MARKS[finding.kind]
        head = Text(f"{mark} ", style) + Text(printable(finding.sentence))
        console.print(Padding.indent(head, 0))
        if finding.fix:
            console.print(Padding(Text(f"→ {printable(finding.fix)}", "cyan"), (0, 0, 0, 2)))
    for title, heads, rows in tables(result):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(rich_table(heads, rows))
    console.print()
    for note in result.notes:
        console.print(Text(printable(note), style=DIM))
    console.print(Text(result.conclusion, style="bold"))


def tables(result: ProbeResult) -> Iterator[Table]:
    """Tables of the numbers by length, by depth, by hypothesis and by change."""
    reach = result.reach
    speeds = {s.length: s for s in reach.speeds}
    if reach.lengths:
        rows = []
        for n in reach.lengths:
            share, loss, speed = reach.share(n), reach.loss(n), speeds.get(n)
            rows.append(
                [
                    f"{n:,}", f"{share.mean:.0%}", f"{share.low:.0%} to {share.high:.0%}",
                    _number(loss), _number(speed and speed.first), _number(speed and speed.decode),
                ]
            )  # fmt: skip
        heads = ["tokens", "answered", "95 %", "answer loss", "first token, s", "tokens/s"]
        yield "By length", heads, rows
    depths = sorted({s.depth for s in reach.answers if s.depth is not None})
    if depths:
        shares = {(d, n): reach.share(n, depth=d) for d in depths for n in reach.lengths}
        rows = [
            [f"{d:.0%}", *(f"{s.mean:.0%}" if (s := shares[d, n]).n else NOTHING
                           for n in reach.lengths)]
            for d in depths
        ]  # fmt: skip
        yield "Pass keys retrieved by depth", ["depth", *(f"{n:,}" for n in reach.lengths)], rows
    if result.in_force:
        fits = result.in_force.fits
        lengths = [*dict.fromkeys(n for fit in fits for n in fit.lengths)]
        rows = [
            [
                printable(fit.name),
                f"{fit.misfit:.4f}",
                *(f"{fit.lengths[n]:.4f}" if n in fit.lengths else "" for n in lengths),
            ]
            for fit in fits
        ]
        heads = ["hypothesis", f"misfit ({result.in_force.unit})"]
        yield "Which scheme is in force", [*heads, *(f"{int(n):,}" for n in lengths)], rows
    if result.drift:
        rows = [
            [f"{c.length:,}", str(c.questions), f"{c.won}", f"{c.lost}",
             f"{c.low:+.0%} to {c.high:+.0%}", _number(c.gap)]
            for c in result.drift.changes
        ]  # fmt: skip
        heads = ["tokens", "questions", "won", "lost", "95 %", "nats apart"]
        yield f"Against {printable(result.drift.before)}", heads, rows
    yield from _looks(result)


def _looks(result: ProbeResult) -> Iterator[Table]:
    """The requests that show where input is cut off."""
    rows = []
    for look in result.input.looks:
        counted = "" if look.counted is None else f"{look.counted:,}"
        seen = [("seen" if visible else "not seen") for visible in look.seen.values()]
        outcome = seen or [f"status {look.status}", *[""] * 4]
        rows.append([f"{look.length:,}", counted or NOTHING, *outcome])
    if rows:
        heads = ["tokens sent", "counted", "front", "25 %", "50 %", "75 %", "question"]
        yield "Where input ends", heads, rows


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def charts(result: ProbeResult) -> list[Chart]:
    """Retrieval by length and depth, and by family."""
    reach = result.reach
    by_depth = [
        {"length": n, "place": f"{d:.0%}", **vars(reach.share(n, depth=d))}
        for n in reach.lengths
        for d in sorted({answer.depth for answer in reach.at(n) if answer.depth is not None})
    ]
    by_family = [
        {"length": n, "place": families()[f].title, **vars(reach.share(n, f))}
        for n in reach.lengths
        for f in reach.families
        if f in families() and reach.at(n, f)
    ]
    named = (("depth", "Retrieval by depth", by_depth), ("families", "Questions", by_family))
    return [
        Chart(name, title, READING[name], heat_map(rows, "place", reach.lengths, 26), rows)
        for name, title, rows in named
        if rows
    ]


def write(result: ProbeResult, path: Path) -> Path:
    drawn = charts(result)
    text = files.page(
        "probe.html",
        {c.name: {"section": 0, "spec": {**c.spec, "description": c.title}} for c in drawn},
        [themes()],
        title=f"{printable(result.model)} at {result.url}",
        r=result,
        drawn=drawn,
        tables=[*tables(result)],
        printable=printable,
    )
    files.replace_file(path, text.encode())
    return path
