"""Biases on a CPU: masks that are views of tables equal the full score matrix; so do gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longitude.core.part import Dims
from longitude.core.text import parse
from longitude.ops import diagonals
from longitude.ops.attention import attention
from longitude.ops.diagonals import BLOCK_QUERIES
from longitude.ops.inputs import prepare
from longitude.ops.passes import tiles
from longitude.ops.plan import Kernel, make_plan
from longitude.parts import Alibi
from longitude.parts.distance_bias import by_distance

N = BLOCK_QUERIES[0] + 90  # more than a block
CALLS = {
    "all": (range(N), range(N)),
    "last": (range(N, 2 * N), range(2 * N)),
    "ahead": (range(40, 40 + N), range(N)),  # the last keys are behind all of the last queries
}
SCHEMES = (
    "alibi()", "kerple_log()", "kerple_power()", "t5()", "sandwich()", "shaw(16)",
    "fire()", "transformer_xl()", "transformer_xl(clamp=40)", "rope() + alibi() + window(200)",
    "t5(bidirectional=True) + bidirectional()", "shaw(8) + alibi() + logn(64)",
    "shaw(8) + bidirectional()", "fire(threshold=8) + bidirectional()",
    "fire(threshold=8)", "rope() + transformer_xl() + shaw(30)",
    "deberta(16) + bidirectional()", "deberta(300)", "deberta(64, buckets=16) + bidirectional()",
    "deberta(16, c2p=False)", "deberta(16, p2c=False) + alibi() + fire(threshold=8)",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", SCHEMES)
def test_it_equals_the_score_matrix(text: str, call: str) -> None:
    scheme, (q_pos, k_pos) = parse(text), CALLS[call]
    rng = torch.Generator().manual_seed(0)
    own = {name: w.double() for name, w in scheme.init(Dims(32, 4, 8), rng).items()}
    q = torch.randn(2, 4, len(q_pos), 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, len(k_pos), 8, generator=rng, dtype=torch.float64)
    for x in (q, k, v, *own.values()):
        x.requires_grad_()
    given = (scheme, q, k, v, q_pos, k_pos, own)
    assert make_plan(prepare(*given)).steps[0].kernel is Kernel.SDPA_DIAGONALS
    up = torch.randn(q.shape, generator=rng, dtype=torch.float64)
    results = []
    for backend in ("auto", "eager"):
        with torch.no_grad():
            results.append([attention(*given, backend=backend)])
        out = attention(*given, backend=backend)
        torch.testing.assert_close(out, results[-1][0], rtol=1e-12, atol=1e-12)
        results[-1] += torch.autograd.grad(out, (q, k, v, *own.values()), up)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


FLAT = (
    "t5(8, 16)", "t5(8, 32, bidirectional=True) + bidirectional()", "shaw(16)",
    "transformer_xl(clamp=40)", "deberta(16) + bidirectional()", "t5(8, 16) + shaw(20)",
    "deberta(64, buckets=16) + bidirectional()", "deberta(16, c2p=False) + logn(64)",
)  # fmt: skip


@pytest.mark.parametrize("call", ["all", "last"])
@pytest.mark.parametrize("text", FLAT)
def test_keys_beyond_a_flat_end_are_plain_tiles(
    text: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[Any] = []
    monkeypatch.setattr(diagonals, "LEAST_FAR", 0)
    monkeypatch.setattr(diagonals, "tiles", lambda *a: cut.append(tiles(*a)) or cut[-1])
    test_it_equals_the_score_matrix(text, call)
    sides = 2 if "bidirectional" in text else 1
    assert sum(map(bool, cut)) >= sides


def test_weights_too_small_to_count_have_no_gradients() -> None:
    scheme, x = parse("alibi()"), torch.randn(3, 1, 8, 1000, 8, requires_grad=True)
    results = []
    for backend, wide in (("auto", torch.float32), ("eager", torch.float64)):
        q, k, v = x.to(wide).unbind()
        out = attention(scheme, q, k, v, range(1000), range(1000), backend=backend)
        results.append(torch.autograd.grad(out.square().sum(), x)[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_autocast_leaves_it_alone() -> None:
    scheme, x = parse("shaw(16)"), torch.randn(3, 1, 4, N, 8, requires_grad=True)
    own = scheme.init(Dims(32, 4, 8), torch.Generator().manual_seed(0))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = attention(scheme, *x.unbind(), range(N), range(N), own)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("bias", [-3.0, 3.0, 0.0])
def test_fire_whose_units_have_no_kink_or_all_at_zero(bias: float) -> None:
    scheme, x = parse("fire()"), torch.randn(1, 2, N, 8, dtype=torch.float64)
    own = {name: w.double() for name, w in scheme.init(Dims(16, 2, 8), None).items()}
    own["fire.inward_bias"] = torch.full_like(own["fire.inward"], bias)
    own["fire.inward"] = own["fire.inward"].clamp(-2, 2)  # shares are at most 1
    given = (scheme, x, x, x, range(N), range(N), own)
    torch.testing.assert_close(attention(*given), attention(*given, backend="eager"))


def test_narrow_types_and_grouped_heads_are_as_exact_as_a_dense_mask() -> None:
    scheme, x = parse("transformer_xl()"), torch.randn(1, 4, N, 8)
    own = scheme.init(Dims(32, 4, 8), torch.Generator().manual_seed(0))
    q, k = x.bfloat16(), x[:, :2].bfloat16()
    want = attention(scheme, q.float(), k.float(), k.float(), range(N), range(N), own)
    got = attention(scheme, q, k, k, range(N), range(N), own)
    torch.testing.assert_close(got.float(), want, rtol=0.03, atol=0.03)


def test_a_query_that_sees_nothing_is_left_to_a_dense_mask() -> None:
    x = torch.randn(1, 2, 8, 8)
    before = (parse("alibi()"), x, x, x, range(8), range(4, 12))
    assert make_plan(prepare(*before)).steps[0].kernel is Kernel.SDPA_MASKED
    assert not attention(*before)[:, :, :4].any()


@pytest.mark.parametrize("text", ["t5(32, 128)", "kerple_log()", "kerple_power()", "fire()"])
def test_weights_of_half_precision_lose_nothing_more(text: str) -> None:
    n, scheme = 2048, parse(text)
    rng = torch.Generator().manual_seed(0)
    half = {name: w.bfloat16() for name, w in scheme.init(Dims(32, 2, 8), rng).items()}
    q, k, v, up = torch.randn(4, 1, 2, n, 8, generator=rng)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        own = {name: w.to(dtype).requires_grad_() for name, w in half.items()}
        out = attention(scheme, q, k, v, range(n), range(n), own)
        grads = torch.autograd.grad(out, list(own.values()), up)
        results.append([out, *(g.float() for g in grads)])
    for got, want in zip(*results, strict=True):
        assert torch.linalg.vector_norm(got - want) <= 0.01 * torch.linalg.vector_norm(want) + 1e-4


def test_nothing_but_inputs_and_outputs_is_kept_for_the_backward() -> None:
    scheme, x = parse("transformer_xl()"), torch.randn(1, 4, N, 8, requires_grad=True)
    own = scheme.init(Dims(32, 4, 8), torch.Generator().manual_seed(0))
    out = attention(scheme, x, x, x, range(N), range(N), own)
    node: Any = out.grad_fn
    (term,) = node.call.terms
    held = (term.queries, term.vectors, term.keys, term.scratch.memory)
    assert not any(one is not None and one.numel() for one in held)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("value", [lambda h, r: -r.abs() + 0 * h, lambda h, r: h.float()])
def test_parts_of_integers_and_of_no_distance_run_as_any_other(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def term(part: Any, q: Any, k: Any, q_pos: Any, k_pos: Any, *rest: Any) -> Any:
        return by_distance(q_pos, k_pos, value)

    monkeypatch.setattr(Alibi, "term", term)
    x = torch.randn(1, 4, N, 8)
    for first in (0, N - 1):  # all queries, and the last alone
        given = (parse("alibi()"), x[:, :, first:], x, x, range(first, N), range(N))
        torch.testing.assert_close(attention(*given), attention(*given, backend="eager"))
