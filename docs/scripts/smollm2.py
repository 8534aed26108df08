"""Write the page of SmolLM2-135M past its window from the rows of `longitude extend`.

python docs/scripts/smollm2.py            writes the tables and the charts
python docs/scripts/smollm2.py --check    fails when the page's tables are stale

Each kind of text has its rows in a separate file, smollm2-TEXT.jsonl, and a section of the page.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from longitude.core.store import Store
from longitude.eval.records import recorded
from longitude.extension.advice import recommend
from longitude.viz.extend import markdown, write_charts
from longitude.viz.section import Section, section

PAGE = Path(__file__).parents[1] / "results" / "smollm2.md"
TEXTS = ("prose", "code", "docs", "all")  # "all": every method, on prose
SHOWN = ("kept_context", "answers")  # charts that the page shows
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)


def main(given: Sequence[str], page: Path = PAGE) -> None:
    """Write tables and charts, or fail if the tables are stale."""
    old, charts = page.read_text(encoding="utf-8"), page.with_suffix("")
    stores = {text: page.with_name(f"{page.stem}-{text}.jsonl") for text in TEXTS}
    sections = {text: measured(file, text) for text, file in stores.items() if file.is_file()}
    drawn = (
        markdown(part, [(f"{name}, {text}", f"{charts.name}/{text}/{name}.png") for name in SHOWN])
        for text, part in sections.items()
    )
    tables = "\n".join(drawn)
    new = BETWEEN.sub(lambda _: f"\n{tables}\n", old)
    if "--check" in given:
        if new != old:
            sys.exit(f"{page.name}'s tables are not those of its rows: run make docs-table.")
        return
    page.write_text(new, encoding="utf-8")
    for text, part in sections.items():
        for path in write_charts(part, charts / text):
            if path.stem not in SHOWN:
                path.unlink()


def measured(file: Path, text: str) -> Section:
    """Return the section of one text: its measurements, and the recommendation for every goal."""
    with Store(":memory:") as store:
        store.load(file)
        rows = [*recorded(store)]
    target = max(row.key.length for row in rows)
    by_plugin = {row.label for row in rows}  # a plain Llama: vLLM's plugin runs any method
    advice = recommend(rows, target, by_plugin=by_plugin).to_json()
    return section(rows, advice, run=text)


if __name__ == "__main__":
    main(sys.argv[1:])
