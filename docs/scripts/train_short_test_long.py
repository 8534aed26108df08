"""Write the page of schemes trained short and tested long from its rows.

python docs/scripts/train_short_test_long.py [ROWS.jsonl …]    writes table and chart
python docs/scripts/train_short_test_long.py --check           fails when stale
"""

import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from longitude.core.store import Store
from longitude.eval.records import Score
from longitude.training.lab.compare import recorded
from longitude.viz.lab import markdown, write

PAGE = Path(__file__).parents[1] / "results" / "train-short-test-long.md"
ROWS, CHART = PAGE.with_suffix(".jsonl"), PAGE.with_suffix(".svg")
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)


def main(given: list[str]) -> None:
    """Write table and chart, or fail if the table is stale."""
    check = "--check" in given
    more = [] if check else [Path(name) for name in given]
    old = PAGE.read_text(encoding="utf-8")
    with Store(":memory:") as store:
        for rows in [*([ROWS] if ROWS.exists() else []), *more]:
            store.load(rows)
        scores = best_first(recorded(store))
        new = BETWEEN.sub(lambda _: f"\n{markdown(scores)}\n", old)
        if not check:
            store.export(ROWS)
            PAGE.write_text(new, encoding="utf-8")
            write(scores, CHART, "Trained at 512, tested to 8,192")
        elif new != old:
            sys.exit(f"{PAGE.name}'s table is not that of its rows: run make docs-table.")


def best_first(scores: Iterable[Score]) -> list[Score]:
    """Sort by the mean loss at the greatest length; schemes without a loss there come last."""
    rows = list(scores)
    longest = max(s.length for s in rows)
    losses: dict[str, list[float]] = {s.label: [] for s in rows}
    for s in rows:
        if s.length == longest and s.value is not None:
            losses[s.label].append(s.value)
    mean = {label: math.fsum(v) / len(v) if v else math.inf for label, v in losses.items()}
    return sorted(rows, key=lambda s: (mean[s.label], s.label))


if __name__ == "__main__":
    main(sys.argv[1:])
