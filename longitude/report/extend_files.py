"""Files that are whole or the old ones, and texts that mean nothing in Markdown."""

from __future__ import annotations

import os
import re
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file beside the target and put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def escaped(text: str) -> str:
    """A text whose signs mean nothing in Markdown, nor in the HTML that Markdown lets through."""
    return re.sub(r"[\\`*_{}\[\]<>&|#~!]", r"\\\g<0>", text)


def fenced(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row; bars would end a cell."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    edge = " " if "`" in text else ""
    return f"{fence}{edge}{text}{edge}{fence}".replace("|", "\\|")
