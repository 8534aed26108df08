"""Rows as tables: in the terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.suites.rows import BASELINE, OURS, Row, cases
from longitude.viz.plot import DIM
from longitude.viz.text import escaped, markdown_table

HEADS: tuple[str, ...] = ("ms", "speed", "rate", "error", "memory", "goal")
GIB = 2**30


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a table for each case, then the summary."""
    for case in cases(rows):
        work = case[0].work
        console.print(Text(work.name, style="bold") + Text(f"  {work.sizes}", style=DIM))
        console.print(_table(case))
        for row in (r for r in case if r.refused):
            console.print(Text(f"{row.way}: {row.refused}", style=DIM))
        console.print()
    for line in summary(rows):
        console.print(Text(line))


def _table(case: Sequence[Row]) -> Table:
    """Return a case's table: a line for each method, without empty columns."""
    heads, lines = _columns(case)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    table.add_column("", overflow="fold", max_width=46)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row, line in zip(case, lines, strict=True):
        table.add_row(Text(row.way, style="cyan" if row.kind == OURS else ""), *map(Text, line))
    return table


def _columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells, without the columns that are empty in every row."""
    lines = [_cells(row) for row in rows]
    used = [n for n in range(len(HEADS)) if any(line[n] for line in lines)]
    return [HEADS[n] for n in used], [[line[n] for n in used] for line in lines]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many methods reach their goals, then what each of the others misses."""
    rated = [row for row in rows if row.reached is not None]
    if rated:
        yield f"{sum(row.reached is True for row in rated)} of {len(rated)} reach their goals"
    for row in rated:
        if not row.reached:
            yield f"  {row.work.name}, {row.work.sizes}: {'; '.join(row.missed().values())}"


def markdown(rows: Iterable[Row]) -> str:
    """Return a table for each suite on each machine."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        where = _where(row)
        groups.setdefault((where, row.work.suite), []).append(row)
    sections, last = [], None
    for (where, suite), group in groups.items():
        head = f"### {escaped(where)}\n\n" if where != last else ""
        sections.append(f"{head}#### {suite}\n\n{_markdown_suite(group)}")
        last = where
    return "\n".join(sections)


def _where(row: Row) -> str:
    """Describe a row's machine, its versions, and the date."""
    texts = [v if k == "device" else f"{k} {v}" for k, v in row.work.machine.items()]
    return ", ".join([*texts, *([row.made[:10]] if row.made else [])])


def _markdown_suite(rows: Sequence[Row]) -> str:
    heads, _ = _columns(rows)
    lines = []
    for case in cases(rows):
        work = case[0].work
        lines.append([f"**{escaped(work.name)}**, {escaped(work.sizes)}", *[""] * len(heads)])
        for row in case:
            way = f"**{escaped(row.way)}**" if row.kind == OURS else escaped(row.way)
            why = f": {escaped(row.refused)}" if row.refused else ""
            cells = dict(zip(HEADS, _cells(row), strict=True))
            lines.append([f"{way}{why}", *(cells[head] for head in heads)])
    return markdown_table(("workload and method", *heads), lines)


def _cells(row: Row) -> list[str]:
    goal = _goal(row)
    if row.ms is None:
        return ["–", "", "", "", "", goal]
    rate = "" if row.rate is None else _rate(row.rate, row.unit)
    error = "" if row.error is None else f"{row.error:.1e}{_times(row.error_ratio)}"
    memory = "" if row.peak is None else f"{row.peak / GIB:.2f} GiB{_times(row.peak_ratio)}"
    speed = "" if row.speed is None else f"{row.speed:.2f}"
    if row.least is not None and row.most is not None and row.kind != BASELINE:
        speed += f" ({row.least:.2f}–{row.most:.2f})"
    return [_number(row.ms), speed, rate, error, memory, goal]


def _goal(row: Row) -> str:
    """Return the goal for time and whether it was reached, then other goals that were missed."""
    ms, speed = row.goal.get("ms"), row.goal.get("speed")
    bound = f"≤ {ms:g} ms" if ms is not None else "" if speed is None else f"≥ {speed:.2f}"
    if row.reached is None:
        return bound
    missed = [*row.missed()]
    others = [
        f"{name} ≤ {row.goal[name]:g}× missed" for name in ("error", "memory") if name in missed
    ]
    verdict = f"{bound} {'missed' if {'ms', 'speed'} & {*missed} else 'reached'}".strip()
    return ", ".join([verdict, *others] if bound or not others else others)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f}×)"


def _rate(value: float, unit: str) -> str:
    size, letter = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{_number(value / size)} {letter}{unit}"


def _number(value: float) -> str:
    """Format a number with about three digits, never in scientific notation."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:,.{digits}f}"
