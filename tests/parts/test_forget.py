"""Forget gates: the product of the gates between a key and a query, and its special cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longitude import Cache, Dims, UserError, attention, parse
from longitude.core.scheme import Scheme
from longitude.nn import PositionAttention
from longitude.ops.inputs import prepare
from longitude.parts import Alibi, Forget

N, DIM, H, D = 13, 24, 4, 6
POS = range(N)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(text: str) -> PositionAttention:
    return PositionAttention(text, Dims(DIM, H, D), rng=torch.Generator().manual_seed(3)).double()


def by_products(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
    """softmax over j ≤ i of q·k / √d + ln(f_{j+1} … f_i), gate by gate."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(H):
            for i in range(N):
                product, weights = 1.0, []
                for j in range(i, -1, -1):
                    weights.append(float((q[b, h, i] @ k[b, h, j] / D**0.5).exp()) * product)
                    product *= float(f[b, h, j])
                total = sum(weights)
                for step, weight in enumerate(weights):
                    out[b, h, i] += weight / total * v[b, h, i - step]
    return out


def test_a_key_is_forgotten_by_the_product_of_the_gates_after_it() -> None:
    x, q, k, v = rand(2, N, DIM), *(rand(2, H, N, D, seed=s) for s in (1, 2, 3))
    module = layer("forget()")
    weight, bias = (module.weights[f"forget/{name}"] for name in ("weight", "bias"))
    f = torch.sigmoid(torch.einsum("bnc,hc->bhn", x, weight) + bias[None, :, None])
    expected = by_products(q, k, v, f.detach())
    for backend in ("eager", "native", "flex", "auto"):
        with torch.no_grad():
            torch.testing.assert_close(module(q, k, v, POS, x=x, backend=backend), expected)


def test_a_cache_decodes_as_prefill_reads_and_can_be_cropped() -> None:
    x, q, k, v = rand(2, N, DIM), *(rand(2, H, N, D, seed=s) for s in (1, 2, 3))
    for text in ("forget()", "forget() + rope() + window(4)"):
        module = layer(text)
        with torch.no_grad():
            expected = module(q, k, v, POS, x=x)
            cache, at = Cache(module.scheme, slack=2), 0
            for size in (5, 1, 1, 3, 1, 1, 1):
                if at == 11:  # two candidates are taken back, and come again
                    cache.crop(10)
                    at = 10
                here = slice(at, at + size)
                new = (t[:, :, here] for t in (q, k, v))
                got = module(*new, POS[here], cache=cache, x=x[:, here])
                torch.testing.assert_close(got, expected[:, :, here])
                at += size


def test_one_gate_per_head_is_a_learned_slope() -> None:
    q, k, v = (rand(1, H, N, D, seed=s) for s in (1, 2, 3))
    module = layer("forget('bias', shortest=3, longest=81)")
    bias = module.weights["forget/bias"]
    torch.testing.assert_close(
        torch.sigmoid(bias.detach()),
        torch.exp(-1 / torch.tensor([3.0, 9.0, 27.0, 81.0], dtype=torch.float64)),
        rtol=1e-6,
        atol=0,
    )
    expected = by_products(q, k, v, torch.sigmoid(bias.detach())[None, :, None].expand(1, H, N))
    torch.testing.assert_close(module(q, k, v, POS), expected)
    module(q, k, v, POS).sum().backward()
    assert bias.grad is not None and bool(bias.grad.abs().min() > 0)


def test_alibi_is_a_fixed_gate_of_its_slopes() -> None:
    """log f = -2^(-8h/H): τ from 2^(8/H) to 2^8; and so are sums that fall by the slope."""
    heads = 8
    q, k, v = (rand(1, heads, N, D, seed=s) for s in (1, 2, 3))
    alibi = attention(Scheme.of(Alibi()), q, k, v, POS, POS)
    torch.testing.assert_close(attention(Scheme.of(Forget("fixed")), q, k, v, POS, POS), alibi)
    slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64)
    sums = (-slopes[:, None] * torch.arange(1, N + 1))[None]
    weights = parse("forget()").init(Dims(DIM, heads, D))
    got = attention("forget()", q, k, v, POS, POS, weights, forget_sums=sums)
    torch.testing.assert_close(got, alibi)


def test_gates_of_a_half_precision_layer_are_added_up_in_float32() -> None:
    x, weights = torch.zeros(1, N, DIM, dtype=torch.bfloat16), Forget().init(Dims(DIM, H, D), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert Forget().log_gates(x, weights).dtype == torch.float32


def test_mistakes_are_told() -> None:
    q = k = v = rand(1, H, N, D)
    weights, sums = parse("forget()").init(Dims(DIM, H, D)), rand(1, H, N)
    with pytest.raises(UserError, match="takes the forget_sums of its gates, but none were given"):
        attention("forget()", q, k, v, POS, POS, weights)
    with pytest.raises(UserError, match="takes no forget_sums of its gates, but some were given"):
        attention("rope()", q, k, v, POS, POS, forget_sums=sums)
    with pytest.raises(UserError, match=r"\(1, 4, 13\) for queries .* give a pair"):
        prepare("forget()", q, k, v, POS, POS, weights, forget_sums=sums[..., :4])
    with pytest.raises(UserError, match="shortest must not be above longest"):
        Forget("fixed", shortest=9, longest=3)
    assert parse("forget('bias', longest=64)") == parse(str(parse("forget('bias', longest=64)")))
