"""Every part and every preset with its written form, meaning and paper, read off the code."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args

from longitude.core.part import PARTS, Site
from longitude.core.validate import UserError, literal
from longitude.inspection.rows import PartRow, PresetRow
from longitude.presets import PAPERS, PRESETS

SITES: tuple[str, ...] = get_args(Site)


def parts(site: str | None = None) -> tuple[PartRow, ...]:
    """Every part, site by site in the order in which position enters a transformer."""
    classes: list[Any] = sorted(PARTS.values(), key=_order)
    return tuple(
        PartRow(c.site, c.name, signature(c), meaning(c), c.paper)
        for c in classes
        if site in (None, c.site)
    )


def presets() -> tuple[PresetRow, ...]:
    """Every preset, with the scheme that its defaults make."""
    return tuple(
        PresetRow(name, call(make), _defaults(make), paragraph(make.__doc__), PAPERS[name])
        for name, make in PRESETS.items()
    )


def inside(part: Any) -> list[Any]:
    """A part and the parts that are given in its fields, the outermost first."""
    return [part, *(p for name in _given(part) for p in inside(getattr(part, name)))]


def row(part: Any) -> PartRow:
    """The row of one part as it stands in a scheme, without the parts inside it."""
    alone = dataclasses.replace(part, **_given(part))
    return PartRow(part.site, part.name, str(alone), meaning(type(part)), part.paper)


def signature(cls: Any) -> str:
    """How a part is written: required fields, then the others with their defaults."""
    return f"{cls.name}({', '.join(_field(f) for f in dataclasses.fields(cls))})"


def meaning(cls: type) -> str:
    """The first paragraph of the part's own docstring, or else of its file's."""
    own = cls.__doc__ or ""
    generated = own.startswith(f"{cls.__name__}(")  # dataclass writes one where there is none
    return paragraph(sys.modules[cls.__module__].__doc__ if generated or not own else own)


def paragraph(text: str | None) -> str:
    """The first paragraph on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def call(make: Callable[..., Any]) -> str:
    """How a preset is called: its parameters with their defaults."""
    shown = [
        p.name if p.default is p.empty else f"{p.name}={literal(p.default)}"
        for p in inspect.signature(make).parameters.values()
    ]
    return f"{make.__name__}({', '.join(shown)})"


def _order(cls: Any) -> tuple[int, str]:
    return SITES.index(cls.site), cls.name


def _given(part: Any) -> dict[str, Any]:
    """The defaults of those fields that hold another part."""
    return {
        f.name: f.default
        for f in dataclasses.fields(part)
        if (held := getattr(part, f.name)) != f.default and dataclasses.is_dataclass(held)
    }


def _field(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return f"{f.name}=…" if f.kw_only else f.name
    return f"{f.name}={literal(f.default)}"


def _defaults(make: Callable[..., Any]) -> str | None:
    needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return None if needed else str(make())


def check_site(site: str | None) -> None:
    """Raise unless there is such a site."""
    if site is not None and site not in SITES:
        near = difflib.get_close_matches(site, SITES, n=1) or SITES
        raise UserError(f"no site is called {site!r}: use {', '.join(near)}.")
