"""Every part and preset with its written form, meaning and paper, read from the code; and what the
parts of a scheme say about lengths and head sizes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from typing import Any, get_args

from longitude.core.part import PARTS, Site
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, literal
from longitude.inspection.rows import PartRow, PresetRow
from longitude.parts import LongRope, Mrope, Randomized, Rope
from longitude.presets import PAPERS, PRESETS

SITES: tuple[str, ...] = get_args(Site)
MIN_LENGTH, MAX_LENGTH = 64, 100_000_000  # tokens; beyond, even one number per token is too much
DEFAULT_LENGTH, DEFAULT_DIM = 2048, 64  # for a scheme that implies none
LENGTH_FIELDS = frozenset(
    "original train window size length max mean target".split()
    + "span clip max_distance floor threshold clamp".split()
)


def parts(site: str | None = None) -> tuple[PartRow, ...]:
    """Every part, by site in the order in which position enters a transformer."""
    if site is not None and site not in SITES:
        near = difflib.get_close_matches(site, SITES, n=1) or SITES
        raise UserError(f"no site is called {site!r}: use {', '.join(near)}.")
    classes: list[Any] = sorted(PARTS.values(), key=lambda c: (SITES.index(c.site), c.name))
    return tuple(
        PartRow(c.site, c.name, signature(c), meaning(c), c.paper)
        for c in classes
        if site in (None, c.site)
    )


def presets() -> tuple[PresetRow, ...]:
    """Every preset, with the scheme of its defaults."""
    rows = []
    for name, build in PRESETS.items():
        parameters = inspect.signature(build).parameters.values()
        required = any(p.default is p.empty for p in parameters)
        written = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={literal(p.default)}" for p in parameters
        )
        scheme = None if required else str(build())
        call = f"{build.__name__}({written})"
        rows.append(PresetRow(name, call, scheme, first_paragraph(build.__doc__), PAPERS[name]))
    return tuple(rows)


def part_row(part: Any) -> PartRow:
    """The row of one part as it stands in a scheme, without the parts inside it."""
    alone = dataclasses.replace(part, **_nested_fields(part))
    return PartRow(part.site, part.name, str(alone), meaning(type(part)), part.paper)


def signature(cls: Any) -> str:
    """How a part is written: required fields, then the others with their defaults."""
    written = [
        (f"{f.name}=…" if f.kw_only else f.name)
        if f.default is dataclasses.MISSING
        else f"{f.name}={literal(f.default)}"
        for f in dataclasses.fields(cls)
    ]
    return f"{cls.name}({', '.join(written)})"


def meaning(cls: type) -> str:
    """The first paragraph of the part's own docstring, or else of its file's."""
    doc = cls.__doc__ or ""
    generated = doc.startswith(f"{cls.__name__}(")  # dataclass writes one where there is none
    return first_paragraph(sys.modules[cls.__module__].__doc__ if generated or not doc else doc)


def first_paragraph(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def nested_parts(part: Any) -> list[Any]:
    """A part and the parts nested in its fields, the outermost first."""
    inner = [p for name in _nested_fields(part) for p in nested_parts(getattr(part, name))]
    return [part, *inner]


def all_parts(scheme: Scheme) -> list[Any]:
    return [p for outer in scheme.parts for p in nested_parts(outer)]


def distinct_layers(scheme: Scheme | Layers) -> dict[Scheme, tuple[int, ...]]:
    """Each distinct scheme once, with the layers that use it (empty if all layers do)."""
    if isinstance(scheme, Scheme):
        return {scheme: ()}
    used: dict[Scheme, tuple[int, ...]] = {}
    for index, s in enumerate(scheme.schemes):
        used[s] = (*used.get(s, ()), index)
    return used


def _nested_fields(part: Any) -> dict[str, Any]:
    """The defaults of the fields that hold another part."""
    return {
        f.name: f.default
        for f in dataclasses.fields(part)
        if (value := getattr(part, f.name)) != f.default and dataclasses.is_dataclass(value)
    }


# lengths and sizes


def named_trained_length(scheme: Scheme) -> int | None:
    """The trained length that some part names."""
    named = [getattr(p, n, None) for p in all_parts(scheme) for n in ("original", "train")]
    return min((n for n in named if n), default=None)


def default_length(scheme: Scheme) -> int:
    """Twice the largest length that a part names, or its trained length times its factor."""
    if isinstance(scheme.positions, Randomized):
        return scheme.positions.max // 4  # n tokens drawn from n positions would show nothing
    longest: float = 0
    for part in all_parts(scheme):
        values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        lengths = [v for name, v in values.items() if name in LENGTH_FIELDS and v]
        factor = values.get("factor", 2) if "original" in values else 2
        longest = max(longest, max(2, factor) * max(lengths, default=0))
    return max(MIN_LENGTH, min(int(longest), MAX_LENGTH)) if longest else DEFAULT_LENGTH


def default_dim(scheme: Scheme) -> int:
    """64, or the head size that a scheme's own list of factors or sections needs."""
    rope = scheme.rotary
    if isinstance(rope, Rope) and isinstance(rope.frequencies, LongRope):
        return round(2 * len(rope.frequencies.short) / rope.fraction)
    if isinstance(rope, Rope) and isinstance(rope.axes, Mrope):
        return round(2 * sum(rope.axes.sections) / rope.fraction)
    return DEFAULT_DIM


def check_sizes(length: int, dim: int, heads: int) -> None:
    """Raise unless a sequence of this length and heads of this size can be computed."""
    if not 2 <= length <= MAX_LENGTH:
        raise UserError(
            f"a length of {length} tokens can't be drawn: give a length of 2 to {MAX_LENGTH}."
        )
    if dim < 1 or heads < 1:
        raise UserError(f"{heads} heads of {dim} dimensions can't be drawn: give at least one.")
