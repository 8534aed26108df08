"""The page without a server: one file, with every answer to one state inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.explorer import page
from longitude.explorer.data import drawn
from longitude.explorer.options import Asked
from longitude.explorer.snippets import words
from longitude.viz.files import replace_file


def check_name(path: Path) -> None:
    """Raise unless the name is a page's."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--export writes a page, but got {shown(str(path))}: end it in .html.")


def write(asked: Asked, path: Path) -> None:
    """Write the still page of a state: the whole file, or the old one stays."""
    check_name(path)
    replace_file(path, page.still(answers(asked), asked.link).encode())


def answers(asked: Asked) -> dict[str, Any]:
    """What the server would say to this state; the mistakes of a column stay its own."""
    return {
        "draw": json.loads(drawn(asked)),
        "words": [_said(asked, n) for n in range(len(asked.columns))],
    }


def _said(asked: Asked, column: int) -> dict[str, Any]:
    try:
        return words(asked, column)
    except UserError as mistake:
        return {"mistake": str(mistake)}
