"""Masks: which keys a query may see, as areas of the (i, j) plane.

Causal and bidirectional are directions, of which a scheme has exactly one (causal by default); a
sliding window with or without attention sinks and Llama 4's chunks restrict it further. Site ⑥. The
mask is also the cache's eviction policy.
"""

from longitude.core.part import Choice, Mask, part
from longitude.core.region import Area, Chunks
from longitude.core.validate import NonNegativeInt, PositiveInt
from longitude.parts.rope import Rope


@part("causal", site="mask", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Causal(Mask):
    """Causal mask: a query sees itself and what came before it, i - j >= 0.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3. A scheme without a direction is
    causal.
    """

    def areas(self) -> tuple[Area, ...]:
        return (Area(lo=0),)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        """The mask alone, without positions."""
        return [cls()]


@part("bidirectional", site="mask", paper="Devlin et al. 2018, arXiv:1810.04805")
class Bidirectional(Mask):
    """No direction: every query sees every key, as in encoders.

    Devlin et al. 2018, "BERT". Written out, because a scheme that names no direction is causal.
    """

    def areas(self) -> tuple[Area, ...]:
        return (Area(),)


@part(
    "window",
    site="mask",
    paper="Beltagy et al. 2020, arXiv:2004.05150; Xiao et al. 2023, arXiv:2309.17453",
)
class Window(Mask):
    """Sliding window, with or without attention sinks: |i - j| < size, or j < sinks.

    Beltagy et al. 2020, "Longformer" (window); Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks": a model trained with full attention collapses under a bare window
    (Llama-2-13B, PG19, window 1,024: perplexity 5158) and recovers when the first four tokens stay
    visible (4 + 1,020: 5.40). The window counts the query itself. Keys keep their true positions
    here; `streaming` renumbers them.
    """

    size: PositiveInt
    sinks: NonNegativeInt = 0

    def areas(self) -> tuple[Area, ...]:
        near = Area(lo=1 - self.size, hi=self.size)
        if not self.sinks:
            return (near,)
        first = Area(last=self.sinks)
        return (near, first & Area(lo=self.size), first & Area(hi=1 - self.size))

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(Rope(), cls(max(2, length // 4)))]


@part("chunked", site="mask", paper="Meta 2025, Llama 4; transformers modeling_llama4")
class Chunked(Mask):
    """Chunked attention: a query sees only its own chunk of `size` positions, i // size = j //
    size.

    Meta 2025, Llama 4: its rotary layers attend within chunks of 8,192, the others to everything.
    """

    size: PositiveInt

    def areas(self) -> tuple[Area, ...]:
        return (Area(chunks=(Chunks(self.size, 0, 1),)),)
