"""What is an argument of `attention` and no part of a scheme, on every backend that takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import UserError, attention
from longitude.ops import attention as runner
from longitude.ops.attention import terms
from tests.grid import scheme

N, HEADS, D = 37, 4, 16
LEAKY = "rope(remap=leaky_rerope(7, 3))"


def qkv(kv: int = 2, n: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, n, D, generator=rng, dtype=torch.float64).to(dtype)
        for h in (HEADS, kv, kv)
    ]


def run(text: str, backend: Any = "eager", **options: Any) -> Tensor:
    return attention(scheme(text), *qkv(), range(N), range(N), backend=backend, **options)


def test_plain_attention_is_its_formula() -> None:
    q, k, v = qkv(HEADS)
    scores = q @ k.transpose(-1, -2) / D**0.5
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    want = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
    for backend in ("eager", "native"):
        got = attention(scheme("causal()"), q, k, v, range(N), range(N), backend=backend)
        assert torch.allclose(got, want, atol=1e-14, rtol=0)


@pytest.mark.parametrize("text", ["rope()", LEAKY, "alibi()", "rope() + window(9, sinks=2)"])
def test_scale_and_sinks_are_their_formulas(text: str) -> None:
    sinks = torch.linspace(-2, 2, HEADS, dtype=torch.float64)
    found = terms(scheme(text), *qkv()[:2], range(N), range(N), scale=0.4)
    scores = found.total.masked_fill(~found.visible, float("-inf"))
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp().view(1, -1, 1, 1))
    want = weights @ qkv()[2].repeat_interleave(2, 1)
    for backend in ("eager", "native"):
        got = run(text, backend, scale=0.4, sink_logits=sinks)
        assert torch.allclose(got, want, atol=1e-13, rtol=0)


def test_terms_add_up_and_carry_the_softcap() -> None:
    s = scheme("rope() + alibi() + t5()")
    table = {
        "t5.table": torch.randn(32, HEADS, generator=torch.Generator().manual_seed(3)).double()
    }
    q, k, _ = qkv()
    found = terms(s, q, k, range(N), range(N), table)
    assert set(found.biases) == {"alibi", "t5"}
    total = found.content + found.biases["alibi"] + found.biases["t5"]
    assert torch.allclose(found.total, total, atol=1e-14, rtol=0)
    capped = terms(s, q, k, range(N), range(N), table, softcap=3.0)
    assert torch.allclose(capped.total, 3 * torch.tanh(total / 3), atol=1e-14, rtol=0)


def test_alibi_is_not_divided_by_the_root_of_the_head_size() -> None:
    """Note 000:320 divides neither; the paper divides the product only."""
    found = terms(scheme("alibi()"), *qkv()[:2], range(N), range(N))
    r = torch.arange(N)[:, None] - torch.arange(N)
    want = -(2.0 ** (-2 * torch.arange(1, 5).double())).view(-1, 1, 1) * r.abs()
    assert torch.allclose(found.biases["alibi"][0], want, atol=1e-14, rtol=0)


def test_dropout_drops_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = (x.float() for x in qkv(HEADS))
    s, v = scheme("rope()"), torch.ones_like(v)
    for backend in ("eager", "native"):
        many = [x.repeat(100, 1, 1, 1) for x in (q, k, v)]  # each sequence drops its own
        out = attention(s, *many, range(N), range(N), backend=backend, dropout=0.3)
        assert float(out.std()) > 0.05
        assert abs(float(out[:, :, 5:].mean()) - 1) < 0.02
    with pytest.raises(UserError, match="dropout can't be merged"):
        attention(scheme(LEAKY), q, k, v, range(N), range(N), backend="native", dropout=0.3)
    auto = attention(scheme(LEAKY), q, k, v, range(N), range(N), dropout=0.3)
    assert auto.shape == q.shape


@pytest.mark.parametrize("backend", ["eager", "native", "flex"])
@pytest.mark.parametrize("text", ["rope()", "alibi()", "rope() + window(4)"])
@torch.no_grad()
def test_a_query_that_sees_nothing_gets_zeros(text: str, backend: Any) -> None:
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1] = True
    out = run(text, backend, key_padding=padding)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and bool((out[0] != 0).any())


def test_segments_may_differ_for_queries_and_keys() -> None:
    s, (q, k, v) = scheme("rope()"), qkv()
    ids = torch.tensor([0] * 20 + [1] * 17).expand(2, -1)
    whole = attention(s, q, k, v, range(N), range(N), segments=ids)
    last = attention(s, q[:, :, -1:], k, v, range(N - 1, N), range(N), segments=(ids[:, -1:], ids))
    assert torch.allclose(last, whole[:, :, -1:], atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    "text", ["rope()", LEAKY, "rope(remap=dual_chunk(12, 3))", "rope(remap=streaming(2, 6))"]
)
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (11, 30), (30, 37), (36, 37)])
def test_native_takes_ranges_with_different_starts(text: str, start: int, stop: int) -> None:
    s, (q, k, v) = scheme(text), qkv()
    whole = attention(s, q, k, v, range(N), range(N), backend="eager")
    here = (slice(None), slice(None), slice(start, stop))
    got = attention(s, q[here], k, v, range(start, stop), range(N), backend="native")
    assert torch.allclose(got, whole[here], atol=1e-13, rtol=0)
    ahead = attention(
        s,
        q[here],
        k[:, :, :stop],
        v[:, :, :stop],
        range(start, stop),
        range(stop),
        backend="native",
    )
    assert torch.allclose(ahead, whole[here], atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    "text", ["rope()", LEAKY, "rope(pairs='adjacent') + window(5, sinks=1)", "alibi()"]
)
def test_strides_do_not_matter(text: str) -> None:
    s, x = scheme(text), qkv()
    want = attention(s, *x, range(N), range(N), backend="eager")
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    backwards = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in x]
    apart = [torch.stack([t, t], -1)[..., 0] for t in x]
    for strided in (swapped, backwards, apart):
        assert torch.allclose(attention(s, *strided, range(N), range(N)), want, atol=1e-13, rtol=0)


@pytest.mark.parametrize("backend", ["auto", "eager", "native"])
@pytest.mark.parametrize("text", ["rope()", LEAKY, "alibi()"])
def test_no_tokens_and_one(text: str, backend: Any) -> None:
    s, (q, k, v) = scheme(text), qkv()
    none = attention(s, q[:, :, :0], k, v, range(0), range(N), backend=backend)
    assert none.shape == (2, HEADS, 0, D)
    alone = attention(s, q[:, :, :1], k[:, :, :1], v[:, :, :1], range(1), range(1), backend=backend)
    assert torch.allclose(alone, v[:, :, :1].repeat_interleave(2, 1), atol=1e-14, rtol=0)


def test_the_call_of_the_front_page() -> None:
    s = scheme(
        "rope(base=100000, frequencies=yarn(4, original=8192), remap=leaky_rerope(16, 8)) + "
        "logn(32)"
    )
    q, k, v = qkv()
    out = attention(s, q, k, v, q_pos=range(N), k_pos=range(N))
    last = attention(s, q[:, :, -1:], k, v, q_pos=range(N - 1, N), k_pos=range(N))
    assert torch.allclose(last, out[:, :, -1:], atol=1e-13, rtol=0)


def test_nothing_that_ran_before_changes_a_result() -> None:
    s, (q, k, v) = scheme("rope(frequencies=dynamic_ntk(16, 2))"), qkv()
    first = attention(s, q[:, :, :20], k[:, :, :20], v[:, :, :20], range(20), range(20))
    attention(s, q, k, v, range(N), range(N))
    again = attention(s, q[:, :, :20], k[:, :, :20], v[:, :, :20], range(20), range(20))
    assert torch.equal(first, again)


def test_tables_made_in_inference_mode_serve_training() -> None:
    s = scheme("rope(base=777)")
    with torch.inference_mode():
        attention(s, *qkv(), range(N), range(N))
    x = [t.requires_grad_() for t in qkv()]
    attention(s, *x, range(N), range(N)).sum().backward()
    assert x[0].grad is not None and bool(torch.isfinite(x[0].grad).all())


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "no backend is called 'fast'": ("rope()", {"backend": "fast"}),
    "key_padding must be": ("rope()", {"key_padding": torch.zeros(2, 5, dtype=torch.bool)}),
    "segments must be": ("rope()", {"segments": torch.zeros(2, 5, dtype=torch.int64)}),
    "sink_logits must be": ("rope()", {"sink_logits": torch.zeros(7)}),
    "length must be": ("rope(frequencies=dynamic_ntk(16))", {"length": [3, 4, 5]}),
    "weights lack t5.table": ("t5()", {}),
    "can't be paired": ("rope(fraction=0.2)", {}),
    "Shaw's value side": ("shaw(3, values=True)", {"backend": "native"}),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_get_a_sentence(says: str) -> None:
    text, options = MISTAKES[says]
    if text.startswith("shaw"):
        table = torch.zeros(7, D, dtype=torch.float64)
        options = {**options, "weights": {"shaw.keys": table, "shaw.values": table}}
    with pytest.raises(UserError) as raised:
        unchecked(scheme(text), *qkv(), range(N), range(N), **options)
    assert says in str(raised.value) and str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(2, 4, 5), (2, 4, 5, 8), (2, 4, 5, 8)], "q must be"),
        ([(2, 4, 5, 8), (2, 4, 5, 6), (2, 4, 5, 8)], "do not fit together"),
        ([(2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)], "can't share"),
        ([(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], "positions"),
    ],
)
def test_sizes_that_do_not_fit_get_a_sentence(shapes: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        unchecked(scheme("rope()"), *(torch.zeros(s) for s in shapes), range(5), range(5))


def unchecked(*args: Any, **kwargs: Any) -> Tensor:
    """`attention` as users call it, without the tests' run-time type checker in front."""
    bare: Any = runner.attention
    while hasattr(bare, "__wrapped__"):
        bare = bare.__wrapped__
    return bare(*args, **kwargs)


