"""Writes the page of results from its rows: the table, the chart and the settings.

python docs/train_short_test_long.py [ROWS.jsonl …]    # takes these rows in first
python docs/train_short_test_long.py --check           # is the page that of its rows?
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from longitude.lab.compare import recorded
from longitude.lab.rows import Score
from longitude.record import Store
from longitude.report.lab import markdown, write

PAGE = Path(__file__).parent / "results" / "train-short-test-long.md"
ROWS, CHART = PAGE.with_suffix(".jsonl"), PAGE.with_suffix(".svg")
TABLE = re.compile(r"(<!-- rows -->\n).*(<!-- /rows -->)", re.DOTALL)


def main(given: list[str]) -> None:
    check = given == ["--check"]
    with Store(":memory:") as store:
        for rows in [ROWS] if check else [*filter(Path.exists, [ROWS]), *map(Path, given)]:
            store.load(rows)
        scores = by_end(recorded(store))
        text = PAGE.read_text(encoding="utf-8")
        fresh = TABLE.sub(lambda m: f"{m[1]}{markdown(scores)}\n{m[2]}", text)
        if check:
            sys.exit("the page is not that of its rows" if fresh != text else 0)
        store.export(ROWS)
        PAGE.write_text(fresh, encoding="utf-8")
        write(scores, CHART, "Trained at 512, tested to 8,192")


def by_end(scores: object) -> list[Score]:
    """The best at the greatest length first, those that can't read so far last."""
    found: list[Score] = list(scores)  # type: ignore[call-overload]
    longest = max(s.length for s in found)
    ends: dict[str, list[float]] = {s.label: [] for s in found}
    for s in found:
        if s.length == longest and s.value is not None:
            ends[s.label].append(s.value)
    mean = {label: sum(v) / len(v) if v else float("inf") for label, v in ends.items()}
    return sorted(found, key=lambda s: (mean[s.label], s.label))


if __name__ == "__main__":
    main(sys.argv[1:])
