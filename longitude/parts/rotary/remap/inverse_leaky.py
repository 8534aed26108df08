"""Inverse leaky ReRoPE, for training: distances beyond the window grow `step` times faster, w +
step·(i - j - w).

Su 2023, "Transformer upgrade 13: reverse use of leaky ReRoPE" (kexue.fm 9728). A model trained
short with it has seen large distances, and reads long text with plain RoPE, at full speed (512 to
4,096: w = 128, step 16).
"""

from longitude.part import Region, part, positive
from longitude.parts.rotary.remap.leaky_rerope import leak


@part("inverse_leaky", site="remap", paper="Su 2023, kexue.fm/archives/9728")
class InverseLeaky:
    window: int
    step: float

    def check(self) -> None:
        positive(self, "window", "step")

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, 1 / self.step)
