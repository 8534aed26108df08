"""Leaky ReRoPE: distances beyond the window grow k times more slowly, w + (i - j - w)/k.

Su 2023 (kexue.fm 9708). A model trained to length L reads L' when w < L and w + (L' - 1 - w)/k <=
L; half of L is better (kexue.fm 9731). ReRoPE is the limit of large k.
"""

from longitude.part import Region, part, positive
from longitude.region import Area, Shift


def leak(window: int, divide: float) -> tuple[Region, ...]:
    """Distance r inside the window, window + (r - window)/divide beyond it, on both sides."""
    jump = window - window / divide
    slow, ahead = Shift(divide=divide), Shift(divide=divide, add=jump)
    return (
        Region(Area(lo=1 - window, hi=window)),
        Region(Area(lo=window), q=ahead, k=slow),
        Region(Area(hi=1 - window), q=slow, k=ahead),
    )


@part("leaky_rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class LeakyRerope:
    window: int
    factor: float

    def check(self) -> None:
        positive(self, "window", "factor")

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, self.factor)
