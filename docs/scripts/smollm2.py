"""The page of SmolLM2-135M past its window, read off the rows of `longitude extend`.

python docs/scripts/smollm2.py            writes the table and the chart
python docs/scripts/smollm2.py --check    fails when the page's table is stale
"""

import re
import sys
from pathlib import Path

from longitude.core.store import Store
from longitude.eval.records import recorded
from longitude.extension.advice import recommend
from longitude.viz.extend import markdown, write_charts
from longitude.viz.section import section

PAGE = Path(__file__).parents[1] / "results" / "smollm2.md"
ROWS, CHARTS = PAGE.with_suffix(".jsonl"), PAGE.parent / "smollm2"
SHOWN = ("context", "passkey")  # of the charts
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)


def main(given: list[str]) -> None:
    """Write table and charts, or fail if the table is stale."""
    old = PAGE.read_text(encoding="utf-8")
    with Store(":memory:") as store:
        store.load(ROWS)
        found = [*recorded(store)]
    one = section(found, recommend(found, max(one.key.length for one in found)).to_json())
    pictures = [(name, f"{CHARTS.name}/{name}.png") for name in SHOWN]
    new = BETWEEN.sub(lambda _: f"\n{markdown(one, pictures)}\n", old)
    if "--check" in given:
        if new != old:
            sys.exit(f"{PAGE.name}'s table is not that of its rows: run make docs-table.")
        return
    PAGE.write_text(new, encoding="utf-8")
    for path in write_charts(one, CHARTS):
        if path.stem not in SHOWN:
            path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
