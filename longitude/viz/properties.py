"""The four properties of schemes in the terminal, and the table that compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.inspection.rows import Curve, Properties, SchemeProperties
from longitude.viz.plot import DIM, Line, Plot
from longitude.viz.terminal import GAP, side_by_side
from longitude.viz.text import escaped, fenced, markdown_table, short, spans

NOTHING = "–"
AXES = {
    "rotation": "mean cosine, by tokens away (log)",
    "bound": "mean |S|, by tokens away (log)",
    "bias": "mean over heads, by tokens away (log)",
    "embedding": "cosine of vectors, by tokens away (log)",
}
HEADS = (
    "least apart",
    "same code",
    "not relative",
    "told at most",
    "unseen pairs",
    "novelty",
    "falls to",
)


def show(found: SchemeProperties, console: Console) -> None:
    """One scheme: a sentence for each property, and its curves."""
    console.print(Text(found.written, style="bold cyan"), soft_wrap=True)
    sizes = f"{found.length:,} tokens, {found.heads} heads of {found.dim} dimensions"
    console.print(Text(sizes, style=DIM))
    for sheet in found.sheets:
        console.print()
        if sheet.layers:
            noun = "layer" if len(sheet.layers) == 1 else "layers"
            head = Text(f"{noun} {spans(sheet.layers)}  ", style="bold")
            console.print(head + Text(sheet.written, style="cyan"), soft_wrap=True)
        console.print(_sentences(sheet))
        for row in side_by_side([_plot(c) for c in sheet.decay], console.width):
            console.print()
            console.print(row)
        for note in sheet.notes:
            console.print(Text(note, style=DIM))


def table(found: Sequence[SchemeProperties], console: Console) -> None:
    """Many schemes, a line for each of their distinct layers."""
    first = next((s for one in found for s in one.sheets), None)
    if first:
        far = first.extrapolation
        console.print(Text(f"trained at {far.trained:,}, read at {far.length:,} tokens", DIM))
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    made.add_column("", style="cyan", overflow="fold")
    for head in HEADS:
        made.add_column(head.replace(" ", "\n", 1), justify="right", no_wrap=True)
    refused = []
    for name, cells in rows(found):
        made.add_row(name, *cells)
    for one in found:
        refused += [f"{one.name or one.written}: {one.refused}"] if one.refused else []
    console.print(made)
    for line in refused:
        console.print(Text(f"{NOTHING} {line}", style=DIM))


def markdown(found: Sequence[SchemeProperties]) -> str:
    """The same table as Markdown."""
    lines = [[fenced(name), *map(escaped, cells)] for name, cells in rows(found)]
    return markdown_table(["scheme", *HEADS], lines)


def rows(found: Sequence[SchemeProperties]) -> Iterator[tuple[str, list[str]]]:
    """Each scheme's name and its numbers under `HEADS`."""
    for one in found:
        name = one.name or one.written
        for sheet in one.sheets:
            own = f" {spans(sheet.layers)}" if sheet.layers else ""
            yield name + own, cells(sheet)


def cells(sheet: Properties) -> list[str]:
    """The numbers of one scheme, as short as they can be."""
    unique, far, relative = sheet.uniqueness, sheet.extrapolation, sheet.relativity
    curve = _leading(sheet)
    told = far.believed
    strange = far.total_novelty
    return [
        NOTHING if unique.least is None else short(unique.least),
        _percent(unique.shared / unique.compared),
        "0" if relative.exact else "by mask" if not relative.spread else f"{relative.share:.2f}",
        NOTHING if told is None else short(round(told)),
        NOTHING if far.unseen is None else f"{far.unseen} of {far.pairs}",
        f"ends at {short(far.reach)}" if strange is None else short(strange),
        NOTHING if curve is None else short(curve.falls_to),
    ]


def _percent(share: float) -> str:
    """A share that is shown as none or all only where it is that."""
    if share in (0, 1):
        return f"{share:.0%}"
    return "<1%" if share < 0.005 else ">99%" if share > 0.995 else f"{share:.0%}"


def _leading(sheet: Properties) -> Curve | None:
    """The curve that says most about a scheme's decay."""
    named = [sheet.curve(n) for n in ("rotation", "bias", "embedding")]
    return next((c for c in named if c), None)


def _sentences(sheet: Properties) -> Table:
    made = Table.grid(padding=(0, GAP))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    made.add_row("uniqueness", " ".join(uniqueness(sheet)))
    made.add_row("extrapolation", " ".join(extrapolation(sheet)))
    made.add_row("relativity", " ".join(relativity(sheet)))
    made.add_row("decay", " ".join(decay(sheet)) or "Nothing here depends on distance.")
    return made


def uniqueness(sheet: Properties) -> Iterator[str]:
    """What the least distance says."""
    u = sheet.uniqueness
    if u.least is None or u.pair is None:
        yield "The last query sees one key."
    elif u.least == 0:
        yield (
            f"0: {u.shared:,} of {u.compared:,} keys share another's code, as {u.pair[0]:,} and "
            f"{u.pair[1]:,}."
        )
    else:
        yield f"{u.least:.3g}, between keys {u.pair[0]:,} and {u.pair[1]:,}; no two are the same."


def extrapolation(sheet: Properties) -> Iterator[str]:
    """What happens past the trained length."""
    e = sheet.extrapolation
    yield f"Trained at {e.trained:,}:"
    if e.refused:
        yield f"there is no code past token {e.reach - 1:,} ({e.refused.rstrip('.')})."
        return
    if e.believed is not None:
        unseen = f"{e.unseen} of {e.pairs} pairs meet" if e.unseen else "no pair meets"
        yield f"distances to {short(e.believed)} are believed, {unseen} unseen angles;"
    strange = e.total_novelty or 0
    yield (
        f"the strangest code lies {strange:.3g} from every trained one"
        + (f" ({', '.join(f'{k} {v:.3g}' for k, v in e.novelty.items())})." if strange else ".")
        if e.novelty
        else "position has no code."
    )
    if e.scale != 1:
        yield f"The last query's scores are multiplied by {e.scale:.3f}."
    if e.hidden:
        yield f"It doesn't see {e.hidden:.0%} of the keys."


def relativity(sheet: Properties) -> Iterator[str]:
    """Whether distance is all."""
    r = sheet.relativity
    if r.exact:
        yield "0: a function of i - j."
    elif not r.spread:
        yield "0 where pairs are seen."
    else:
        yield f"{r.spread:.3g}, {r.share:.0%} of how scores vary."
    if r.uneven:
        yield f"At {r.uneven:.0%} of distances some queries see their key and others don't."
    if r.inner is not None:
        what = "is a function of i - j" if r.inner == 0 else f"varies by {r.inner:.0%} besides"
        yield f"The product of two positions' vectors by itself {what}."


def decay(sheet: Properties) -> Iterator[str]:
    """Where each curve stops falling."""
    for c in sheet.decay:
        below = f", first below 0 at {c.negative:,}," if c.negative and c.start > 0 else ""
        yield (
            f"The {c.name} falls from {c.start:.3g} to {c.least:.3g} at {c.falls_to:,}{below} and "
            f"ends at {c.last:.3g}; it rises in {c.rises:.0%} of steps."
        )


def _plot(curve: Curve) -> Plot:
    title = {"bound": "Abel bound"}.get(curve.name, curve.name.capitalize())
    return Plot(title, AXES[curve.name], [Line("", curve.rows)], x_ratios=True)
