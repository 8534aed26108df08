"""The state of the page: a model's sizes, and up to three schemes side by side.

A state is written as the query of a link, one name per control. The page, the static page and every
answer of the server read the same query, so a link carries everything shown. A page starts from a
link, or from a model's configuration; weights are never read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from longitude.core.scheme import Layers, Scheme
from longitude.core.store import read_json
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, literal, short, shown
from longitude.hf.encodings import KINDS, read_encodings
from longitude.hf.source import SCHEME
from longitude.parts import Alibi, Learned
from longitude.runtimes.checkpoint import open_checkpoint

MAX_LENGTH = 10_000_000  # tokens
MAX_DIM, MAX_HEADS = 1024, 256
MAX_COLUMNS = 3
MAX_TEXT, MAX_NAME = 4000, 200  # characters of a scheme, and of a model's name
OWN, WRITTEN = "own", "written"  # methods: the model's own scheme, and the reader's text
LETTERS = {"model": MAX_NAME, "own": MAX_TEXT, "method": MAX_NAME, "text": MAX_TEXT}  # limits
REALS = {"base": (1.01, 1e12), "factor": (1, 1e5)}
SIZES = {"window": (2, MAX_LENGTH), "length": (2, MAX_LENGTH), "dim": (2, MAX_DIM)}
INTEGERS = {**SIZES, "heads": (1, MAX_HEADS), "layer": (0, 999)}
COLUMN_FIELDS = ("method", "base", "factor", "text", "layer")
MODEL_FIELDS = ("model", "own", "window", "length", "dim", "heads")
FIRST = {  # the two methods shown first, by kind of model
    "rope": ("yarn", "leaky_rerope"),
    "alibi": ("alibi_interpolated", "ntk_alibi"),
    "learned": ("hierarchical", "learned_interpolated"),
}


@dataclass(frozen=True)
class Column:
    """One scheme: a method with its parameters (None: the method's default), or a written text."""

    method: str = OWN
    base: float | None = None
    factor: float | None = None
    text: str = ""
    layer: int | None = None  # which of the distinct schemes, where layers differ


@dataclass(frozen=True)
class PageState:
    model: str = ""
    own: str = "rope()"  # the scheme that the model was trained with
    window: int = 4096  # the trained window in tokens
    length: int = 16384
    dim: int = 64
    heads: int = 8
    columns: tuple[Column, ...] = (Column(OWN), Column("yarn"), Column("leaky_rerope"))
    notes: tuple[str, ...] = ()  # on the configuration it started from; not in the link

    @property
    def stretch(self) -> float:
        """The ratio of the length drawn to the trained window, 1 or more, rounded up to 0.01."""
        return max(1.0, math.ceil(100 * self.length / self.window) / 100)

    @property
    def link(self) -> str:
        """The state as the query of a link; defaults of columns are left out."""
        model = {name: getattr(self, name) for name in MODEL_FIELDS}
        columns = {
            f"{name}{n}": getattr(column, name)
            for n, column in enumerate(self.columns, 1)
            for name in COLUMN_FIELDS
        }
        query = {k: v for k, v in (model | columns).items() if v not in ("", None)}
        return urlencode({k: literal(v) if isinstance(v, float) else v for k, v in query.items()})


def start_from(name: str) -> PageState:
    """Start from a name on the Hub, a folder, a config.json, a .gguf file, or a bundled model."""
    if Path(name).suffix == ".json" and Path(name).is_file():
        return start_from_config(read_json(Path(name)), name)
    checkpoint = open_checkpoint(name)
    saved = {SCHEME: checkpoint.saved} if checkpoint.saved else {}
    return start_from_config({**checkpoint.config, **saved}, name)


def start_from_config(config: Mapping[str, Any], name: str = "") -> PageState:
    """Start from the contents of a config.json, within the page's bounds: the baseline, and two
    methods to extend it."""
    encodings = read_encodings(config)
    encoding = next((e for e in encodings if e.scheme), None)
    if encoding is None or encoding.scheme is None:
        other = encodings[0].kind
        raise UserError(
            f"the positions of model_type {shown(config.get('model_type'))} can't be drawn "
            f"({other}: {KINDS[other]}): write a scheme as the model's own instead."
        )
    own = shortest(parse(encoding.scheme))
    if len(text := dump(own)) > MAX_TEXT:
        raise UserError(
            f"the scheme of this model takes {len(text):,} characters to write: the page takes "
            f"{MAX_TEXT:,}, the command line more."
        )
    others = [f"It also has {KINDS[e.kind]}." for e in encodings if e.kind != encoding.kind]
    window = min(max(encoding.window or encoding.original or PageState.window, 2), MAX_LENGTH)
    return PageState(
        name,
        text,
        window,
        length=min(4 * window, MAX_LENGTH),
        dim=min(encoding.head_dim or PageState.dim, MAX_DIM),
        heads=min(encoding.heads or PageState.heads, MAX_HEADS),
        columns=(Column(OWN), *map(Column, FIRST.get(kind(own) or "", ()))),
        notes=(*encoding.notes, *dict.fromkeys(others)),
    )


def kind(own: Scheme | Layers) -> str | None:
    """The kind of model, which decides its methods of `longitude extend`; None if it has none."""
    first = own.layer(0)
    if any(layer.rotary for layer in own.schemes):
        return "rope"
    if any(isinstance(b, Alibi) for b in first.bias):
        return "alibi"
    return "learned" if isinstance(first.embed, Learned) else None


def shortest(scheme: Scheme | Layers) -> Scheme | Layers:
    """The fewest layers that, repeated, give all layers of the scheme."""
    layers = scheme.schemes
    for n in range(1, len(layers) + 1):
        if len(layers) % n == 0 and layers == layers[:n] * (len(layers) // n):
            return layers[0] if n == 1 else Layers(layers[:n])
    return scheme


def read_link(query: Iterable[tuple[str, str]]) -> PageState:
    """Parse a link's query; controls that it leaves out have their defaults."""
    numbered = [f"{name}{n}" for n in range(1, MAX_COLUMNS + 1) for name in COLUMN_FIELDS]
    given: dict[str, str] = {}
    for key, value in query:
        if key not in (*MODEL_FIELDS, *numbered):
            near = difflib.get_close_matches(key, [*MODEL_FIELDS, *numbered], n=1) or ["method1"]
            raise UserError(f"the page has no control {shown(key)}: use {near[0]}.")
        if key in given:
            raise UserError(f"{key} is given twice: give it once.")
        given[key] = value.strip()
    if not (model := given.get("model", "")).isprintable():  # it is part of commands to copy
        raise UserError(f"model is a name on one line, but got {shown(model)}: give one.")
    columns = [
        Column(**{k: _value(key, given[key]) for k in COLUMN_FIELDS if given.get(key := f"{k}{n}")})
        for n in range(1, MAX_COLUMNS + 1)
        if given.get(f"method{n}")
    ]
    values = {name: _value(name, given[name]) for name in MODEL_FIELDS if given.get(name)}
    return PageState(**values, columns=tuple(columns) or PageState.columns)


def _value(key: str, text: str) -> Any:
    """Parse the value of a control: text, a real number or an integer, within its bounds."""
    name = key.rstrip("123")
    if name in LETTERS:
        if len(text) > LETTERS[name]:
            raise UserError(
                f"{key} has {len(text):,} characters: the page takes {LETTERS[name]:,} at most, "
                f"the command line more."
            )
        return text
    if name in REALS:
        low, high = REALS[name]
        with suppress(ValueError):
            if low <= float(text) <= high:
                return float(text)
        raise UserError(
            f"{key} is a number from {low:g} to {high:g}, but got {short(text)!r}: give one."
        )
    low, high = INTEGERS[name]
    integer = text.isascii() and text.isdigit() and len(text) < 16
    if not integer or not low <= int(text) <= high:
        raise UserError(
            f"{key} is a whole number from {low} to {high:,}, but got {short(text)!r}: "
            f"give one, as in {key}={getattr(PageState, name, 0)}."
        )
    return int(text)


def make_state(model: str | None, schemes: str | None, length: int | None) -> PageState:
    """The state that the command line's options describe, validated like a link."""
    state = start_from(model) if model else PageState()
    texts = [text.strip() for text in (schemes or "").split(";") if text.strip()]
    if len(texts) > MAX_COLUMNS:
        raise UserError(f"--schemes has {len(texts)}, but the page shows three at most: drop some.")
    columns = tuple(Column(WRITTEN, text=t) if "(" in t else Column(t) for t in texts)
    length = state.length if length is None else length
    state = replace(state, columns=columns or state.columns, length=length)
    return read_link(parse_qsl(state.link))
