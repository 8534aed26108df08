"""The page of fine-tuned extensions, read off the rows of `longitude tune --json`.

python docs/scripts/tune.py [OUTCOME.json …]    writes the tables, with these outcomes too
python docs/scripts/tune.py --check             fails when the page's tables are stale

A row is what `longitude tune --json` prints, or a timed training step (its kind is "step"). One
row a question: an outcome takes the place of an older one of the same model, scheme and recipe.
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
    """The rows beside the page."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def with_row(rows: Iterable[Row], new: Row) -> list[Row]:
    """The rows with a new one, in place of the old one of the same question; nothing of where the
    run lay."""
    kept = {name: value for name, value in new.items() if name not in ("out", "folder")}
    if isinstance(kept.get("base"), str):
        kept["base"] = kept["base"].rstrip("/").rsplit("/", 1)[-1]
    return [*(r for r in rows if _question(r) != _question(kept)), kept]


def _question(row: Row) -> tuple[str, ...]:
    names = ("kind", "base", "model", "scheme", "target", "length", "way", "machine")
    return (*(str(row.get(name)) for name in names), str((row.get("recipe") or {}).get("name")))


def written(page: str, rows: Sequence[Row], file: str) -> str:
    """The page with its tables anew; a section without rows says so."""
    for name, mine, table in (
        ("tiny", lambda r: r.get("base", "").startswith(TINY), tuned_table),
        ("models", lambda r: "base" in r and not r["base"].startswith(TINY), tuned_table),
        ("steps", lambda r: r.get("kind") == STEP, step_table),
    ):
        found = [r for r in rows if mine(r)]
        text = table(found) if found else NOTHING.format(rows=f"[{file}]({file})")
        between = re.compile(BETWEEN.format(name), re.DOTALL)
        page = between.sub(lambda _, text=text: f"\n{text}\n", page)
    return page


def tuned_table(rows: Sequence[Row]) -> str:
    """Each run: baseline, before and after at the target. A column that no row has is left out:
    older rows have no kept context."""
    heads = ["model", "to", "recipe", "scheme", "trained", "steps"]
    cells = [[heads, *map(_tuned, rows)]]
    for what, measures, show in (
        ("loss", ("context",), lambda x: f"{x:.3f}"),
        ("kept context", ("kept_context",), lambda x: f"{x:.0%}"),
        ("answers", ("retrieval", "passkey"), lambda x: f"{x:.0%}"),
    ):
        told = [_three(row, measures, show) for row in rows]
        if any(told):
            cells.append([[f"{what}: baseline, before, after"], *([one] for one in told)])
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
    """What it cost; older rows call the in-window cost a tax."""
    numbers = (row.get("verdict") or {}).get("numbers") or {}
    cost = numbers.get("in_window_cost") or numbers.get("tax")
    change, minutes = f"{cost['mean']:+.3f}" if cost else "", f"{row['seconds'] / 60:.1f}"
    return [change, minutes, escaped(str(row.get("machine") or ""))]


def _three(row: Row, measures: Sequence[str], show: Callable[[float], str]) -> str:
    """A number of each of the three at the target, a dash where there is none; nothing where all
    three have none. Older rows have another name for the baseline."""
    found, texts = row.get("measured") or {}, []
    for names in (("baseline", "as it is"), ("before",), ("after",)):
        told = next((found[name] for name in names if name in found), {})
        at = [told[m][n] for m in measures if m in told and (n := str(row["target"])) in told[m]]
        texts.append(show(at[0]["mean"]) if at else "–")
    return ", ".join(texts) if {*texts} != {"–"} else ""


def step_table(rows: Iterable[Row]) -> str:
    """Each timed step beside the Trainer's."""
    heads = ["model", "scheme", "tokens", "tokens/s", "of HF Trainer's", "memory of its", "machine"]
    return markdown_table(heads, [_step(row) for row in rows])


def _step(row: Row) -> list[str]:
    speed, memory = row["tokens_per_second"], row.get("peak")
    theirs, held = row["trainer_tokens_per_second"], row.get("trainer_peak")
    ratio = f"{memory / held:.2f}" if memory and held else ""
    told = [fenced(row["model"]), fenced(row["scheme"]), f"{row['length']:,}", f"{speed:,.0f}"]
    return [*told, f"{speed / theirs:.2f}", ratio, escaped(str(row.get("machine") or ""))]


if __name__ == "__main__":
    main(sys.argv[1:])
