"""The lengths that a scheme names: which one it was trained at, and which one is worth drawing."""

from __future__ import annotations

import dataclasses
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.inspection.catalogue import inside
from longitude.parts import LongRope, Randomized, Rope

LONGEST = 100_000_000  # tokens; past this even one number for each no longer fits a laptop
SHORTEST = 64
USUAL = 2048  # where a scheme names none
NAMED = frozenset(
    "original train window size length max mean target".split()
    + "span clip max_distance floor threshold clamp".split()
)


def trained(scheme: Scheme) -> int | None:
    """The trained length that some part names."""
    named = [getattr(p, n, None) for p in every(scheme) for n in ("original", "train")]
    return min((n for n in named if n), default=None)


def default_length(scheme: Scheme) -> int:
    """A length at which what the scheme does shows: past every length that it names."""
    reach = max((_reach(p) for p in every(scheme)), default=0)
    length = max(SHORTEST, min(int(reach), LONGEST)) if reach else USUAL
    # n tokens among n positions would stand one step apart, and nothing would show
    return scheme.positions.max // 4 if isinstance(scheme.positions, Randomized) else length


def default_dim(scheme: Scheme) -> int:
    """64, or the head size that a scheme's own list of factors asks for."""
    rope = scheme.rotary
    if isinstance(rope, Rope) and isinstance(rope.frequencies, LongRope):
        return round(2 * len(rope.frequencies.short) / rope.fraction)
    return 64


def check_length(length: int) -> None:
    """Raise unless a sequence of this length can be drawn."""
    if not 2 <= length <= LONGEST:
        raise UserError(
            f"a length of {length} tokens can't be drawn: give a length of 2 to {LONGEST}."
        )


def every(scheme: Scheme) -> list[Any]:
    """The scheme's parts and those inside them."""
    return [p for outer in scheme.parts for p in inside(outer)]


def _reach(part: Any) -> float:
    """Twice the largest length that a part names, or its trained length times its factor."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    lengths = [v for name, v in fields.items() if name in NAMED and v]
    factor = fields.get("factor", 2) if "original" in fields else 2
    return max(2, factor) * max(lengths, default=0)
