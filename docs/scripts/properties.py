"""Write the page that compares the properties of every preset, as `longitude check --all` does.

python docs/scripts/properties.py                     writes the table, in a minute or two
python docs/scripts/properties.py --check [NAME …]  fails when a row is stale
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from longitude.inspection.properties import compare
from longitude.viz.properties import markdown

PAGE = Path(__file__).parents[1] / "results" / "properties.md"
BETWEEN = re.compile(r"(?<=<!-- rows -->\n).*?(?=<!-- /rows -->)", re.DOTALL)
DIM = 64


def main(given: list[str]) -> None:
    """Write the table, or fail if a row of it is stale."""
    names = [name for name in given if name != "--check"]
    old = PAGE.read_text(encoding="utf-8")
    rows = markdown([*compare(dim=DIM, names=names)])
    if "--check" not in given:
        PAGE.write_text(BETWEEN.sub(lambda _: f"\n{rows}\n", old), encoding="utf-8")
    elif stale := [row for row in rows.splitlines() if row not in old.splitlines()]:
        sys.exit(f"{PAGE.name} lacks {stale[0]!r}: run make docs-table.")


if __name__ == "__main__":
    main(sys.argv[1:])
