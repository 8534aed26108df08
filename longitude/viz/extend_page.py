"""The numbers behind each chart of `longitude extend`, as tables.

The page of `longitude extend`: one file that loads nothing, in the reader's own light.

Jinja2 escapes whatever is put into it. Only the scripts that we wrote may run: the page's policy
names them by their hashes, and allows no address at all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.eval.records import COST
from longitude.eval.stats import Interval
from longitude.eval.tables import ResultTable
from longitude.eval.tasks import metrics
from longitude.viz.extend_charts import charts
from longitude.viz.extend_section import DAGGER, NOT_ASKED, Section, printed
from longitude.viz.extend_text import advice, forgotten, headline, notes, scores, searches
from longitude.viz.extend_theme import DARK, LIGHT, config, dashes, place
from longitude.viz.extend_vega import Chart


def tables(s: Section, chart: Chart) -> list[dict[str, Any]]:
    """A chart's numbers as tables."""
    if chart.label is not None:
        return [_grid_table(s)]
    if chart.measure == "distance":
        return [_map_table(chart)]
    if chart.name == "loss":
        return [_bins_table(s), _board_table(s, s.boards["loss"])]
    costs = [name for name, m in metrics().items() if m.rows == COST and name in s.boards]
    names = costs if chart.name == "cost" else [chart.measure]
    return [_board_table(s, s.boards[name]) for name in names]


def _board_table(s: Section, board: ResultTable) -> dict[str, Any]:
    heads = [f"{n:,}{' (trained)' if n == board.trained else ''}" for n in board.lengths]
    rows = [[label, *(s.cell(board, label, n) for n in board.lengths)] for label in board.labels]
    unit = "" if board.unit in ("share", "bytes") else f" ({board.unit})"
    return {"title": f"{board.title} by length{unit}", "heads": ["method", *heads], "rows": rows}


def _bins_table(s: Section) -> dict[str, Any]:
    bins = sorted({(a, b) for path in s.curves.values() for a, b, _ in path})
    found = {(s, a, b): v for s, path in s.curves.items() for a, b, v in path}
    heads = [f"{a + 1:,}–{b:,}" if b > a + 1 else f"{b:,}" for a, b in bins]
    rows = [
        [
            label,
            *(printed("loss", v.mean) if (v := found.get((label, *ends))) else "" for ends in bins),
        ]
        for label in s.curves
    ]
    title = "Loss by position, in bins (nats a token)"
    return {"title": title, "heads": ["method", *heads], "rows": rows}


def _grid_table(s: Section) -> dict[str, Any]:
    lengths = s.boards["passkey"].lengths
    rows = [
        [label, f"{depth:.0%}", *(_share(s, label, n, cells.get((n, depth))) for n in lengths)]
        for label, cells in s.grids.items()
        for depth in sorted({depth for _, depth in cells})
    ]
    heads = ["method", "depth", *(f"{n:,}" for n in lengths)]
    return {"title": "Passkeys by length and depth", "heads": heads, "rows": rows}


def _share(s: Section, label: str, length: int, value: Interval | None) -> str:
    sign = DAGGER if s.assumed("passkey", label, length) else ""
    return f"{value.mean:.0%} of {value.n}{sign}" if value else ""


def _map_table(chart: Chart) -> dict[str, Any]:
    named = [*dict.fromkeys(r["label"] for r in chart.rows)]
    found = {(r["label"], r["x"]): (r["low"], r["high"]) for r in chart.rows}
    rows = [
        [f"{x:,}", *(_ends(found.get((label, x))) for label in named)]
        for x in sorted({r["x"] for r in chart.rows})
    ]
    return {"title": "Believed distances", "heads": ["true distance", *named], "rows": rows}


def _ends(ends: tuple[float | None, float | None] | None) -> str:
    if ends is None:
        return ""
    low, high = (None if end is None else f"{end:,.5g}" for end in ends)
    return "hidden" if high is None else high if low == high else f"{low} – {high}"


LEGEND = (
    "From the best at {target:,} tokens to the worst. Bold: no other is better; ≈: not "
    "significantly different from the best (the 95 % interval of the paired difference "
    "holds zero). Below a number, its 95 % interval."
)
TILES = ("context", "loss", "passkey", "reach", "tax", "prefill")
PROTOCOL = {
    "loss": "One reading of each document at the greatest length gives the loss at every position "
    "(a method that depends on the whole length is read once a length); means over documents.",
    "context": "The same last tokens of each document are scored with ever more of the text before "
    "them; means over documents, intervals over documents.",
    "passkey": "A number is hidden at some depth of a filler text and asked for at its end; only "
    "the whole number counts. Wilson intervals.",
    "distance": "Computed from the scheme, relative to the model’s own rotation; nothing is run.",
}


def _procedure(measure: str) -> str:
    return PROTOCOL.get(measure) or metrics()[measure].help


def page(sections: Sequence[Section], title: str) -> str:
    """The whole page."""
    drawn = [charts(s) for s in sections]
    prefixes = ["", *(f"{n}-" for n in range(2, len(sections) + 1))]  # "context", "2-context" …
    told = [
        _section(s, made, prefix) for s, made, prefix in zip(sections, drawn, prefixes, strict=True)
    ]
    embedded = {
        prefix + chart.name: {"section": index, "spec": {**chart.spec, "description": chart.title}}
        for index, (made, prefix) in enumerate(zip(drawn, prefixes, strict=True))
        for chart in made
    }
    counts = [len(s.labels) for s in sections]
    themes = [{"light": config(n), "dark": config(n, dark=True)} for n in counts]
    scripts = (_library(), _asset("page.js"))
    return _template().render(
        title=title,
        sections=told,
        charts={"charts": embedded, "themes": themes},
        version=__version__,
        policy=_policy(scripts),
        library=Markup(scripts[0]),
        script=Markup(scripts[1]),
        style=Markup(_asset("page.css") + _strokes()),
    )


