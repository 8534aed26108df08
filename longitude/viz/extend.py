"""The report of `longitude extend` and `tune`: terminal, page, model card and charts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import vl_convert
from markupsafe import Markup
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longitude.eval.records import CONTEXT, COST, KEPT, LOSS, RETRIEVAL
from longitude.eval.tables import ResultTable
from longitude.eval.tasks import metrics
from longitude.viz import files
from longitude.viz.plot import DIM, GAP
from longitude.viz.result_charts import extend_charts, standalone
from longitude.viz.section import INSANE, OVER, Section
from longitude.viz.terminal import NEAR, render, rich_table
from longitude.viz.text import NOTHING, escaped, fenced, markdown_table, printable
from longitude.viz.vega import DARK, DASHES, LIGHT, Chart, Rows, method_themes, stroke

HEADS = {"label": "method", "family": "questions", "x": "true distance"}
MAX_LENGTHS = 5  # columns of lengths in the terminal
COMPUTED = "Computed from the scheme, relative to the model’s own rotation; nothing is run."


def table(section: Section, *, color: bool = False, width: int = 100) -> str:
    """The text that the terminal shows for a section."""
    return render(lambda console: show_section(section, console), color=color, width=width)


def show_section(section: Section, console: Console) -> None:
    """Print the methods, with as many columns as fit, the advice, and the commands to run next."""
    console.print(Text(section.title, style="bold"))
    sizes = f"trained on {section.subject.trained:,} tokens, measured up to {section.target:,}"
    console.print(Text(sizes, style=DIM))
    console.print()
    names = min(max(map(len, section.labels)), max(16, console.width // 3))
    room, columns = console.width - names - GAP, []
    for name, head, cells in _columns(section, star=not console.is_terminal):
        room -= max(map(len, [*head.split("\n"), *(cell.plain for cell in cells)])) + GAP
        if room < 0:
            break
        columns.append((name, head, cells))
    styles = ("bold cyan" if label == section.best else "" for label in section.ranked)
    labels = [Text(label, style) for label, style in zip(section.ranked, styles, strict=True)]
    rows = [[label, *(cells[n] for _, _, cells in columns)] for n, label in enumerate(labels)]
    console.print(rich_table(["method", *(head for _, head, _ in columns)], rows, names))
    shown = {name for name, _, _ in columns}
    legend = [
        "; ".join(c.note for c in section.columns if c.name in shown and c.note),
        f"bold or *: the best; {NEAR}: not significantly different (95 %, paired by document)",
        *([INSANE] if section.any_insane else []),
        *(f"{NOTHING} {line}" for line in [*section.remarks(), *section.notes]),
    ]
    for line in legend:
        console.print(Text(line, style=DIM))
    console.print()
    searches = (("search", f"{text} {scheme}".strip()) for text, scheme in section.searches)
    for what, sentence in [*section.advice(), *searches]:
        console.print(Text(what, style="bold"))
        console.print(Padding.indent(Text(sentence), 2))
    if section.lm_eval:
        heads, scores = section.lm_eval
        score_table = rich_table(heads, [[*map(Text, row)] for row in scores])
        score_table.columns[0].style = ""
        console.print(Text("lm-eval", style="bold"))
        console.print(Padding.indent(score_table, 2))
    for title, command in section.next_steps:
        console.print()
        console.print(Text(title, style=DIM))
        for line in command.splitlines():
            indent = line[: len(line) - len(line.lstrip())].expandtabs()
            console.print(Text(f"  {indent}{printable(line)}", style="cyan"), soft_wrap=True)


def _columns(section: Section, star: bool) -> Iterator[tuple[str, str, list[Text]]]:
    """Each column's name, head and cells: the main metric at several lengths, then the others."""
    main, ranked = section.main, section.ranked
    if main:
        for n in some_lengths(main.lengths, section.subject.trained):
            cells = [section.cell(main, s, n).text(star) for s in ranked]
            yield main.metric.name, f"{main.metric.heading}\n{n:,}", cells
    for column in section.columns:
        if column.name not in (OVER, main and main.metric.name):
            cells = [section.shown(s, column.name).text(star) for s in ranked]
            yield column.name, column.title.replace(" ", "\n"), cells


