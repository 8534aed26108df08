"""Keys that stay turned: `add` and `attend` equal attention over everything, whatever the scheme,
the pieces and the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Cache, attention
from longitude.cache.rotated_keys import STEPS, DecodeStep, RotatedKeys
from longitude.core.part import Pos
from tests.grid import HEADS, TOKENS, Layer, positions, scheme, schemes, tokens

SCHEMES = {name: s for name, s in schemes().items() if s.causal}
ROTATED = {
    "rope": "rope()",
    "adjacent, partial": "rope(pairs='adjacent', fraction=0.5)",
    "yarn": "rope(frequencies=yarn(4, original=16))",
    "by length": "rope(frequencies=dynamic_ntk(16))",
    "rerope": "rope(remap=rerope(8))",
    "leaky": "rope(remap=leaky_rerope(8, 4), pairs='adjacent')",
    "self-extend": "rope(remap=self_extend(3, 8))",
    "dual chunk": "rope(remap=dual_chunk(12, 3))",
    "streaming": "rope(remap=streaming(2, 8))",
    "lm-infinite": "rope(remap=lm_infinite(8, 3))",
    "stepped": "rope(frequencies=stepped('ntk', original=12))",
    "stepped leaky": "rope(frequencies=stepped('yarn', original=12), remap=leaky_rerope(6, 3))",
    "window": "rope() + window(8, sinks=2)",
    "scaled": "rope(remap=rerope(8)) + logn(16)",
}


def cut(pos: Pos, a: int, b: int) -> Pos:
    return pos[a:b] if isinstance(pos, range) else pos[..., a:b]


def in_pieces(
    s: Any,
    qkv: list[Tensor],
    pos: Pos,
    sizes: list[int],
    padding: Tensor | None = None,
    weights: Any = None,
    slack: int = 4,
    gates: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The outputs of `attend`, piece after piece."""
    cache, outs, start = Cache(s, length=TOKENS, slack=slack), [], 0
    for size in sizes:
        q, k, v = (x[:, :, start : start + size] for x in qkv)
        now = cut(pos, start, start + size)
        hidden = None if padding is None else padding[:, start : start + size]
        cache.add(k, v, now, hidden, None if gates is None else gates[..., start : start + size])
        outs.append(cache.attend(q, now, weights, **options))
        start += size
    return torch.cat(outs, 2)


