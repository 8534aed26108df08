"""Validation of fields and arguments against their declared types, and the one-sentence errors.

Parts are parsed from text that anybody may have typed, so every field is validated when a part is
built. `UserError` is the only error that commands print without a traceback.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Any, Literal

MAX_FLOAT = 1e100  # numbers above it, or below its inverse, overflow in the powers of formulas
MAX_INT = 10**15  # larger integers are not exact as positions
PART_CHECKS: dict[tuple[type, Any], bool] = {}  # whether a class implements a protocol


class UserError(ValueError):
    """A user's error in one sentence: what was wrong, what was given, what to do."""


PositiveInt = Annotated[int, "positive"]
PositiveFloat = Annotated[float, "positive"]
NonNegativeInt = Annotated[int, "non-negative"]
NonNegativeFloat = Annotated[float, "non-negative"]


def check_field(owner: str, name: str, value: Any, hint: Any, default: Any) -> None:
    """Raise unless the value fits its declared type and the bound that may come with it."""
    bound = None
    if typing.get_origin(hint) is Annotated:
        hint, bound = typing.get_args(hint)
    if not fits(value, hint):
        raise UserError(
            f"{owner}({name}=…) takes {in_words(hint)}, but got {shown(value)}: "
            f"write for example {name}={example(hint, default)}."
        )
    if bound == "positive" and value <= 0:
        raise UserError(
            f"{owner}: {name} must be positive, but got {value!r}: give a {name} above zero."
        )
    if bound == "non-negative" and value < 0:
        raise UserError(f"{owner}: {name} must not be negative, but got {value!r}: give 0 or more.")


def fits(value: Any, hint: Any) -> bool:
    """Whether the value has the declared type; an int passes as float, a bool as neither."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is Literal:
        return type(value) in {type(a) for a in args} and value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, args[0]) for v in value)
    if hint is int:
        return type(value) is int and abs(value) < MAX_INT
    if hint is float:
        return type(value) in (int, float) and (
            value == 0 or 1 / MAX_FLOAT < abs(value) < MAX_FLOAT
        )
    if hint in (bool, str, types.NoneType):
        return type(value) is hint
    # a part must also be of the protocol's site: some have another site's methods too. Memoised per
    # class, because isinstance with a protocol takes longer than building a part
    if (key := (type(value), hint)) not in PART_CHECKS:
        same_site = getattr(value, "site", None) in (None, hint.__name__.lower())
        PART_CHECKS[key] = isinstance(value, hint) and same_site
    return PART_CHECKS[key]


def in_words(hint: Any) -> str:
    """The declared type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(a) for a in args)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"a tuple, each item {in_words(args[0])}"
    plain = {
        int: "a whole number below 10¹⁵",
        float: "a finite number",
        bool: "True or False",
        str: "a string",
    }
    if hint in plain or hint is types.NoneType:
        return plain.get(hint, "None")
    return "a scheme" if hint.__name__ == "Scheme" else f"a {hint.__name__.lower()} part"


def example(hint: Any, default: Any) -> str:
    """A value that fits, in the text form."""
    if fits(default, hint):
        return literal(default)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return repr(args[0])
    if typing.get_origin(hint) is tuple:
        return "(1, 2)"
    return {int: "4", float: "4", bool: "True", str: "'yarn'"}.get(hint, "…")


def literal(value: Any) -> str:
    """A value in the text form of a scheme."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def shown(value: Any) -> str:
    """The repr of a value, shortened to fit into a sentence."""
    try:
        return short(repr(value))
    except ValueError:  # an integer with more digits than Python prints
        return "a number with thousands of digits"


def short(text: str, most: int = 60) -> str:
    """Shorten a text to one line of at most `most` characters, keeping its last character."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 2]}…{text[-1]}"


def target_length(to: int | str, trained: int | None) -> int:
    """Parse a number of tokens: 32768, 32k, 1m, or 4x the trained window, if it is known."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([xkm]?)", str(to).strip().lower().replace(",", ""))
    if match is None or not float(match[1]):
        raise UserError(f"--to takes a length, but got {shown(to)}: write 32768, 32k or 4x.")
    if match[2] == "x" and not trained:
        raise UserError(
            f"--to {to} is a multiple of the window, but the model states none: give tokens."
        )
    return round(float(match[1]) * {"": 1, "k": 1024, "m": 2**20, "x": trained or 0}[match[2]])


def parse_seconds(text: str) -> float:
    """Parse a time in seconds: 90s, 10m, 2h, or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--budget takes a time, but got {shown(text)}: write 90s, 10m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
