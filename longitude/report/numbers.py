"""Numbers and layers as a reader wants them: short."""

from collections.abc import Sequence
from itertools import pairwise


def short(value: float) -> str:
    """A number in at most six characters: whole below a hundred thousand, else three figures."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 100_000):
            return f"{value / unit:.3g}{name}"
    if value == round(value) or size >= 1000:
        return str(round(value))
    return f"{value:.0e}" if size < 0.01 else f"{value:.{3 if size >= 1 else 2}g}"


def spans(numbers: Sequence[int]) -> str:
    """Runs of whole numbers: 0–4, 6, 8–9."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def gaps(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The stretches of x over which y is None, each as its first and last x."""
    found: list[tuple[float, float]] = []
    for (x, y), (after, _) in pairwise([*points, *points[-1:]]):
        if y is None and found and found[-1][1] == x:
            found[-1] = (found[-1][0], after)
        elif y is None:
            found.append((x, after))
    return found