@pytest.mark.unchecked  # half of this file's time
@pytest.mark.parametrize("sizes", [[1] * TOKENS, [17, 6, 1, 1, 3, 12]], ids=["tokens", "chunks"])
@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_every_preset_decodes_as_it_prefills(name: str, sizes: list[int]) -> None:
    s, x = SCHEMES[name], tokens(batch=2)
    pos = positions(s, TOKENS)
    want = Layer(s, 2).dense(x, pos, backend="eager", length=TOKENS)
    layer = Layer(s, 2, torch.float32)
    gates = layer.gates(x, pos)
    got = in_pieces(s, layer.qkv(x, pos), pos, sizes, weights=layer.weights, gates=gates)
    assert torch.allclose(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.unchecked  # the others check the same calls
@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_bfloat16_is_as_good_as_turning_anew(name: str) -> None:
    """Against float64 over the same rounded inputs: a key that crosses regions is rounded again."""
    s, x = scheme(ROTATED[name]), tokens(batch=2)
    qkv = Layer(s, 2, torch.bfloat16).qkv(x, range(TOKENS))
    q, k, v = (t.double() for t in qkv)
    want = attention(s, q, k, v, range(TOKENS), range(TOKENS), backend="eager", length=TOKENS)
    anew = attention(s, *qkv, q_pos=range(TOKENS), k_pos=range(TOKENS), length=TOKENS)
    got = in_pieces(s, qkv, range(TOKENS), [1] * TOKENS)
    off, least = (float((o.double() - want).norm() / want.norm()) for o in (got, anew))
    assert off < max(1.5 * least, 4e-3), (off, least)


@pytest.mark.unchecked  # the others check the same calls
@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_rows_with_padding_decode_as_they_would_alone(name: str) -> None:
    s, x, pads = scheme(ROTATED[name]), tokens(batch=3), (0, 5, 14)
    pos = torch.stack([(torch.arange(TOKENS) - pad).clamp(min=0) for pad in pads])
    padding = torch.stack([torch.arange(TOKENS) < pad for pad in pads])
    qkv = Layer(s, 2).qkv(x, pos)
    got = in_pieces(s, qkv, pos, [20, *[1] * 14, 3, 3], padding, slack=0)
    for r, pad in enumerate(pads):
        own = range(TOKENS - pad)
        q, k, v = (t[r : r + 1, :, pad:] for t in qkv)
        want = attention(s, q, k, v, own, own, backend="eager", length=TOKENS)
        assert torch.allclose(got[r : r + 1, :, pad:], want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_candidates_come_and_go(name: str) -> None:
    """Assisted decoding: several tokens at once, some taken back; frames move there and back."""
    s, x = scheme(ROTATED[name]), tokens()
    q, k, v = Layer(s, 2).qkv(x, range(TOKENS))
    want = attention(s, q, k, v, range(TOKENS), range(TOKENS), backend="eager", length=TOKENS)
    cache, done = Cache(s, length=TOKENS, slack=5), 10
    cache.add(k[:, :, :done], v[:, :, :done], range(done))
    cache.attend(q[:, :, :done], range(done))
    while done < TOKENS - 5:
        for n, good in ((5, 2), (1, 1)):
            here, now = slice(done, done + n), range(done, done + n)
            guess = k[:, :, here].clone()
            guess[:, :, good:] += 1
            cache.add(guess, v[:, :, here], now)
            got = cache.attend(q[:, :, here], now)
            assert torch.allclose(got[:, :, :good], want[:, :, here][:, :, :good], atol=1e-10)
            done += good
            cache.crop(done)
    assert cache.seen == done


@pytest.mark.unchecked  # the others check the same calls
@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_options_reach_attention(name: str) -> None:
    s, x = scheme(ROTATED[name]), tokens()
    qkv, now = Layer(s, 2).qkv(x, range(TOKENS)), range(TOKENS)
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    every: list[dict[str, Any]] = [{"sink_logits": sinks}, {"scale": 0.3}, {"softcap": 2.0}]
    for options in every:
        want = attention(s, *qkv, q_pos=now, k_pos=now, backend="eager", length=TOKENS, **options)
        got = in_pieces(s, qkv, now, [20, *[1] * 20], **options)
        assert torch.allclose(got, want, atol=1e-10, rtol=0), options


@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_keys_come_back_unturned(name: str) -> None:
    s = scheme(ROTATED[name])
    q, k, v = Layer(s, 2).qkv(tokens(), range(TOKENS))
    cache = Cache(s, length=TOKENS)
    for t in range(TOKENS - 1):
        cache.add(k[:, :, t : t + 1], v[:, :, t : t + 1], range(t, t + 1))
        cache.attend(q[:, :, t : t + 1], range(t, t + 1))
    kept = cache.update(k[:, :, -1:], v[:, :, -1:], range(TOKENS - 1, TOKENS))
    before = kept.k.clone()
    assert torch.allclose(before, k, atol=1e-12)
    cache.attend(q[:, :, -1:], range(TOKENS - 1, TOKENS))
    assert torch.equal(kept.k, before), "what was given out changed"


@torch.no_grad()
def test_a_callers_keys_are_not_turned_in_place() -> None:
    q, k, v = Layer(scheme("rope()")).qkv(tokens(), range(TOKENS))
    cache, before = Cache(scheme("rope()")), k.clone()
    cache.add(k, v, range(TOKENS))
    cache.attend(q, range(TOKENS))
    assert torch.equal(k, before)


def test_inference_mode_may_end_and_gradients_may_begin() -> None:
    s = scheme("rope(remap=rerope(8))")
    q, k, v = (x.detach() for x in Layer(s, 2).qkv(tokens(), range(TOKENS)))
    want, cache = attention(s, q, k, v, range(TOKENS), range(TOKENS)), Cache(s)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for t in range(TOKENS):
        with modes[t * 3 // TOKENS]():
            here, now = slice(t, t + 1), range(t, t + 1)
            query = q[:, :, here].clone().requires_grad_(t == TOKENS - 1)
            cache.add(k[:, :, here], v[:, :, here], now)
            got = cache.attend(query, now)
        assert torch.allclose(got, want[:, :, here], atol=1e-10)
        assert got.requires_grad == (t == TOKENS - 1)


@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_only_keys_that_change_region_are_rotated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = scheme(ROTATED[name])
    q, k, v = Layer(s, 2).qkv(tokens(), range(TOKENS))
    cache, rotated = Cache(s, length=TOKENS), []
    apply = RotatedKeys.apply

    def counted(self: RotatedKeys, step: DecodeStep) -> Tensor:
        rotated.extend(change.n for change in step.changes)
        return apply(self, step)

    monkeypatch.setattr(RotatedKeys, "apply", counted)
    monkeypatch.setattr("longitude.cache.attention", None)  # which would rotate all anew
    for t in range(TOKENS):
        cache.add(k[:, :, t : t + 1], v[:, :, t : t + 1], range(t, t + 1))
        cache.attend(q[:, :, t : t + 1], range(t, t + 1))
    bands = 3 if "stepped" in name else 0  # where all keys change their frequencies
    assert sum(rotated) <= (2 + bands) * TOKENS


@torch.no_grad()
def test_rows_with_padding_are_reordered_and_cropped() -> None:
    s, x = scheme(ROTATED["lm-infinite"]), tokens(batch=3)
    pads, rows, n = (0, 5, 14), [2, 2, 0], 30
    pos = torch.stack([(torch.arange(TOKENS) - pad).clamp(min=0) for pad in pads])
    padding = torch.stack([torch.arange(TOKENS) < pad for pad in pads])
    qkv = Layer(s, 2).qkv(x, pos)
    want = in_pieces(s, qkv, pos, [20, *[1] * 20], padding)[rows]
    cache = Cache(s, slack=3)
    for a, b in [(0, 20), *((t, t + 1) for t in range(20, n + 3))]:
        q, k, v = (t[:, :, a:b] for t in qkv)
        cache.add(k, v, pos[:, a:b], padding[:, a:b])
        cache.attend(q, pos[:, a:b])
    cache.crop(n)
    cache.reorder(torch.tensor(rows))
    for t in range(n, TOKENS):
        q, k, v = (x[rows, :, t : t + 1] for x in qkv)
        cache.add(k, v, pos[rows, t : t + 1])
        got = cache.attend(q, pos[rows, t : t + 1])
        assert torch.allclose(got, want[:, :, t : t + 1], atol=1e-10)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROTATED)
@torch.no_grad()
def test_on_cuda_with_padding(name: str, dtype: torch.dtype) -> None:
    s, x, pads = scheme(ROTATED[name]), tokens(batch=3), (0, 5, 14)
    pos = torch.stack([(torch.arange(TOKENS) - pad).clamp(min=0) for pad in pads])
    padding = torch.stack([torch.arange(TOKENS) < pad for pad in pads])
    qkv = [t.to(dtype) for t in Layer(s, 2).qkv(x, pos)]
    want = in_pieces(s, [t.double() for t in qkv], pos, [20, *[1] * 17, 3], padding, slack=0)
    there = [t.cuda() for t in qkv]
    got = in_pieces(s, there, pos.cuda(), [20, *[1] * 17, 3], padding.cuda(), slack=0).cpu()
    real = (~padding)[:, None, :, None]
    off = ((got.double() - want) * real).norm() / (want * real).norm()
    assert off < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", ["rerope", "leaky", "self-extend", "dual chunk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_shared_keys_and_sinks_over_many_steps(name: str, dtype: torch.dtype) -> None:
    """Against eager attention in float64, past the steps whose tables are made at once."""
    s, n, rng = scheme(ROTATED[name]), 3 * STEPS, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=rng).to(dtype) for h in (6, 2, 2))
    sinks, cache, first = torch.linspace(-1, 2, 6), Cache(s), STEPS - 9
    a, b, c = (x.double() for x in (q, k, v))
    want = attention(s, a, b, c, range(n), range(n), backend="eager", sink_logits=sinks.double())
    cache.add(k[:, :, :first], v[:, :, :first], range(first))
    for t in range(first, n):
        here, now = slice(t, t + 1), range(t, t + 1)
        cache.add(k[:, :, here], v[:, :, here], now)
        got = cache.attend(q[:, :, here], now, sink_logits=sinks)
        off = (got.double() - want[:, :, here]).norm() / want[:, :, here].norm()
        assert off < (2e-6 if dtype == torch.float32 else 1e-2), t
