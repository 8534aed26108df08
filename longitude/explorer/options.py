"""What a reader asks of the page: one model's sizes, and up to three schemes beside each other.

It is written as the query of a link, a name for each control of the page: a link carries the state,
and the page, the still page and every answer of the server are read from the same words.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from longitude.core.validate import UserError, literal, short, shown

LONGEST = 10_000_000  # tokens on the page
WIDEST = 1024  # dimensions of a head
HEADS = 256
COLUMNS = 3
TEXT = 4000  # characters of one scheme
NAME = 200  # and of a model's name
OWN, WRITTEN = "own", "written"  # methods: the model as it is, and what the reader writes
OF_COLUMN = ("method", "base", "factor", "text", "layer")
OF_MODEL = ("model", "own", "window", "length", "dim", "heads")


@dataclass(frozen=True)
class Column:
    """One scheme: a method with its numbers (None: as the method has them), or a written text."""

    method: str = OWN
    base: float | None = None
    factor: float | None = None
    text: str = ""
    layer: int | None = None  # which of the schemes of layers that differ


@dataclass(frozen=True)
class Asked:
    """The state of the page."""

    model: str = ""
    own: str = "rope()"  # the scheme that the model was trained with
    window: int = 4096  # and the tokens that it was trained on
    length: int = 16384
    dim: int = 64
    heads: int = 8
    columns: tuple[Column, ...] = (Column(OWN), Column("yarn"), Column("leaky_rerope"))

    @property
    def stretch(self) -> float:
        """From the trained window to the length that is drawn."""
        return max(1.0, math.ceil(100 * self.length / self.window) / 100)

    @property
    def link(self) -> str:
        """The state as the query of a link; what is not said is left out."""
        model = {name: getattr(self, name) for name in OF_MODEL}
        each = {
            f"{name}{n}": getattr(column, name)
            for n, column in enumerate(self.columns, 1)
            for name in OF_COLUMN
        }
        said = {k: v for k, v in (model | each).items() if v not in ("", None)}
        return urlencode({k: literal(v) if isinstance(v, float) else v for k, v in said.items()})


def read(query: Iterable[tuple[str, str]]) -> Asked:
    """The state that a query says; what it leaves out is as on a fresh page."""
    said: dict[str, str] = {}
    for key, value in query:
        _check_name(key, said)
        said[key] = value.strip()
    named = {key: said[key] for key in OF_MODEL if said.get(key)}
    asked = Asked(
        model=_one_line("model", named.get("model", "")),
        own=_brief("own", named.get("own", Asked.own), TEXT),
        window=_whole("window", named.get("window"), Asked.window, 2, LONGEST),
        length=_whole("length", named.get("length"), Asked.length, 2, LONGEST),
        dim=_whole("dim", named.get("dim"), Asked.dim, 2, WIDEST),
        heads=_whole("heads", named.get("heads"), Asked.heads, 1, HEADS),
    )
    columns = tuple(_column(said, n) for n in range(1, COLUMNS + 1) if said.get(f"method{n}"))
    return replace(asked, columns=columns or Asked.columns)


def _check_name(key: str, said: dict[str, str]) -> None:
    known = [*OF_MODEL, *(f"{name}{n}" for n in range(1, COLUMNS + 1) for name in OF_COLUMN)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1) or ["method1"]
        raise UserError(f"the page has no control {shown(key)}: use {near[0]}.")
    if key in said:
        raise UserError(f"{key} is said twice: say it once.")


def _column(said: dict[str, str], n: int) -> Column:
    def of(name: str) -> str:
        return said.get(f"{name}{n}", "")

    return Column(
        method=_brief(f"method{n}", of("method"), NAME),
        base=_real(f"base{n}", of("base"), 1.01, 1e12),
        factor=_real(f"factor{n}", of("factor"), 1, 1e5),
        text=_brief(f"text{n}", of("text"), TEXT),
        layer=_whole(f"layer{n}", of("layer"), 0, 0, 999) if of("layer") else None,
    )


def _brief(name: str, text: str, most: int) -> str:
    if len(text) > most:
        raise UserError(
            f"{name} has {len(text):,} characters: the page takes {most:,} at most, the command "
            f"line more."
        )
    return text


def _one_line(name: str, text: str) -> str:
    """A name, which stands in commands to copy."""
    if not text.isprintable():
        raise UserError(f"{name} is a name on one line, but got {shown(text)}: give one.")
    return _brief(name, text, NAME)


def _whole(name: str, text: str | None, default: int, low: int, high: int) -> int:
    if not text:
        return default
    found = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1
    if not low <= found <= high:
        raise UserError(
            f"{name} is a whole number from {low} to {high:,}, but got {short(text)!r}: "
            f"give one, as in {name}={default}."
        )
    return found


def _real(name: str, text: str, low: float, high: float) -> float | None:
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise UserError(
            f"{name} is a number from {low:g} to {high:g}, but got {short(text)!r}: give one."
        )
    return found
