"""The README's table of parts, read off the code: `python docs/parts_table.py` writes it anew.

With `--check` nothing is written: it fails when the table is stale.
"""

import re
import sys
from pathlib import Path

from longitude.inspection.catalogue import parts
from longitude.inspection.rows import PartRow

README = Path(__file__).parent.parent / "README.md"
BETWEEN = re.compile(r"(?<=<!-- parts -->\n).*?(?=<!-- /parts -->)", re.DOTALL)
LINKS = {
    r"arXiv:(\d{4}\.\d{5})": r"[arXiv:\1](https://arxiv.org/abs/\1)",
    r"kexue\.fm/archives/(\d+)": r"[kexue.fm \1](https://kexue.fm/archives/\1)",
    r"github\.com/(\S+)": r"[\1](https://github.com/\1)",
}


def main() -> None:
    """Write the table, or fail if it is stale."""
    old = README.read_text(encoding="utf-8")
    new = BETWEEN.sub(lambda _: table(), old)
    if "--check" not in sys.argv:
        README.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit("README.md's table of parts is stale: run make docs-table.")


def table() -> str:
    """Every part as a row of Markdown."""
    head = "| site | part | what it is | paper |\n|---|---|---|---|\n"
    return head + "".join(map(row, parts()))


def row(part: PartRow) -> str:
    """One part; what would end a cell is escaped."""
    paper = part.paper
    for pattern, link in LINKS.items():
        paper = re.sub(pattern, link, paper)
    meaning = re.sub(r"[|*_<]", r"\\\g<0>", part.meaning)
    return f"| {part.site} | `{part.written}` | {meaning} | {paper} |\n"


if __name__ == "__main__":
    main()
