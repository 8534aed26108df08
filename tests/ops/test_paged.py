"""Attention over a paged cache is each sequence's own attention over its contiguous tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Scheme, UserError, attention
from longitude.core.part import Dims
from longitude.ops.paged import paged_attention
from tests.grid import scheme, schemes

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 8
# new tokens and length of each sequence: decoding, chunks of a prefill, a whole prompt, nothing new
BATCH = ((1, 40), (13, 29), (1, 1), (24, 24), (0, 7), (3, 33))
SCHEMES = {
    name: s for name, s in schemes().items()
    if s.positions.ids(8) == range(8)  # a server counts tokens
    and not s.gated  # and has no layer's input for gates
}  # fmt: skip


class Paged:
    """A batch of sequences whose blocks are scattered over a cache of this layout."""

    def __init__(
        self, batch: Any = BATCH, dtype: torch.dtype = torch.float64, layout: str = "blocks",
        heads: tuple[int, int] = (HEADS, KV_HEADS), size: int = SIZE, device: str = "cpu",
        block: int = BLOCK,
    ) -> None:  # fmt: skip
        rng = torch.Generator(device).manual_seed(0)
        self.batch, self.starts = batch, [0]
        for n, _ in batch:
            self.starts.append(self.starts[-1] + n)
        self.lens = [seq_len for _, seq_len in batch]

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device=device).to(dtype)

        self.q = drawn(self.starts[-1], heads[0], size)
        self.k = [drawn(seq_len, heads[1], size) for seq_len in self.lens]
        self.v = [drawn(seq_len, heads[1], size) for seq_len in self.lens]
        counts = [-(-seq_len // block) for seq_len in self.lens]
        order = torch.randperm(sum(counts) + 3, generator=rng, device=device).tolist()
        self.key_cache, self.value_cache = self.views(layout, len(order), block, heads[1], size)
        self.key_cache, self.value_cache = (
            x.to(device, dtype) for x in (self.key_cache, self.value_cache)
        )
        self.table = torch.zeros(len(batch), max(counts) + 1, dtype=torch.int32, device=device)
        for r, count in enumerate(counts):
            own = torch.tensor([order.pop() for _ in range(count)])
            self.table[r, :count] = own
            for cache, x in ((self.key_cache, self.k[r]), (self.value_cache, self.v[r])):
                at = torch.arange(len(x))
                cache[own[at // block], at % block] = x

    @staticmethod
    def views(layout: str, n: int, block: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
        """Keys and values; what no sequence owns is nan, and must not be read into a sum."""
        if layout == "blocks":  # as FlashAttention's layout in vLLM
            both = torch.full((2, n, block, heads, size), torch.nan)
            return both[0], both[1]
        both = torch.full((n, heads, block, 2 * size), torch.nan)  # as vLLM's on a CPU
        k, v = both.transpose(1, 2).split(size, -1)
        return k, v

    def run(self, s: Scheme, **options: Any) -> Tensor:
        given = (self.key_cache, self.value_cache, self.table, self.starts, self.lens)
        return paged_attention(s, self.q, *given, **options)

    def expected(self, s: Scheme, weights: Any = None, **options: Any) -> Tensor:
        """Each sequence by itself, over contiguous keys, by the full score matrix."""
        outs = []
        for r, (n, seq_len) in enumerate(self.batch):
            q, k, v = (
                x.transpose(0, 1)[None]
                for x in (self.q[self.starts[r] : self.starts[r + 1]], self.k[r], self.v[r])
            )
            pos = range(seq_len)
            own = attention(
                s, q, k, v, pos[seq_len - n :], pos, weights, backend="eager", **options
            )
            outs.append(own[0].transpose(0, 1))
        return torch.cat(outs)


def learned(s: Scheme) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    made = s.init(Dims(HEADS * SIZE, HEADS, SIZE), rng)
    return {
        name: w.double() + torch.rand(w.shape, generator=rng) if w.is_floating_point() else w
        for name, w in made.items()
    }


@pytest.mark.unchecked  # the others check the same calls
@pytest.mark.parametrize("name", SCHEMES)
def test_every_preset_over_scattered_blocks(name: str) -> None:
    s, batch = SCHEMES[name], Paged()
    weights = learned(s)
    torch.testing.assert_close(batch.run(s, weights=weights), batch.expected(s, weights))


@pytest.mark.parametrize("layout", ["blocks", "heads first"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "scale": 0.4},
        {"sink_logits": torch.tensor([-1.0, 0.5, 2.0, 0.0])},
        {"length": 64},
    ],
)
@pytest.mark.parametrize("text", ["rope(remap=rerope(8)) + logn(16)", "rope() + window(9)",
                                  "rope(frequencies=dynamic_ntk(16, 2))",
                                  "rope(pairs='adjacent', fraction=0.5) + alibi()"])  # fmt: skip
def test_options_and_layouts(text: str, options: dict[str, Any], layout: str) -> None:
    s, batch = scheme(text), Paged(dtype=torch.float32, layout=layout)
    torch.testing.assert_close(batch.run(s, **options), batch.expected(s, **options))


def test_numbers_may_be_tensors_and_out_keeps_what_is_not_asked() -> None:
    s, batch = scheme("rope()"), Paged(((1, 9), (2, 5)))
    padded = torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 0, 2))
    out = torch.full_like(padded, 7.0)
    got = paged_attention(
        s, padded, batch.key_cache, batch.value_cache, batch.table, torch.tensor(batch.starts),
        torch.tensor(batch.lens), out=out,
    )  # fmt: skip
    assert got is out and bool((out[3:] == 7).all())
    torch.testing.assert_close(out[:3], batch.expected(s))


def test_a_window_reads_only_the_blocks_it_sees() -> None:
    """A server may have given the others away."""
    s, batch = scheme("rope() + window(9)"), Paged(((1, 40), (4, 30)))
    batch.table[0, :3], batch.table[1, :2] = -(10**6), -(10**6)
    torch.testing.assert_close(batch.run(s), batch.expected(s))


def test_mistakes_get_a_sentence() -> None:
    s, batch = scheme("rope()"), Paged(((1, 9), (2, 5)))
    given = (batch.q, batch.key_cache, batch.value_cache, batch.table)
    with pytest.raises(UserError, match="include the new tokens"):
        paged_attention(s, *given, [0, 1, 3], [9, 1])
    with pytest.raises(UserError, match="include the new tokens"):
        paged_attention(s, *given, [0, 1], [9, 5])
    bare: Any = paged_attention
    while hasattr(bare, "__wrapped__"):  # as users call it, without the tests' type checker
        bare = bare.__wrapped__
    with pytest.raises(UserError, match="do not fit together"):
        bare(s, batch.q[0], *given[1:], [0, 1, 3], [9, 5])
    with pytest.raises(UserError, match="100 tokens does not fit a block table of 3 blocks"):
        paged_attention(s, *given, [0, 1, 3], [100, 5])
