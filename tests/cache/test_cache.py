"""The cache keeps what the mask may still show, and nothing else; decoding with it equals
prefill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longitude import Cache, Scheme, UserError, attention
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


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("text", WINDOWED)
def test_memory_is_constant_and_decoding_equals_prefill(text: str, slack: int) -> None:
    s = scheme(text)
    layer, cache, sizes = Layer(s), Cache(s, slack=slack), []
    want = layer.dense(tokens(), range(TOKENS), backend="eager")
    q, k, v = layer.qkv(tokens(), range(TOKENS))
    for t in range(TOKENS):
        here = slice(t, t + 1)
        keys, values, pos, _ = cache.update(k[:, :, here], v[:, :, here], range(t, t + 1))
        got = attention(s, q[:, :, here], keys, values, range(t, t + 1), pos)
        assert torch.allclose(got, want[:, :, here], atol=1e-12, rtol=0)
        sizes.append(len(cache))
    # the token just added, and slack twice: kept, and added before the mask is asked again
    assert max(sizes) <= WINDOWED[text] + 1 + 2 * slack, sizes


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
    cache, outs = Cache(s, slack=0), []
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
    assert len(cache) <= 2 + 2 + 4 + 1


def test_gradients_flow_through_a_cache() -> None:
    s, n = scheme("rope(remap=rerope(3))"), 8
    k = torch.randn(1, 1, n, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cache = Cache(s)
    for t in range(n):
        keys = cache.update(k[:, :, t : t + 1], k[:, :, t : t + 1], range(t, t + 1)).k
    keys.sum().backward()
    assert k.grad is not None and torch.equal(k.grad, torch.ones_like(k))


def test_mistakes() -> None:
    with pytest.raises(UserError, match="bidirectional"):
        Cache(scheme("rope() + bidirectional()"))
    with pytest.raises(UserError, match="depends on the total length"):
        Cache(scheme("rope(frequencies=dynamic_ntk(16))"))
    with pytest.raises(UserError, match="give one per key"):
        Cache(scheme("rope()")).update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), range(3))


def filled(s: Scheme, n: int = 30, batch: int = 2, slack: int = 4) -> tuple[Cache, list[Tensor]]:
    """A cache that has seen n tokens one by one, and their q, k and v."""
    qkv = Layer(s, 2).qkv(tokens(n + 10, batch), range(n + 10))
    cache = Cache(s, slack=slack)
    for t in range(n):
        step(cache, qkv, t)
    return cache, qkv


def step(cache: Cache, qkv: list[Tensor], t: int) -> Tensor:
    q, k, v = (x[:, :, t : t + 1] for x in qkv)
    cache.add(k, v, range(t, t + 1))
    return cache.attend(q, range(t, t + 1))


CROPPED = ["rope()", "rope() + window(8, sinks=3)", "rope(remap=leaky_rerope(4, 2))", "alibi()"]


@pytest.mark.parametrize("text", CROPPED)
def test_crop_takes_tokens_back(text: str) -> None:
    cache, qkv = filled(scheme(text))
    other = [x.flip(2) for x in qkv]  # candidates that are not taken
    for t in range(30, 33):
        step(cache, other, t)
    cache.crop(30)
    assert cache.seen == 30
    fresh, _ = filled(scheme(text))
    for t in range(30, 40):
        got, want = step(cache, qkv, t), step(fresh, qkv, t)
        assert torch.allclose(got, want, atol=1e-12, rtol=0)


def test_crop_refuses_what_has_lost_its_past() -> None:
    cache, _ = filled(scheme("rope() + window(8)"))
    with pytest.raises(UserError, match="has been evicted"):
        cache.crop(10)
    with pytest.raises(UserError, match="seen 30 tokens"):
        cache.crop(31)
    assert cache.seen == 30
    cache.reset()
    assert cache.seen == len(cache) == 0


@pytest.mark.parametrize("text", CROPPED)
def test_rows_are_reordered_repeated_and_selected(text: str) -> None:
    s = scheme(text)
    cache, qkv = filled(s)
    cache.reorder(torch.tensor([1, 0]))
    cache.repeat(2)
    rows = [1, 1, 0, 0]
    cache.select(torch.tensor([0, 3]))
    rows = [rows[0], rows[3]]
    fresh, _ = filled(s)
    for t in range(30, 33):
        got, want = step(cache, [x[rows] for x in qkv], t), step(fresh, qkv, t)
        assert torch.allclose(got, want[rows], atol=1e-12, rtol=0)
    cache.select(torch.tensor([False, True]))
    assert torch.allclose(
        step(cache, [x[rows[1:]] for x in qkv], 33), step(fresh, qkv, 33)[rows[1:]], atol=1e-12
    )


def test_memory_stays_constant_over_thousands_of_steps() -> None:
    cache, new = Cache(scheme("rope(remap=streaming(4, 60))")), torch.zeros(1, 1, 1, 4)
    rooms = set()
    for t in range(2_000):
        cache.add(new, new, range(t, t + 1))
        rooms.add(cache.nbytes)
    assert cache.seen == 2_000 and len(cache) <= 64 + 2 * 64 + 1
    assert max(rooms) <= 2 * 4 * 4 * 2 * (64 + 2 * 64 + 1)
