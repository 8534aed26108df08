"""Write the page of fine-tuned extensions from the rows of `longitude tune --json`.

python docs/scripts/tune.py [OUTCOME.json …]    writes the tables, with these outcomes too
python docs/scripts/tune.py --check             fails when the page's tables are stale

A row is what `longitude tune --json` prints, or a timed training step (its kind is "step"). An
outcome replaces an older one of the same model, scheme, recipe, lengths and machine.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from longitude.viz.text import escaped, fenced, markdown_table

PAGE = Path(__file__).parents[1] / "results" / "tune.md"
BETWEEN = r"(?<=<!-- {0} -->\n).*?(?=<!-- /{0} -->)"
NOTHING = "Not measured yet: no row of it stands in {rows}.\n"
TINY, STEP = "tiny-", "step"
Row = dict[str, Any]


def main(given: Sequence[str], page: Path = PAGE) -> None:
    """Write the tables, or fail if they are stale."""
    file, old = page.with_suffix(".jsonl"), page.read_text(encoding="utf-8")
    check = "--check" in given
    rows = read(file)
    for outcome in (g for g in given if g != "--check"):
        rows = with_row(rows, json.loads(Path(outcome).read_text(encoding="utf-8")))
    new = written(old, rows, file.name)
    if check:
        if new != old:
            sys.exit(f"{page.name}'s tables are not those of its rows: run make docs-table.")
        return
    file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    page.write_text(new, encoding="utf-8")


def read(file: Path) -> list[Row]:
    """Read the rows that are stored beside the page."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def with_row(rows: Iterable[Row], new: Row) -> list[Row]:
    """Add a row in place of an older one of the same question. Where the run was stored is removed
    from it."""
    row = {name: value for name, value in new.items() if name not in ("out", "folder")}
    if isinstance(row.get("base"), str):
        row["base"] = row["base"].rstrip("/").rsplit("/", 1)[-1]
    return [*(r for r in rows if _question(r) != _question(row)), row]


def _question(row: Row) -> tuple[str, ...]:
    names = ("kind", "base", "model", "scheme", "target", "length", "way", "machine")
    return (*(str(row.get(name)) for name in names), str((row.get("recipe") or {}).get("name")))


def written(page: str, rows: Sequence[Row], file: str) -> str:
    """Return the page with new tables; a section without rows says so."""
    for name, belongs, table in (
        ("tiny", lambda r: r.get("base", "").startswith(TINY), tuned_table),
        ("models", lambda r: "base" in r and not r["base"].startswith(TINY), tuned_table),
        ("steps", lambda r: r.get("kind") == STEP, step_table),
    ):
        section_rows = [r for r in rows if belongs(r)]
        text = table(section_rows) if section_rows else NOTHING.format(rows=f"[{file}]({file})")
        between = re.compile(BETWEEN.format(name), re.DOTALL)
        page = between.sub(lambda _, text=text: f"\n{text}\n", page)
    return page


def tuned_table(rows: Sequence[Row]) -> str:
    """Return a table of the runs: baseline, before and after, at the target length. A column that
    is empty in every row is left out: older rows have no kept context."""
    heads = ["model", "to", "recipe", "scheme", "trained", "steps"]
    cells = [[heads, *map(_tuned, rows)]]
    for what, measures, show in (
        ("loss", ("context",), lambda x: f"{x:.3f}"),
        ("kept context", ("kept_context",), lambda x: f"{x:.0%}"),
        ("answers", ("retrieval", "passkey"), lambda x: f"{x:.0%}"),
    ):
        texts = [_three(row, measures, show) for row in rows]
        if any(texts):
            cells.append([[f"{what}: baseline, before, after"], *([cell] for cell in texts)])
    cells.append([["in-window cost", "minutes", "machine"], *map(_price, rows)])
    first, *others = ([text for part in line for text in part] for line in zip(*cells, strict=True))
    return markdown_table(first, others)


def _tuned(row: Row) -> list[str]:
    recipe = row["recipe"]
    return [
        fenced(row["base"]),
        f"{row['target']:,}",
        fenced(recipe["name"]),
        fenced(row["scheme"]),
        recipe["trained"],
        f"{row['steps']:,}",
    ]


def _price(row: Row) -> list[str]:
    """Return the cells of a run's cost; older rows call the in-window cost a tax."""
    numbers = (row.get("verdict") or {}).get("numbers") or {}
    cost = numbers.get("in_window_cost") or numbers.get("tax")
    change, minutes = f"{cost['mean']:+.3f}" if cost else "", f"{row['seconds'] / 60:.1f}"
    return [change, minutes, escaped(str(row.get("machine") or ""))]


def _three(row: Row, measures: Sequence[str], show: Callable[[float], str]) -> str:
    """Return the numbers of baseline, before and after at the target as text, a dash for one that
    is missing; empty if all are. Older rows have another name for the baseline."""
    measured, texts = row.get("measured") or {}, []
    for names in (("baseline", "as it is"), ("before",), ("after",)):
        run = next((measured[name] for name in names if name in measured), {})
        values = [run[m][n] for m in measures if m in run and (n := str(row["target"])) in run[m]]
        texts.append(show(values[0]["mean"]) if values else "–")
    return ", ".join(texts) if {*texts} != {"–"} else ""


def step_table(rows: Iterable[Row]) -> str:
    """Return a table of the timed steps beside those of HF Trainer."""
    heads = ["model", "scheme", "tokens", "tokens/s", "of HF Trainer's", "memory of its", "machine"]
    return markdown_table(heads, [_step(row) for row in rows])


def _step(row: Row) -> list[str]:
    speed, memory = row["tokens_per_second"], row.get("peak")
    theirs, their_memory = row["trainer_tokens_per_second"], row.get("trainer_peak")
    ratio = f"{memory / their_memory:.2f}" if memory and their_memory else ""
    cells = [fenced(row["model"]), fenced(row["scheme"]), f"{row['length']:,}", f"{speed:,.0f}"]
    return [*cells, f"{speed / theirs:.2f}", ratio, escaped(str(row.get("machine") or ""))]


if __name__ == "__main__":
    main(sys.argv[1:])
