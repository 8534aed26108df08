"""How far what a runtime computes is from what is wanted of it, and the traps that explain each
difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longitude.runtimes.effective import Effective
from longitude.runtimes.issues import TRAPS, Number, Trap

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Difference:
    """How far what a runtime computes is from what is wanted of it."""

    frequencies: float  # the largest relative difference of one
    attention: float  # relative
    length: int  # positions more, or less
    starts: bool
    traps: tuple[Trap, ...]  # those that explain it
    notes: tuple[Trap, ...]  # those that change no number, but are there

    @property
    def same(self) -> bool:
        """Whether the runtime computes what is wanted."""
        close = max(self.frequencies, self.attention) <= TOLERANCE
        return self.starts and close and self.length == 0


def difference(
    inv_freq: Sequence[float], attention: float, length: int, found: Effective
) -> Difference:
    """What is wanted, in its three numbers, against what a runtime computes."""
    met = [TRAPS[name] for name in dict.fromkeys(found.traps)]
    notes = tuple(trap for trap in met if not trap.changes)
    if not found.starts:
        stopped = tuple(trap for trap in met if "start" in trap.changes)
        return Difference(0.0, 0.0, 0, False, stopped, notes)
    apart = _apart(inv_freq, found.inv_freq)
    gain = abs(found.attention / attention - 1) if attention else 0.0
    away = found.length - length
    changed: set[Number] = set()
    changed |= {"frequencies"} if apart > TOLERANCE else set()
    changed |= {"attention"} if gain > TOLERANCE else set()
    changed |= {"length"} if away else set()
    told = [trap for trap in met if changed & set(trap.changes)]
    explained = {number for trap in told for number in trap.changes}
    told += [TRAPS[f"other {number}"] for number in sorted(changed - explained)]
    return Difference(apart, gain, away, True, tuple(told), notes)


def _apart(wanted: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative difference of a frequency; infinite where there are more or fewer."""
    if len(wanted) != len(found):
        return float("inf")
    pairs = zip(wanted, found, strict=True)
    return max((abs(b - a) / max(abs(a), 1e-300) if a != b else 0.0 for a, b in pairs), default=0)
