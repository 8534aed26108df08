"""`longitude check` in the terminal and as Markdown: the four properties of schemes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from longitude.inspection.rows import Properties, SchemeProperties, Uniqueness
from longitude.viz.plot import DIM, Line, Plot, side_by_side
from longitude.viz.terminal import facts, heading, layer_heading, rich_table
from longitude.viz.text import NOTHING, escaped, fenced, markdown_table, short, spans

CURVES = {  # title and axes of each curve's plot
    "rotation": ("Rotation", "mean cosine, by distance (log)"),
    "bound": ("Abel bound", "mean |S|, by distance (log)"),
    "bias": ("Bias", "mean over heads, by distance (log)"),
    "embedding": ("Embedding", "cosine of vectors, by distance (log)"),
}
HEADS = ["least distance", "shared codes", "not relative", "max distance", "unseen pairs"]
HEADS += ["novelty", "falls to"]


def show(checked: SchemeProperties, console: Console) -> None:
    """Print one scheme: a sentence for each property, and its curves."""
    sizes = f"{checked.length:,} tokens, {checked.heads} heads of {checked.dim} dimensions"
    heading(checked.written, sizes, console)
    for sheet in checked.sheets:
        console.print()
        layer_heading(sheet, console)
        sentences = [
            ("uniqueness", _uniqueness(sheet.uniqueness)),
            ("extrapolation", " ".join(_extrapolation(sheet))),
            ("relativity", " ".join(_relativity(sheet))),
            ("decay", " ".join(_decay(sheet)) or "Nothing here depends on distance."),
        ]
        console.print(facts(sentences, style="bold"))
        curves = [Plot(*CURVES[c.name], [Line("", c.rows)], x_log=True) for c in sheet.decay]
        side_by_side(curves, console)
        for note in sheet.notes:
            console.print(Text(note, style=DIM))


def table(schemes: Sequence[SchemeProperties], console: Console) -> None:
    """Print many schemes, one line per distinct layer."""
    first = next((sheet.extrapolation for s in schemes for sheet in s.sheets), None)
    if first:
        text = f"trained at {first.trained:,}, evaluated at {first.length:,} tokens"
        console.print(Text(text, DIM))
    heads = ["", *(head.replace(" ", "\n", 1) for head in HEADS)]
    console.print(rich_table(heads, [(name, *cells) for name, cells in rows(schemes)]))
    for s in schemes:
        if s.refused:
            console.print(Text(f"{NOTHING} {s.name or s.written}: {s.refused}", style=DIM))


def markdown(schemes: Sequence[SchemeProperties]) -> str:
    """The same table as Markdown."""
    lines = [[fenced(name), *map(escaped, cells)] for name, cells in rows(schemes)]
    return markdown_table(["scheme", *HEADS], lines)


def rows(schemes: Sequence[SchemeProperties]) -> Iterator[tuple[str, list[str]]]:
    """Each scheme's name and its numbers under `HEADS`, one row per distinct layer."""
    for checked, sheet in ((scheme, sheet) for scheme in schemes for sheet in scheme.sheets):
        unique, past, relative = sheet.uniqueness, sheet.extrapolation, sheet.relativity
        curves = [sheet.curve(name) for name in ("rotation", "bias", "embedding")]
        curve = next((c for c in curves if c), None)  # the curve that says most about decay
        shared, novelty = unique.shared / unique.compared, past.total_novelty
        near = "<1%" if 0 < shared < 0.005 else ">99%" if 0.995 < shared < 1 else f"{shared:.0%}"
        relative_share = "by mask" if not relative.spread else f"{relative.share:.2f}"
        layers = f" {spans(sheet.layers)}" if sheet.layers else ""
        yield (
            (checked.name or checked.written) + layers,
            [
                NOTHING if unique.least is None else short(unique.least),
                near,
                "0" if relative.exact else relative_share,
                NOTHING if past.believed is None else short(round(past.believed)),
                NOTHING if past.unseen is None else f"{past.unseen} of {past.pairs}",
                f"ends at {short(past.reach)}" if novelty is None else short(novelty),
                NOTHING if curve is None else short(curve.falls_to),
            ],
        )


def _uniqueness(u: Uniqueness) -> str:
    if u.least is None or u.pair is None:
        return "The last query sees one key."
    pair = f"{u.pair[0]:,} and {u.pair[1]:,}"
    if u.least == 0:
        return f"0: {u.shared:,} of {u.compared:,} keys share a code, for example {pair}."
    return f"{u.least:.3g}, between keys {pair}; no two share a code."


def _extrapolation(sheet: Properties) -> Iterator[str]:
    e = sheet.extrapolation
    yield f"Trained at {e.trained:,}:"
    if e.refused:
        yield f"there is no code past token {e.reach - 1:,} ({e.refused.rstrip('.')})."
        return
    if e.believed is not None:
        unseen = f"{e.unseen} of {e.pairs} pairs meet" if e.unseen else "no pair meets"
        yield f"effective distances reach {short(e.believed)}, and {unseen} unseen angles;"
    if not e.novelty:
        yield "position has no code."
    else:
        by_site = ", ".join(f"{site} {v:.3g}" for site, v in e.novelty.items())
        total = e.total_novelty or 0
        farthest = f"the most novel code is {total:.3g} from the nearest trained one"
        yield f"{farthest} ({by_site})." if total else f"{farthest}."
    if e.scale != 1:
        yield f"The last query's scores are multiplied by {e.scale:.3f}."
    if e.hidden:
        yield f"It doesn't see {e.hidden:.0%} of the keys."


def _relativity(sheet: Properties) -> Iterator[str]:
    r = sheet.relativity
    if r.exact:
        yield "0: a function of i - j."
    elif not r.spread:
        yield "0 where pairs are visible."
    else:
        yield f"{r.spread:.3g}, {r.share:.0%} of the standard deviation of scores."
    if r.uneven:
        yield f"At {r.uneven:.0%} of distances some queries see their key and others don't."
    if r.inner is not None:
        what = "is a function of i - j" if r.inner == 0 else f"varies by {r.inner:.0%} besides"
        yield f"The inner product of two positions' vectors alone {what}."


def _decay(sheet: Properties) -> Iterator[str]:
    for c in sheet.decay:
        below = f", first below 0 at {c.negative:,}," if c.negative and c.start > 0 else ""
        yield (
            f"The {c.name} falls from {c.start:.3g} to {c.least:.3g} at {c.falls_to:,}{below} and "
            f"ends at {c.last:.3g}; it rises in {c.rises:.0%} of steps."
        )
