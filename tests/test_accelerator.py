"""On a GPU: the operators behind native, compiled flex with its gradients, and memory linear in
n."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Dims, Scheme, UserError, attention
from tests.grid import HEADS, scheme, schemes

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCHEMES = schemes()
FLEX = [
    "rope(remap=leaky_rerope(48, 4)) + logn(64)",
    "rope(pairs='adjacent') + window(64, sinks=4)",
    "rope(remap=dual_chunk(96, 24)) + bidirectional()",
    "alibi()",
    "t5(bidirectional=True) + bidirectional()",
    "kerple_log()",
    "sandwich(dim=16)",
    "shaw(16)",
    "deberta(64) + bidirectional()",
    "deberta(64, buckets=16) + bidirectional()",
    "transformer_xl(clamp=64)",
    "rope(pairs='adjacent', decay=xpos()) + ssmax()",
]


def inputs(n: int, heads: int, kv: int, dtype: torch.dtype, dim: int = 64) -> list[Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(2, h, n, dim, generator=rng, device="cuda", dtype=torch.float64).to(dtype)
        for h in (heads, kv, kv)
    ]


def weights(s: Scheme, dtype: torch.dtype, dim: int = 64) -> dict[str, Tensor]:
    made = s.init(Dims(4 * dim, HEADS, dim), torch.Generator().manual_seed(1))
    return {name: w.to("cuda", dtype) for name, w in made.items()}


def results(
    s: Scheme, n: int, dtype: torch.dtype, backend: Any, rounded: torch.dtype = torch.float64,
    **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The output and every gradient, as float64, with learned weights `rounded` to a dtype."""
    own = {name: w.to(dtype).requires_grad_() for name, w in weights(s, rounded).items()}
    x = [t.requires_grad_() for t in inputs(n, HEADS, 2, dtype)]
    out = attention(s, *x, range(n), range(n), own, backend=backend, **options)
    rng = torch.Generator("cuda").manual_seed(2)
    seed = torch.randn(out.shape, generator=rng, device="cuda", dtype=torch.float64)
    (out.double() * seed).sum().backward()
    grads = [t.grad for t in (*x, *own.values()) if t.grad is not None]
    return [t.detach().double() for t in (out, *grads)]


def far_apart(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """Relative errors; a gradient that is zero but for rounding counts against the largest."""
    least = max(float(y.norm()) for y in b) / 10
    return [float((x - y).norm() / y.norm().clamp(min=least)) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_native_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    s = SCHEMES[name]
    if s.rotary and hasattr(s.rotary.frequencies, "short"):
        pytest.skip("its factors are made for heads of 16")
    try:
        got = results(s, 200, dtype, "native", length=200)
    except UserError as why:
        assert str(why).endswith(".")
        return
    want = results(s, 200, torch.float64, "eager", dtype, length=200)
    if (
        dtype == torch.bfloat16
    ):  # the output and the gradients of q, k and v; weights are few numbers
        got, want = got[:4], want[:4]
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert max(far_apart(got, want)) < limit, far_apart(got, want)


@pytest.mark.parametrize("text", FLEX)
def test_compiled_flex_and_its_gradients(text: str) -> None:
    s = scheme(text)
    got = results(s, 256, torch.float32, "flex")
    want = results(s, 256, torch.float64, "eager")
    assert max(far_apart(got, want)) < 2e-5, far_apart(got, want)


def test_fire_runs_on_flex_and_refuses_its_gradient() -> None:
    s, n = scheme("fire()"), 256
    with torch.no_grad():
        x, own = inputs(n, HEADS, 2, torch.float32), weights(s, torch.float32)
        got = attention(s, *x, range(n), range(n), own, backend="flex").double()
        want = attention(s, *x, range(n), range(n), own, backend="eager").double()
    assert max(far_apart([got], [want])) < 2e-5
    with pytest.raises(UserError, match="can't differentiate"):
        results(s, n, torch.float32, "flex")


def test_compiled_flex_with_segments_padding_softcap_and_sinks() -> None:
    s, n = scheme("rope(remap=rerope(32)) + alibi()"), 256
    segments = (torch.arange(n, device="cuda") // 100)[None].expand(2, -1)
    padding = torch.zeros(2, n, dtype=torch.bool, device="cuda")
    padding[1, :40] = True
    options = {
        "segments": segments, "key_padding": padding, "softcap": 5.0,
        "sink_logits": torch.linspace(-1, 1, HEADS, device="cuda"),
    }  # fmt: skip
    got = results(s, n, torch.float32, "flex", **options)
    want = results(s, n, torch.float64, "eager", **options)
    assert max(far_apart(got, want)) < 2e-5, far_apart(got, want)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("rope(remap=leaky_rerope(1024, 8))", "native"),
        ("rope(remap=streaming(4, 1020))", "native"),
        ("alibi()", "flex"),
        ("t5()", "flex"),
    ],
)
def test_memory_is_linear(text: str, backend: Any) -> None:
    s, peaks = scheme(text), []
    own = weights(s, torch.bfloat16)
    for n in (8192, 16384, 32768):
        x = inputs(n, HEADS, 2, torch.bfloat16)
        attention(s, *x, range(n), range(n), own, backend=backend)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(s, *x, range(n), range(n), own, backend=backend)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del x
    assert peaks[2] < 2.2 * peaks[1] < 2.2 * 2.2 * peaks[0], peaks


def test_flex_compiles_once_a_scheme() -> None:
    from torch._dynamo.utils import counters

    s = scheme("t5()")
    for repeat in range(3):
        n, own = 384, weights(s, torch.bfloat16)
        attention(s, *inputs(n, HEADS, 2, torch.bfloat16), range(n), range(n), own, backend="flex")
        graphs = counters["stats"]["unique_graphs"] if repeat == 0 else graphs
    assert counters["stats"]["unique_graphs"] == graphs


def test_positions_far_out_stay_exact() -> None:
    n, start = 64, 9_999_900
    s, x = scheme("rope()"), inputs(64, HEADS, HEADS, torch.float32)
    here = attention(s, *x, range(n), range(n))
    there = attention(s, *x, range(start, start + n), range(start, start + n))
    assert float((here - there).abs().max()) < 2e-5
