"""Chunked attention: a query sees only its own chunk of `size` positions, i // size = j // size.

Meta 2025, Llama 4: its rotary layers attend within chunks of 8,192, its others to everything.
"""

from longitude.part import part, positive
from longitude.region import Area, Chunks


@part("chunked", site="mask", paper="Meta 2025, Llama 4; transformers modeling_llama4")
class Chunked:
    size: int

    def check(self) -> None:
        positive(self, "size")

    def areas(self) -> tuple[Area, ...]:
        return (Area(chunks=(Chunks(self.size, 0, 1),)),)
