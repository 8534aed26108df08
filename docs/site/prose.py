"""What is written by hand about the methods: when to use each, what it costs, what it can't do.

It stands in TOML beside the code, one file a site (`methods/`), and the errata in one file. All of
it is checked when it is read: a name that no part or preset has, a part without its paragraphs, a
field that nobody reads, or a test that isn't there are mistakes, so that prose can't outlive the
code.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError

HERE = Path(__file__).parent
TESTS = HERE.parent.parent / "tests" / "test_errata.py"
NEEDED = ("when", "costs", "cannot")


@dataclass(frozen=True)
class Prose:
    """What is said of one method; `example` is the scheme that its page draws."""

    when: str = ""
    costs: str = ""
    cannot: str = ""
    example: str = ""
    numbers: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


@dataclass(frozen=True)
class Erratum:
    """A mistake that is often written, what is right, and the methods it is about."""

    topic: str
    often: str
    instead: str
    methods: tuple[str, ...]
    test: str = ""


def methods(
    parts: Collection[str], presets: Collection[str], folder: Path = HERE / "methods"
) -> dict[str, Prose]:
    """The prose of every method that has some, by name; every part must have all of it."""
    known = {*parts, *presets}
    said: dict[str, Prose] = {}
    for file in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if name in said or name not in known:
                why = "is there twice" if name in said else "is no part and no preset"
                raise UserError(f"{file.name}: {name} {why}: name each method once.")
            said[name] = _made(Prose, fields, f"{file.name}: {name}")
            _named(said[name].see, known, f"{file.name}: {name}: see")
    for name in parts:
        missing = [f for f in (*NEEDED, "example") if not getattr(said.get(name), f, "")]
        if missing:
            raise UserError(f"{name} has no {', '.join(missing)}: write it in {folder.name}/.")
    return said


def errata(known: Collection[str], file: Path = HERE / "errata.toml") -> tuple[Erratum, ...]:
    """Every erratum, in the file's order."""
    tests = set(re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE))
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["entry"]
    found = tuple(_made(Erratum, e, f"{file.name}: {e.get('often')}") for e in entries)
    for one in found:
        _named(one.methods, known, f"{file.name}: {one.often}")
        _named([one.test] if one.test else [], tests, f"{file.name}: {one.often}")
    return found


def _made(kind: Any, fields: dict[str, Any], where: str) -> Any:
    _named(fields, kind.__dataclass_fields__, where)
    lists = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    try:
        return kind(**lists)
    except TypeError as e:
        raise UserError(f"{where}: {e}: say all that an entry needs.") from e


def _named(names: Collection[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where} names {name}, which there isn't: correct the name.")
