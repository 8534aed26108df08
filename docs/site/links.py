"""Whether every link of a folder of HTML pages leads somewhere.

Links inside the folder must name a file that is there and, after #, an id of that page; ids occur
once. Links out are https, and nothing but them leaves: no page loads a thing from another host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"src", "srcset", "data", "poster"}  # attributes that make a browser fetch something


@dataclass
class Seen(HTMLParser):
    """The ids of a page and the addresses it names: `goes` are followed, `loads` are fetched."""

    ids: list[str] = field(default_factory=list)
    goes: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in LOADED or (name == "href" and tag == "link"):
                self.loads.append(value or "")
            elif name == "href":
                self.goes.append(value or "")


def broken(folder: Path) -> list[str]:
    """What is wrong with the links of a folder's pages, a sentence each."""
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    return [
        f"{path.relative_to(folder).as_posix()}: {wrong}"
        for path, seen in pages.items()
        for wrong in [*_ids(seen), *_links(path, seen, pages, folder)]
    ]


def _read(path: Path) -> Seen:
    seen = Seen()
    seen.feed(path.read_text(encoding="utf-8"))
    return seen


def _ids(seen: Seen) -> list[str]:
    return [f"the id {i!r} is there twice." for i in {i for i in seen.ids if seen.ids.count(i) > 1}]


def _links(path: Path, seen: Seen, pages: dict[Path, Seen], folder: Path) -> list[str]:
    wrong = [f"{a} is loaded from elsewhere." for a in seen.loads if urlsplit(a).scheme]
    wrong += [f"{a} is not https." for a in seen.goes if urlsplit(a).scheme not in ("", "https")]
    inside = [a for a in [*seen.goes, *seen.loads] if not urlsplit(a).scheme]
    return wrong + [w for a in inside if (w := _inside(a, path, seen, pages, folder))]


def _inside(
    address: str, path: Path, seen: Seen, pages: dict[Path, Seen], folder: Path
) -> str | None:
    parts = urlsplit(address)
    if parts.netloc or parts.path.startswith("/"):
        return f"{address} leads out of the folder."
    target = path
    if parts.path:
        target = Path(os.path.normpath(path.parent / unquote(parts.path)))
    if not target.is_relative_to(folder) or not target.is_file():
        return f"{address} leads to nothing."
    there = pages.get(target)
    if parts.fragment and (there is None or unquote(parts.fragment) not in there.ids):
        return f"{address} names a place that isn't on that page."
    return None