def _section(s: Section, made: list[Chart], prefix: str) -> dict[str, Any]:
    """What the template tells of one model."""
    return {
        "id": f"{prefix}model",
        "title": s.title,
        "facts": _facts(s),
        "advice": _advice(s),
        "what_next": s.what_next,
        "sentence": headline(s)[0],
        "searches": searches(s),
        "scores": _scores(s),
        "legend": LEGEND.format(target=s.target) + (f" {NOT_ASKED}" if s.any_assumed else ""),
        "columns": s.columns(),
        "methods": [_method_row(s, label) for label in s.ranked],
        "refusals": [*s.refusals(), *forgotten(s)],
        "key": [_method(s, label) for label in s.labels],
        "figures": [
            _figure(s, list(group), prefix) for _, group in groupby(made, lambda c: c.title)
        ],
        "about": _about(s),
    }


def _facts(s: Section) -> str:
    subject, texts = s.subject, len(s.texts)
    documents = f"{texts} document{'s' if texts != 1 else ''} · " if texts else ""
    return (
        f"trained on {subject.trained:,} tokens, read up to {s.target:,} · {len(s.labels)} methods "
        f"· {documents}{subject.dtype} on {subject.device}"
    )


def _advice(s: Section) -> dict[str, Any] | None:
    best = s.recommendation.get("best")
    if not best:
        return None
    head, why = headline(s)
    others = [*advice(s)][1:]
    return {
        "head": head,
        "why": why,
        "scheme": best["scheme"],
        "tiles": _tiles(s),
        "others": others,
    }


def _tiles(s: Section) -> list[dict[str, Any]]:
    """The recommended method's numbers at a glance, each with that of the baseline."""
    own = s.labels[0] if s.found and any(one.is_baseline for one in s.found) else None
    if s.best not in s.schemes:
        return []
    return [
        {
            "column": c,
            "cell": s.shown(s.best, c.name),
            "own": s.shown(own, c.name).value if own and own != s.best else "",
        }
        for c in s.columns()
        if c.name in TILES
    ]


def _scores(s: Section) -> dict[str, Any] | None:
    judged = scores(s)
    return judged and {"heads": judged[0], "rows": judged[1]}


def _method(s: Section, label: str) -> dict[str, Any]:
    """A label with its stroke."""
    index = s.labels.index(label)
    colour, dash = place(index)
    drawn = " ".join(map(str, dashes(index + 1)[index])) if dash else "none"
    return {"label": label, "colour": colour, "dash": drawn}


def _method_row(s: Section, label: str) -> dict[str, Any]:
    return {
        "method": _method(s, label),
        "recommended": label == s.best,
        "scheme": s.schemes[label],
        "cells": [s.shown(label, column.name) for column in s.columns()],
    }


def _figure(s: Section, group: list[Chart], prefix: str) -> dict[str, Any]:
    """Charts under one heading: one, or small ones beside each other."""
    first = group[0]
    boxes = [
        {"name": prefix + c.name, "method": _method(s, c.label) if c.label else None} for c in group
    ]
    taken = "; ".join(s.protocols(first.measure))
    return {
        "name": prefix + first.name,
        "title": first.title,
        "reading": first.reading + (_sized(s) if first.measure == "distance" else ""),
        "small": first.label is not None,
        "boxes": boxes,
        "tables": tables(s, first),
        "protocol": " ".join(filter(None, [_procedure(first.measure), taken and f"({taken}.)"])),
    }


def _sized(s: Section) -> str:
    """For which methods the map would be another in heads of another size."""
    named = ", ".join(label for label in s.labels if label in s.by_size)
    return f" Drawn for heads of 64 dimensions, on which it depends for {named}." if named else ""


def _about(s: Section) -> list[tuple[str, list[str]]]:
    subject = s.subject
    revision = f", revision {subject.revision}" if subject.revision else ""
    days = sorted({one.made[:10] for one in s.found if one.made})
    dates = days[:1] if len(days) < 2 else [f"{days[0]} to {days[-1]}"]
    every = {
        "model": [f"{subject.name}{revision}, weights {subject.weights[:16]}"],
        "its own scheme": [subject.scheme],
        "documents": [f"{t.name} ({t.digest[:12]})" for t in s.texts],
        "machine": s.machines(),
        "notes": notes(s),
        "measured": dates,
    }
    return [(name, lines) for name, lines in every.items() if lines]


def _strokes() -> str:
    """The methods' colours, as the charts have them."""

    def rules(colours: Sequence[str]) -> str:
        return "".join(f".c{n} {{ stroke: {c}; }}" for n, c in enumerate(colours))

    return f"{rules(LIGHT)}@media (prefers-color-scheme: dark) {{ {rules(DARK)} }}"


def _policy(scripts: Sequence[str]) -> str:
    """Scripts by hash; `unsafe-eval` lets Vega compile its expressions."""
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    named = " ".join(f"'sha256-{d}'" for d in digests)
    allowed = f"script-src 'unsafe-eval' {named}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; {allowed}"


@cache
def _library() -> str:
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("\r\n", "\n")  # as a browser reads it before it takes the hash


def _asset(name: str) -> str:
    return files("longitude.viz").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made.from_string(_asset("page.html"))
