"""ALiBi in extra head dimensions is ALiBi: as exact as the plain kernel it rides in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longitude import Scheme, UserError, attention
from longitude.ops.extra_dims import UNIT, in_parts, run_alibi
from longitude.ops.inputs import AttentionInputs, prepare
from longitude.ops.plan import CallSpec, Plan, make_plan, plan_call
from tests.grid import scheme


def problem(text: str, n: int, m: int | None = None, *, h: int = 4, hkv: int = 4, d: int = 24,
            dtype: torch.dtype = torch.float32, **options: Any) -> AttentionInputs:  # fmt: skip
    rng, m = torch.Generator().manual_seed(0), m or n
    s = scheme(text)
    assert isinstance(s, Scheme)
    q, k, v = (
        torch.randn(2, heads, tokens, d, generator=rng).to(dtype)
        for heads, tokens in ((h, n), (hkv, m), (hkv, m))
    )
    return prepare(s, q, k, v, range(m - n, m), range(m), **options)


def exactly(p: AttentionInputs) -> torch.Tensor:
    x = (t.double() for t in (p.q, p.k, p.v))
    return attention(p.scheme, *x, p.q_pos, p.k_pos, scale=p.scale, backend="eager")


@pytest.mark.parametrize(
    "text",
    ["alibi()", "rope() + alibi(future=3)", "alibi_interpolated(4)", "ntk_alibi(8)"],
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_the_bias_rides_along(text: str, heads: tuple[int, int]) -> None:
    p = problem(text, 70, h=heads[0], hkv=heads[1])
    assert isinstance(make_plan(p, "alibi"), Plan)
    torch.testing.assert_close(run_alibi(p).double(), exactly(p), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_its_error_is_that_of_the_plain_kernel(dtype: torch.dtype) -> None:
    p, plain = (problem(text, 300, h=2, hkv=2, dtype=dtype, d=16) for text in ("alibi()", "rope()"))
    assert isinstance(make_plan(p, "alibi"), Plan)
    want, other = exactly(p), exactly(plain)
    its = (attention(plain.scheme, plain.q, plain.k, plain.v, plain.q_pos, plain.k_pos)
           - other).norm() / other.norm()  # fmt: skip
    # float32 sums next to a bias of 300 · 2^-4 keep some 2^-19
    assert (run_alibi(p) - want).norm() / want.norm() < max(1.4 * its, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_three_parts_hold_twenty_four_bits(dtype: torch.dtype) -> None:
    far = torch.arange(-131071, 1, dtype=torch.float64) / UNIT
    found = in_parts(far, dtype, 3)
    assert found.dtype == dtype and found.isfinite().all()
    torch.testing.assert_close(found.double().sum(-1), far, rtol=2**-23, atol=0)


def test_gradients_flow() -> None:
    p = problem("alibi()", 20, hkv=2, dtype=torch.float64)
    x = [t.requires_grad_() for t in (p.q, p.k, p.v)]
    mine = torch.autograd.grad(run_alibi(p).square().sum(), x)
    its = torch.autograd.grad(exactly(p).square().sum(), x)
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "n", "m", "why"),
    [
        ("sandwich(dim=16)", 20, 20, "linear"),
        ("alibi() + window(8)", 20, 20, "one causal call"),
        ("alibi() + bidirectional()", 20, 20, "a different slope"),
        ("alibi()", 20, 30, "one causal call"),
        ("alibi()", 1, 30, "one causal call"),
    ],
)
def test_the_rest_is_refused(text: str, n: int, m: int, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_plan(problem(text, n, m), "alibi")


def test_too_large_a_bias_is_refused() -> None:
    n, q = 40_000, torch.zeros(1, 4, 40_000, 8, device="meta")
    p = prepare(scheme("alibi(steepness=1)"), q, q, q, range(n), range(n))
    with pytest.raises(UserError, match="too few bits"):
        plan_call(CallSpec.of(p), "alibi")
