"""The cache keeps what the mask may still show, and nothing else; decoding with it equals
prefill."""

from __future__ import annotations

import pytest
import torch

from longitude import Cache, Mistake, attention
from tests.grid import TOKENS, Layer, scheme, tokens

WINDOWED = {
    "rope() + window(8)": 7,
    "rope() + window(8, sinks=3)": 10,
    "rope(remap=streaming(2, 8))": 9,
    "rope(remap=lm_infinite(8, 3))": 10,
    "rope() + chunked(8)": 8,
    "alibi() + window(5)": 4,
    "rope(remap=leaky_rerope(4, 2)) + window(8, sinks=1)": 8,
}


@pytest.mark.parametrize("text", WINDOWED)
def test_memory_is_constant_and_decoding_equals_prefill(text: str) -> None:
    s = scheme(text)
    layer, cache, sizes = Layer(s), Cache(s), []
    want = layer.dense(tokens(), range(TOKENS), backend="eager")
    q, k, v = layer.qkv(tokens(), range(TOKENS))
    for t in range(TOKENS):
        here = slice(t, t + 1)
        keys, values, pos, _ = cache.update(k[:, :, here], v[:, :, here], range(t, t + 1))
        got = attention(s, q[:, :, here], keys, values, range(t, t + 1), pos)
        assert torch.allclose(got, want[:, :, here], atol=1e-12, rtol=0)
        sizes.append(len(cache))
    assert max(sizes) <= WINDOWED[text], sizes


@pytest.mark.parametrize("text", ["rope()", "alibi()", "rope(remap=leaky_rerope(4, 2))", "t5()"])
def test_nothing_leaves_where_everything_stays_visible(text: str) -> None:
    cache = Cache(scheme(text))
    for t in range(20):
        kept = cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), range(t, t + 1))
    assert len(cache) == 20 and kept.pos == range(20)


def test_what_was_given_back_is_not_overwritten() -> None:
    cache, seen = Cache(scheme("rope()")), []
    for t in range(9):
        new = torch.full((1, 1, 1, 2), float(t))
        seen.append(cache.update(new, new, range(t, t + 1)).k)
    for t, k in enumerate(seen):
        assert k[0, 0, :, 0].tolist() == list(range(t + 1))


def test_padded_rows_keep_their_own_sinks() -> None:
    s = scheme("rope(remap=streaming(2, 4))")
    pad, n = 5, 24
    layer, x = Layer(s), tokens(n, batch=2)
    pos = torch.stack([torch.arange(n), (torch.arange(n) - pad).clamp(min=0)])
    padding = torch.zeros(2, n, dtype=torch.bool)
    padding[1, :pad] = True
    q, k, v = layer.qkv(x, pos)
    cache, outs = Cache(s), []
    for a, b in [(0, 9), *((t, t + 1) for t in range(9, n))]:
        kept = cache.update(k[:, :, a:b], v[:, :, a:b], pos[:, a:b], padding[:, a:b])
        outs.append(
            attention(
                s, q[:, :, a:b], kept.k, kept.v, pos[:, a:b], kept.pos, key_padding=kept.padding
            )
        )
    out = torch.cat(outs, 2)
    want = layer.dense(x[:1], range(n)), layer.dense(x[1:, pad:], range(n - pad))
    assert torch.allclose(out[:1], want[0], atol=1e-12, rtol=0)
    assert torch.allclose(out[1:, :, pad:], want[1], atol=1e-12, rtol=0)
    assert len(cache) <= 2 + 2 + 4


def test_gradients_flow_through_a_cache() -> None:
    s, n = scheme("rope(remap=rerope(3))"), 8
    k = torch.randn(1, 1, n, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cache = Cache(s)
    for t in range(n):
        keys = cache.update(k[:, :, t : t + 1], k[:, :, t : t + 1], range(t, t + 1)).k
    keys.sum().backward()
    assert k.grad is not None and torch.equal(k.grad, torch.ones_like(k))


def test_mistakes() -> None:
    with pytest.raises(Mistake, match="bidirectional"):
        Cache(scheme("rope() + bidirectional()"))
    with pytest.raises(Mistake, match="depends on the total length"):
        Cache(scheme("rope(frequencies=dynamic_ntk(16))"))
    with pytest.raises(Mistake, match="give one a key"):
        Cache(scheme("rope()")).update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), range(3))
