"""The documentation as a folder of plain HTML that loads nothing from anywhere.

python docs/site/build.py --out build/docs            all of it, pictures included
python docs/site/build.py --out build/docs --still    fast: without pictures and the models

A page a method comes from the parts and presets themselves, the commands from their own help, the
results from docs/results, the guides from Markdown beside this file. The build fails with a
sentence where a link leads nowhere or a part lacks its prose; the old folder then stays as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import links
from pages import Site, every_page
from pictures import Gallery

from longitude.core.validate import UserError

HERE = Path(__file__).parent
MARK = ".longitude-docs"  # what a folder that may be replaced has in it


def main(given: list[str]) -> None:
    """Build the folder, or say in a sentence what is wrong."""
    about = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    about.add_argument("--out", type=Path, default=Path("build/docs"), help="the folder to write")
    about.add_argument("--still", action="store_true", help="leave out pictures and models")
    asked = about.parse_args(given)
    try:
        count = build(asked.out.resolve(), asked.still)
    except UserError as e:
        sys.exit(f"docs: {e}")
    print(f"{count} pages: {asked.out / 'index.html'}")


def build(out: Path, still: bool = False) -> int:
    """Write every page beside `out`, check the links, and put the folder in its place."""
    if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
        raise UserError(f"{out} is there and was not built by this: give --out another folder.")
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        count = write(part, out, still)
        if wrong := links.broken(part):
            raise UserError(f"{len(wrong)} links are broken, the first is {wrong[0]}")
        shutil.rmtree(out, ignore_errors=True)
        part.replace(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return count


def write(folder: Path, old: Path, still: bool) -> int:
    """Every page, and what they load."""
    gallery = None if still else Gallery(folder / "pictures", old / "pictures")
    site = Site(gallery)
    pages = every_page(site)
    for page in pages:
        path = folder / page.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site.whole(page), encoding="utf-8")
    for source, name in site.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    for name in ("style.css", "search.js"):
        shutil.copyfile(HERE / "templates" / name, folder / name)
    index = json.dumps([page.found() for page in pages], ensure_ascii=False)
    (folder / "pages.js").write_text(f"window.pages = {index};\n", encoding="utf-8")
    (folder / MARK).touch()
    return len(pages)


if __name__ == "__main__":
    main(sys.argv[1:])
