"""Write the page of what attention under a scheme costs from the rows of `longitude bench`.

python docs/scripts/speed.py [ROWS.jsonl …]    writes tables and chart, with these rows too
python docs/scripts/speed.py --check           fails when the page's tables are stale
"""

import re
import sys
from pathlib import Path

from benchmarks.suites.chart import write
from benchmarks.suites.rows import Row, load
from benchmarks.suites.show import markdown
from longitude.core.store import Store

PAGE = Path(__file__).parents[1] / "results" / "benchmarks.md"
ROWS, CHART = PAGE.with_suffix(".jsonl"), PAGE.with_suffix(".svg")
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)


def main(given: list[str]) -> None:
    """Write tables and chart, or fail if the tables are stale."""
    check = "--check" in given
    more = [] if check else [Path(name) for name in given]
    old = PAGE.read_text(encoding="utf-8")
    with Store(":memory:") as store:
        rows = load(store, [*([ROWS] if ROWS.exists() else []), *more])
        new = BETWEEN.sub(lambda _: f"\n{markdown(rows)}\n", old)
        if not check:
            store.export(ROWS)
            PAGE.write_text(new, encoding="utf-8")
            write(one_machine(rows), CHART, "Speed relative to the baseline")
        elif new != old:
            sys.exit(f"{PAGE.name}'s tables are not those of its rows: run make docs-table.")


def one_machine(rows: list[Row]) -> list[Row]:
    """Return the rows of the machine that the goals are for, or of the first if it is missing."""
    chosen = next((row for row in rows if row.goal), rows[0]).work.machine
    return [row for row in rows if row.work.machine == chosen]


if __name__ == "__main__":
    main(sys.argv[1:])
