"""What a checkpoint's configuration says of its positions: encodings, faults, and how far it goes.

From the configuration alone: no weight is read and no modelling file imported. Laws are those of
the rotation of the layers that see everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.encodings import Encoding
from longitude.hf.faults import Fault
from longitude.inspection import rope_limits as laws
from longitude.inspection.lengths import LONGEST
from longitude.inspection.page import page
from longitude.inspection.rows import Page
from longitude.inspection.rows import plain_rows as plain
from longitude.parts import Rope


@dataclass(frozen=True)
class Reach:
    """How far a rotation goes: its wavelengths against the window, and the laws of laws.py."""

    base: float
    dim: int  # rotary dimensions of a head
    trained: int  # tokens: the window, or what it was before a scaling
    longest: float  # wavelength, in tokens
    unfinished: int  # pairs that don't turn once within the window
    critical_dimension: int
    limit: float
    least_base: float | None
    against: int | None  # the first distance of the window at which Σ cos is below 0
    target: int | None = None
    critical_base: float | None = None
    target_least_base: float | None = None


@dataclass(frozen=True)
class Inspected:
    """All there is to say of one checkpoint without its weights."""

    name: str
    encodings: tuple[Encoding, ...]
    faults: tuple[Fault, ...]
    reach: Reach | None
    page: Page | None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "model": self.name,
            "encodings": [each.plain() for each in self.encodings],
            "faults": [vars(fault) for fault in self.faults],
            "reach": vars(self.reach) if self.reach else None,
            "wavelengths": self._wavelengths(),
        }

    def _wavelengths(self) -> list[dict[str, Any]]:
        sheets = self.page.sheets if self.page else ()
        return [
            {"scheme": s.written, "layers": list(s.layers), "pairs": plain(s.wavelengths)}
            for s in sheets
            if s.wavelengths
        ]


def inspected(
    name: str,
    encodings: tuple[Encoding, ...],
    faults: Sequence[Fault] = (),
    target: int | None = None,
) -> Inspected:
    """What is to be said of a checkpoint with these encodings; `target` is a length to reach."""
    chief = encodings[0]
    rope = chief_rope(chief)
    reach = reach_of(rope, chief, target) if rope is not None else None
    return Inspected(name, encodings, tuple(faults), reach, _page(chief))


def chief_rope(encoding: Encoding) -> Rope | None:
    """The rotation of the layers that see farthest; None where there is no written form of it."""
    if encoding.kind != "rope" or encoding.scheme is None or not encoding.head_dim:
        return None
    scheme = parse(encoding.scheme)
    schemes = scheme.schemes if isinstance(scheme, Layers) else (scheme,)
    turned = [s for s in schemes if s.rotary]
    most = max(turned, key=lambda s: len(s.mask) == 1, default=None)  # no window: sees all
    return most.rotary if most else None


def reach_of(rope: Rope, encoding: Encoding, target: int | None = None) -> Reach | None:
    """The laws for one rotation in its window; None where no entry says how long that is."""
    window, head = encoding.window, encoding.head_dim
    if not window or not head or window > LONGEST:
        return None
    try:
        dim = rope.dim(head)
        inv_freq = rope.frequencies.inv_freq(dim, rope.base, window)
    except UserError:  # a head size that differs by layer, or lists of another length
        return None
    trained = encoding.original or window
    waves = [2 * math.pi / f if f else math.inf for f in inv_freq.tolist()]
    critical = laws.critical_dimension(dim, rope.base, trained)
    more = target is not None and trained > 2 * math.pi
    return Reach(
        base=float(rope.base),
        dim=dim,
        trained=trained,
        longest=max((w for w in waves if math.isfinite(w)), default=0.0),
        unfinished=sum(w > window for w in waves),
        critical_dimension=critical,
        limit=laws.extrapolation_limit(rope.base, dim, critical),
        least_base=laws.least_base(window, dim) if dim == head else None,
        against=laws.turns_against(inv_freq, (head - dim) // 2, min(window, laws.LONGEST)),
        target=target,
        critical_base=laws.critical_base(rope.base, trained, target) if more and target else None,
        target_least_base=laws.least_base(target, dim) if target and dim == head else None,
    )


def _page(encoding: Encoding) -> Page | None:
    """The rows behind the pictures, at the window; each scheme of the layers once."""
    if encoding.scheme is None:
        return None
    scheme: Scheme | Layers = parse(encoding.scheme)
    length = min(encoding.window or 0, LONGEST)
    try:
        return page(scheme, length if length > 1 else None, encoding.head_dim, encoding.heads or 8)
    except UserError:  # sizes that can't be drawn: heads that differ by layer
        return None
