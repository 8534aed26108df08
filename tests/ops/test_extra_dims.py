"""Forget gates in extra head dimensions: as exact as plain attention, however large their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude import Dims, attention, explain
from longitude.ops.inputs import prepare
from longitude.ops.plan import Kernel, Merge, make_plan
from tests.grid import scheme

HEADS, D = 4, 16
MERGED = {
    "forget() + window(24)": Kernel.CPU_FLASH,
    "forget() + rope() + window(24, sinks=3)": Kernel.CPU_FLASH,
    "forget() + rope(remap=leaky_rerope(20, 4))": Kernel.CPU_FLASH,
    "forget() + rope(remap=dual_chunk(32, 8)) + logn(16)": Kernel.CPU_FLASH,
}
TEXTS = {"forget()": Kernel.SDPA, "forget() + rope()": Kernel.SDPA} | MERGED
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}


def call(
    n: int, m: int | None = None, *, kv_heads: int = HEADS, total: float = 40.0, d: int = D,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """q, k, v, and the sums and positions of n queries at the end of m tokens; the sums fall to
    -total, by steps of very different sizes."""
    rng, m = torch.Generator().manual_seed(0), m or n
    tensors = [
        torch.randn(2, heads, tokens, d, generator=rng).to(dtype)
        for heads, tokens in ((HEADS, n), (kv_heads, m), (kv_heads, m))
    ]
    steps = torch.rand(2, HEADS, m, generator=rng) ** 4
    sums = -(steps * total / steps.sum(-1, keepdim=True)).cumsum(-1)
    sums = sums.double() if dtype == torch.float64 else sums
    where = {"q_pos": range(m - n, m), "k_pos": range(m)}
    return tensors, where | {"forget_sums": (sums[..., m - n :], sums)}


def run(text: str, tensors: list[Tensor], options: dict[str, Any], backend: str) -> Tensor:
    weights = scheme(text).init(Dims(64, HEADS, D), torch.Generator().manual_seed(0))
    return attention(scheme(text), *tensors, weights=weights, backend=backend, **options)  # type: ignore[arg-type]


def exactly(text: str, tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    sums = tuple(x.double() for x in options["forget_sums"])
    return run(text, [x.double() for x in tensors], options | {"forget_sums": sums}, "eager")


def plan_of(text: str, tensors: list[Tensor], options: dict[str, Any]) -> Any:
    weights = scheme(text).init(Dims(64, HEADS, D), torch.Generator().manual_seed(0))
    return make_plan(prepare(scheme(text), *tensors, weights=weights, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("text", TEXTS)
def test_plain_kernels_add_the_sums(text: str, kv_heads: int, dtype: torch.dtype) -> None:
    for n, m, total in ((70, 70, 40.0), (40, 90, 2000.0)):
        tensors, options = call(n, m, kv_heads=kv_heads, dtype=dtype, total=total)
        plan = plan_of(text, tensors, options)
        assert plan.backend == "native" and plan.extra_dims
        assert n < m or {step.kernel for step in plan.steps} == {TEXTS[text]}
        got = run(text, tensors, options, "auto").double()
        assert (got - exactly(text, tensors, options)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("total", [5.0, 500.0, 50_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_that_of_plain_attention(dtype: torch.dtype, total: float) -> None:
    tensors, options = call(192, total=total, d=64, dtype=dtype)
    assert plan_of("forget()", tensors, options).extra_dims
    want = exactly("forget()", tensors, options)
    error = (run("forget()", tensors, options, "auto") - want).norm() / want.norm()
    q, k, v = tensors
    plain = sdpa(q.double(), k.double(), v.double(), is_causal=True)
    own = (sdpa(q, k, v, is_causal=True) - plain).norm() / plain.norm()
    assert error < 1.2 * own


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("text", TEXTS)
def test_gradients(text: str, kv_heads: int, sinks: bool) -> None:
    """Of q, k, v, the sums of queries and of keys, and the logits of sinks."""
    found = []
    for backend in ("eager", "native"):
        tensors, options = call(40, 50, kv_heads=kv_heads)
        sums = options["forget_sums"] = tuple(
            x.clone().requires_grad_() for x in options["forget_sums"]
        )
        leaves = [*(x.requires_grad_() for x in tensors), *sums]
        if sinks:
            options["sink_logits"] = torch.linspace(
                -1, 2, HEADS, dtype=torch.float64
            ).requires_grad_()
            leaves.append(options["sink_logits"])
        out = run(text, tensors, options, backend)
        rng = torch.Generator().manual_seed(1)
        to = torch.randn(out.shape, generator=rng, dtype=torch.float64)
        found.append(torch.autograd.grad(out, leaves, to))
        assert backend == "eager" or plan_of(text, tensors, options).extra_dims
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_gradients_in_bfloat16_are_as_exact_as_those_of_plain_keys() -> None:
    tensors, options = call(128, total=300.0, d=64, dtype=torch.bfloat16)
    to = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    found = []
    for wide in (True, False):
        q, k, v = ((x.double() if wide else x).detach().requires_grad_() for x in tensors)
        sums = options["forget_sums"][1]
        sums = (sums.double() if wide else sums).detach().requires_grad_()
        here = options | {"forget_sums": (sums, sums)}
        out = run("forget()", [q, k, v], here, "eager" if wide else "auto")
        found.append(torch.autograd.grad(out, (k, sums), to.to(out.dtype)))
    errors = [(b - a).norm() / a.norm() for a, b in zip(*found, strict=True)]
    assert found[1][1].dtype == torch.float32 and errors[1] < max(2 * errors[0], 1e-2)


@pytest.mark.parametrize(
    ("text", "n", "options"),
    [
        ("forget()", 20, {}),  # a mask costs less than longer keys
        ("forget()", 1, {}),
        ("forget() + rope(remap=rerope(9))", 1, {}),
        ("forget() + alibi()", 64, {}),
        ("forget() + window(8)", 64, {"dropout": 1e-9}),
        ("forget()", 64, {"key_padding": torch.arange(64).expand(2, -1) < 3}),
        ("forget()", 64, {"segments": torch.arange(64).expand(2, -1) // 20}),
        ("forget()", 64, {"softcap": 20.0}),
        ("forget()", 64, {"scale": -0.5}),
    ],
)
def test_the_rest_has_the_sums_in_scores(text: str, n: int, options: dict[str, Any]) -> None:
    tensors, more = call(n, 64)
    plan = plan_of(text, tensors, more | options)
    assert not plan.extra_dims and plan.steps[0].kernel in (Kernel.SDPA_MASKED, Kernel.EAGER)
    got, want = (run(text, tensors, more | options, backend) for backend in ("auto", "eager"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7 if "dropout" in options else 1e-12)


def test_few_queries_over_several_regions_are_tiles() -> None:
    tensors, options = call(3, 64)
    plan = plan_of("forget() + rope(remap=rerope(9))", tensors, options)
    assert plan.merge is Merge.LSE and plan.extra_dims
    got, want = (
        run("forget() + rope(remap=rerope(9))", tensors, options, b) for b in ("auto", "eager")
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_plan_is_told() -> None:
    tensors, options = call(64, dtype=torch.float32)
    weights = scheme("forget()").init(Dims(64, HEADS, D))
    text = str(explain("forget()", *tensors, weights=weights, **options))
    assert "the sums of forget gates in 4 extra head dimensions" in text
    assert "1 lower" in text