@pytest.mark.parametrize("text", ["rope()", LEAKY, "alibi()"])
def test_gradients_reach_the_sinks(text: str) -> None:
    found = []
    for backend in ("eager", "native"):
        x = [t.requires_grad_() for t in qkv()]
        sinks = torch.linspace(-2, 2, HEADS, dtype=torch.float64, requires_grad=True)
        out = attention(scheme(text), *x, range(N), range(N), backend=backend, sink_logits=sinks)
        (out * torch.arange(D)).sum().backward()
        found.append([t.grad for t in (*x, sinks)])
    for eager, native in zip(*found, strict=True):
        assert eager is not None and float(eager.abs().max()) > 1e-3
        assert torch.allclose(eager, native, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "text",
    ["rope(frequencies=dynamic_ntk(8, 2))", "rope() + logn(16, clip=False) + bidirectional()"],
)
def test_padding_counts_for_nothing_wherever_it_stands(text: str) -> None:
    """Neither in the length that frequencies see, nor among the keys that logn counts."""
    s, (q, k, v), pad = scheme(text), qkv(), 11
    alone = attention(s, *(x[:, :, pad:] for x in (q, k, v)), range(N - pad), range(N - pad))
    pos = torch.cat([torch.full((pad,), 5000), torch.arange(N - pad)])
    padding = (torch.arange(N) < pad).expand(2, -1)
    got = attention(s, q, k, v, pos, pos, key_padding=padding)
    assert torch.allclose(got[:, :, pad:], alone, atol=1e-12, rtol=0)
