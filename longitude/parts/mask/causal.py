"""Causal mask: a query sees itself and what came before it, i - j >= 0.

Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3. A scheme without a direction is
causal.
"""

from longitude.part import part
from longitude.region import Area


@part("causal", site="mask", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Causal:
    def areas(self) -> tuple[Area, ...]:
        return (Area(lo=0),)
