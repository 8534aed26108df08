"""No direction: every query sees every key, as in encoders.

Devlin et al. 2018, "BERT". Written out, because a scheme that names no direction is causal.
"""

from longitude.part import part
from longitude.region import Area


@part("bidirectional", site="mask", paper="Devlin et al. 2018, arXiv:1810.04805")
class Bidirectional:
    def areas(self) -> tuple[Area, ...]:
        return (Area(),)
