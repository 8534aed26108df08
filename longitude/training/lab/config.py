"""What a lab model is, in numbers: its scheme, its window, its sizes. Plain values, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from longitude.core.validate import UserError

BLOCKS = ("llama", "gpt")
VOCABULARY = 256  # a token is a byte; byte 0 ends a document and pads


@dataclass(frozen=True)
class Shape:
    """A decoder before it has weights. `embed_norm` is BLOOM's norm behind the embedding."""

    scheme: str
    length: int
    layers: int
    dim: int
    heads: int
    hidden: int
    block: str = "llama"
    embed_norm: bool = False

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise UserError(f"no block is called {self.block!r}: use {' or '.join(BLOCKS)}.")
        for name in ("length", "layers", "dim", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, but got {getattr(self, name)}.")
        if self.dim % (2 * self.heads):
            raise UserError(
                f"{self.dim} dimensions do not give {self.heads} heads an even size each: "
                f"make dim a multiple of {2 * self.heads}."
            )

    @property
    def head_dim(self) -> int:
        """Dimensions of one head."""
        return self.dim // self.heads

    def plain(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return asdict(self)


@dataclass(frozen=True)
class Size:
    """Layers, width and heads, and the training that suits them: learning rate, steps, and
    sequences a step."""

    layers: int
    dim: int
    heads: int
    rate: float
    steps: int
    batch: int

    def hidden(self, block: str) -> int:
        """The width of the feed-forward: both blocks then have as many weights."""
        return -(-8 * self.dim // 3 // 64) * 64 if block == "llama" else 4 * self.dim


SIZES = {  # weights: 0.36M, for two CPU cores; 2.3M; 14M; 128M
    "nano": Size(layers=3, dim=96, heads=3, rate=3e-3, steps=250, batch=16),
    "tiny": Size(layers=5, dim=192, heads=6, rate=2e-3, steps=2000, batch=32),
    "small": Size(layers=8, dim=384, heads=6, rate=1e-3, steps=5000, batch=64),
    "125m": Size(layers=18, dim=768, heads=12, rate=6e-4, steps=20000, batch=256),
}


def shape(scheme: str, length: int, size: str, block: str = "llama", **given: Any) -> Shape:
    """The shape of a named size under a scheme; `given` replaces any of its numbers."""
    if size not in SIZES:
        raise UserError(f"no size is called {size!r}: use {', '.join(SIZES)}.")
    named = SIZES[size]
    numbers = {"layers": named.layers, "dim": named.dim, "heads": named.heads}
    return Shape(scheme, length, **numbers, hidden=named.hidden(block), block=block, **given)