def some_lengths(lengths: Sequence[int], trained: int) -> list[int]:
    """The longest length in the window and those beyond, the target last; at most MAX_LENGTHS."""
    inside = max((n for n in lengths if n <= trained), default=0)
    past = [n for n in lengths if n >= inside]
    last, count = len(past) - 1, min(len(past), MAX_LENGTHS)
    return [past[round(i * last / max(1, count - 1))] for i in range(count)]


def markdown(section: Section, charts: Sequence[tuple[str, str]] = ()) -> str:
    """Format a section for a model card; `charts` are (title, file) pairs."""

    def listed(lines: Sequence[str], title: str = "") -> str:
        return title + "".join(f"- {line}\n" for line in lines) if lines else ""

    columns, scheme = section.columns, fenced(section.subject.scheme)
    heads = ["method", *(f"{c.title} ({c.unit})" for c in columns), "scheme"]
    rows = [
        [fenced(s), *(section.shown(s, c.name).markdown() for c in columns), fenced(text)]
        for s, text in ((s, section.schemes[s]) for s in section.ranked)
    ]
    signs = f"**Bold**: the best; {NEAR}: not significantly different from it; ranges are 95 % CIs."
    searches = [f"{escaped(s)}{f' {fenced(text)}' if text else ''}" for s, text in section.searches]
    by_length = []
    for metric in (metrics()[m] for m in (KEPT, RETRIEVAL, CONTEXT) if m in section.tables):
        table = length_table(section, section.tables[metric.name])
        lines = [[fenced(label), *(c.markdown() for c in cells)] for label, *cells in table["rows"]]
        drawn = markdown_table(table["heads"], lines)
        by_length.append(f"{metric.title}, {metric.unit}:\n\n{drawn}")
    scores = ""
    if section.lm_eval:
        (first, *labels), lines = section.lm_eval
        tasks = [[escaped(line[0]), *line[1:]] for line in lines]
        scores = "lm-eval:\n\n" + markdown_table([first, *map(fenced, labels)], tasks)
    parts = [
        f"## {escaped(section.title)} at {section.target:,} tokens\n",
        f"Trained on {section.subject.trained:,} tokens; its own scheme is {scheme}.\n",
        listed([f"**{escaped(what)}**: {escaped(text)}" for what, text in section.advice()]),
        f"{markdown_table(heads, rows)}\n{signs}{f' {INSANE}' if section.any_insane else ''}\n",
        listed([*map(escaped, [*section.remarks(), *section.notes])]),
        *by_length,
        listed(searches, "Search:\n\n"),
        scores,
        "".join(f"![{escaped(title)}]({file})\n" for title, file in charts),
        listed([*map(escaped, section.machines())], "Measured on:\n\n"),
    ]
    return "\n".join(filter(None, parts))


def write_summary(sections: Sequence[Section], path: Path, charts: Sequence[Path] = ()) -> None:
    """Write the summary for a model card, which links to `charts` by relative paths."""
    drawn = [(chart.stem, chart.relative_to(path.parent).as_posix()) for chart in charts]
    texts = [markdown(s, drawn if n == 0 else ()) for n, s in enumerate(sections)]
    files.replace_file(path, "\n".join(texts).encode())


def write_charts(section: Section, folder: Path) -> list[Path]:
    """Write each chart as a PNG and return the paths."""
    by_file = groupby(extend_charts(section), lambda chart: chart.name.split("-")[0])
    specs = {folder / f"{name}.png": standalone(section, [*group]) for name, group in by_file}
    for path, spec in specs.items():
        files.replace_file(path, vl_convert.vegalite_to_png(json.dumps(spec), scale=2))
    return [*specs]


def write_page(sections: Sequence[Section], path: Path) -> None:
    """Write the page of one or several models, a single self-contained file."""
    named = sections[0].title if len(sections) == 1 else "Models side by side"
    files.replace_file(path, page(sections, named).encode())


def page(sections: Sequence[Section], title: str) -> str:
    """The self-contained page; charts are named "2-context" and so on from the second model on."""
    prefixes = ["", *(f"{n}-" for n in range(2, len(sections) + 1))]
    drawn = [extend_charts(section) for section in sections]
    charts = {
        prefix + chart.name: {"section": n, "spec": {**chart.spec, "description": chart.title}}
        for n, (group, prefix) in enumerate(zip(drawn, prefixes, strict=True))
        for chart in group
    }
    rules = [
        "".join(f".c{n} {{ stroke: {colour}; }}" for n, colour in enumerate(palette))
        for palette in (LIGHT, DARK)
    ]
    return files.page(
        "page.html",
        charts,
        [method_themes(len(s.labels)) for s in sections],
        title=title,
        sections=[
            {"s": s, "prefix": prefix, "figures": _figures(s, group, prefix)}
            for s, group, prefix in zip(sections, drawn, prefixes, strict=True)
        ],
        insane=INSANE,
        method=_method,
        colours=Markup(f"{rules[0]}@media (prefers-color-scheme: dark) {{ {rules[1]} }}"),
    )


