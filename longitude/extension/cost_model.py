"""Memory and time of a length on one device and over ranks, printed by `extend --dry-run`: a model,
not a measurement.

Memory is the weights, the cache, the activations of one forward, as eval/prefill.py bounds them,
and temporary copies of one layer's keys and values. `extend` uses it to choose how many ranks share
a text. With N ranks each holds n / N tokens and sends (N - 1) n / N · h_kv (d + d_v) e bytes in
every layer of a forward: the formula of docs/guides/parallel.md for full attention. Time is that of
all matrix products at the rate of our kernels on an H200, plus the communication that attention
does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longitude.eval.prefill import activation_bytes, chunk_for, lm_head, text_config
from longitude.eval.tasks.cost import three_digits

DEVICE, DEVICE_BYTES = "H200", 141e9
# docs/results/benchmarks.jsonl: leaky ReRoPE, window 4,096, 32 heads (8 of keys) × 131,072 × 128
KERNEL_FLOPS = 610e12
# nominal, not measured, by ranks: NVLink in a machine of 8; a 400 Gb/s network card per device
BYTES_PER_SECOND = {8: 450e9, 64: 50e9}
# of a layer's keys and values: growing the cache, rotating keys for each pass, receiving those of
# other ranks. 996,937 tokens of SmolLM2 under ReRoPE took 7.8 GiB beside a cache of 30 · 0.71 GiB
LAYER_COPIES = 10
CLAIM = "a model, not a measurement"


@dataclass(frozen=True)
class OnRanks:
    """One forward of a text: what each rank holds and sends, and about how long it takes."""

    length: int
    ranks: int
    weights: int  # bytes on each rank, like cache, activations and sent
    cache: int
    activations: int
    sent: int
    seconds: float

    @property
    def memory(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        return self.memory <= DEVICE_BYTES

    def __str__(self) -> str:
        parts = (self.weights, self.cache, self.activations, self.memory)
        names = ("weights", "+ cache", "+ activations", "=")
        each = " ".join(
            f"{name} {three_digits(n / 1e9)} GB" for name, n in zip(names, parts, strict=True)
        )
        fits = "fits" if self.fits else "does not fit"
        sends = f", each sends {three_digits(self.sent / 1e9)} GB in a forward" if self.sent else ""
        where, seconds = f"{self.ranks} × {DEVICE}", three_digits(self.seconds)
        return f"{self.length:,} tokens on {where}: {each}, {fits}{sends}; {seconds} s a forward"


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the cost of a model's forward."""

    weights: int  # bytes
    parameters: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    bytes: int  # per element

    @classmethod
    def of(cls, model: Any) -> Sizes:
        config = text_config(model)
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        weights = {p.data_ptr(): p for p in model.parameters()}.values()  # tied weights count once
        total, count = sum(p.nbytes for p in weights), sum(p.numel() for p in weights)
        layers = config.num_hidden_layers
        return cls(total, count, layers, heads, key_heads, head_dim, model.dtype.itemsize)

    def cache(self, tokens: int) -> int:
        """Bytes of the keys and values of all layers."""
        return 2 * self.layers * self.key_heads * self.head_dim * self.bytes * tokens

    def sent(self, length: int, ranks: int) -> int:
        """Bytes that each rank sends in a forward: keys and values of N - 1 of N ranks."""
        return (ranks - 1) * self.cache(length) // ranks

    def seconds(self, length: int, ranks: int) -> float:
        """Products with weights, plus the longer of attention (half of all pairs) and sending."""
        linear = 2 * self.parameters * length / ranks / KERNEL_FLOPS
        attention_flops = 2 * length**2 * self.heads * self.head_dim * self.layers / ranks
        sending = self.sent(length, ranks) / BYTES_PER_SECOND.get(ranks, float("inf"))
        return linear + max(attention_flops / KERNEL_FLOPS, sending)


def cost_model(model: Any, lengths: Sequence[int]) -> list[OnRanks]:
    """The cost of every length on one device, and of the greatest over 8 and 64 ranks."""
    cells = [*((n, 1) for n in lengths), *((lengths[-1], n) for n in (8, 64))]
    return [on_ranks(model, length, ranks) for length, ranks in cells]


def on_ranks(model: Any, length: int, ranks: int) -> OnRanks:
    """The cost of a length over ranks. One rank prefills its cache in chunks; several run one
    forward of our attention, which materialises no mask."""
    sizes, tokens = Sizes.of(model), -(-length // ranks)
    cache = sizes.cache(tokens)
    chunk, total = tokens, 0
    if ranks == 1:
        chunk, total = chunk_for(model, 1, length, lm_head(model)), length
    activations = activation_bytes(model, 1, chunk, total) + LAYER_COPIES * cache // sizes.layers
    sent, seconds = sizes.sent(length, ranks), sizes.seconds(length, ranks)
    return OnRanks(length, ranks, sizes.weights, cache, activations, sent, seconds)


def as_json(cells: Sequence[OnRanks]) -> list[dict[str, Any]]:
    return [{**asdict(cell), "memory": cell.memory, "fits": cell.fits} for cell in cells]