def _method(section: Section, label: str) -> dict[str, Any]:
    """A label, and the stroke that the charts draw it with."""
    colour, dash = stroke(section.labels.index(label))
    drawn = " ".join(map(str, DASHES[dash])) if dash else "none"
    return {"label": label, "colour": colour, "dash": drawn}


def _figures(section: Section, charts: Sequence[Chart], prefix: str) -> list[dict[str, Any]]:
    """A figure per heading: one chart, or small ones side by side, and tables of their numbers."""
    figures = []
    for _, group in groupby(charts, lambda chart: chart.title):
        first, *others = group
        sized = ", ".join(label for label in section.labels if label in section.by_size)
        note = f" Drawn for heads of 64 dimensions, on which it depends for {sized}."
        metric = metrics().get(first.measure)
        source = f" ({metric.paper}.)" if metric and metric.paper else ""
        protocol = metric.help + source if metric else COMPUTED
        settings = section.protocols(first.measure)
        figures.append(
            {
                "name": prefix + first.name,
                "title": first.title,
                "reading": first.reading + (note if first.name == "distance" and sized else ""),
                "boxes": [(prefix + chart.name, chart.label) for chart in (first, *others)],
                "tables": [*_tables(section, first)],
                "protocol": f"{protocol} ({settings}.)" if settings else protocol,
            }
        )
    return figures


def _tables(section: Section, chart: Chart) -> Iterator[dict[str, Any]]:
    if chart.name == "distance":
        yield _pivot("Effective distances", chart.rows, ("x",), "label", _distance)
    elif chart.label is not None:
        rows = [row for other in extend_charts(section) if other.label for row in other.rows]
        names, share = ("label", "family"), "{mean:.0%} of {n}".format_map
        yield _pivot("Exact answers by length", rows, names, "length", share)
    elif chart.name == "cost":
        costs = [name for name, m in metrics().items() if m.rows == COST]
        yield from (length_table(section, section.tables[n]) for n in costs if n in section.tables)
    else:
        if chart.name == LOSS:
            rows = [{**row, "bin": f"{row['first'] + 1:,}–{row['past']:,}"} for row in chart.rows]
            title = "Loss by position, in bins (nats per token)"
            yield _pivot(title, rows, ("label",), "bin", "{mean:.3f}".format_map)
        yield length_table(section, section.tables[chart.measure])


def length_table(section: Section, table: ResultTable) -> dict[str, Any]:
    """A metric's numbers as a table: methods down, lengths across."""
    heads = [f"{n:,}{' (trained)' if n == table.trained else ''}" for n in table.lengths]
    rows = [[s, *(section.cell(table, s, n) for n in table.lengths)] for s in table.labels]
    metric = table.metric
    unit = "" if metric.unit in ("share", "bytes") else f" ({metric.unit})"
    return {"title": f"{metric.title} by length{unit}", "heads": ["method", *heads], "rows": rows}


def _pivot(
    title: str, rows: Rows, names: Sequence[str], across: str, text: Callable[[Any], str]
) -> dict[str, Any]:
    """Rows as a table: the fields `names` down, the values of `across` in columns."""
    columns = [*dict.fromkeys(row[across] for row in rows)]
    lines: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in rows:
        lines.setdefault(tuple(row[n] for n in names), {})[row[across]] = text(row)
    heads = [HEADS[n] for n in names] + [_plain(n) for n in columns]
    body = [[*map(_plain, key), *(line.get(n, "") for n in columns)] for key, line in lines.items()]
    return {"title": title, "heads": heads, "rows": body}


def _plain(value: Any) -> str:
    percent = isinstance(value, float) and 0 <= value <= 1
    return value if isinstance(value, str) else f"{value:.0%}" if percent else f"{value:,}"


def _distance(row: Mapping[str, Any]) -> str:
    low, high = (None if row[end] is None else f"{row[end]:,.5g}" for end in ("low", "high"))
    return "hidden" if high is None else high if low == high else f"{low} – {high}"
