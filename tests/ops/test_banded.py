"""Bands in one running softmax are the scheme's own attention, with every gradient: by the
reference, on a CPU. And the gradients of windows by other kernels are those of the band."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Dims, attention
from longitude.ops import bands
from longitude.ops.banded import bias_of, run, window_backward_flash, window_backward_tiles
from longitude.ops.bands import (
    BandCall,
    plan_banded,
    plan_bands,
    reach_of,
)
from longitude.ops.gpu_operators import laid_like
from longitude.ops.inputs import AttentionInputs, prepare
from longitude.ops.kernels.launch import Device
from longitude.ops.lse_merge import OPERATORS, GradientSum
from longitude.ops.plan import Band, CallSpec, Kernel, Plan, plan_call
from tests.grid import scheme
from tests.ops.references import REFERENCE, band_backward_reference, band_reference

T5 = "t5(buckets=8, max_distance=6)"
HEADS, KV, D = 4, 2, 16
# the scheme, queries, keys; how many pieces, and whether the far end is a plain tile
CASES = [
    (T5, 40, 40, 1, False),
    (T5, 60, 60, 1, True),
    (T5, 60, 110, 1, False),  # its far end is a rectangle and a triangle
    (T5, 60, 60, 1, True),
    (f"rope() + {T5}", 60, 60, 1, True),
    (f"{T5} + window(20)", 60, 60, 1, False),
    (f"{T5} + window(20, sinks=3)", 60, 60, 2, False),
    ("t5(buckets=8, max_distance=6, bidirectional=True) + bidirectional()", 60, 60, 1, True),
    ("t5(buckets=8, max_distance=6, bidirectional=True) + bidirectional()", 30, 20, 1, False),
    ("alibi()", 40, 40, 1, False),
    ("alibi(future=2, offset=1) + bidirectional()", 30, 40, 1, False),
    ("kerple_log()", 40, 40, 1, False),
    ("rope() + kerple_power()", 40, 50, 1, False),
    ("sandwich(dim=16) + logn(16)", 40, 40, 1, False),
    ("rope(remap=leaky_rerope(6, 3)) + alibi()", 40, 40, 2, False),
    (f"rope(remap=rerope(6)) + {T5} + alibi()", 40, 40, 2, False),
    (f"rope(remap=rerope(6)) + {T5}", 60, 60, 2, False),
    ("alibi()", 1, 40, 1, False),
    ("rope(remap=leaky_rerope(6, 3))", 40, 40, 1, True),
    (
        "rope(remap=leaky_rerope(6, 3))",
        20,
        60,
        2,
        False,
    ),  # its far end is a rectangle and a triangle
    ("rope(remap=self_extend(3, 6)) + logn(16)", 40, 40, 1, True),
    ("rope(remap=leaky_rerope(30, 3))", 40, 40, 2, False),  # too small a tile for its own launch
    ("rope() + window(12)", 40, 40, 1, False),
    ("rope() + window(12, sinks=3)", 40, 40, 2, False),
    ("window(12, sinks=3)", 40, 40, 2, False),  # nothing is rotated
    ("rope(remap=streaming(3, 12))", 40, 40, 2, False),
    ("rope(remap=lm_infinite(12, 3))", 40, 40, 2, False),
    ("rope(remap=dual_chunk(12, 4))", 40, 40, 3, True),
    ("rope(remap=dual_chunk(12, 4))", 45, 45, 3, True),  # its last chunk is cut short
    ("rope(remap=dual_chunk(12, 4))", 20, 50, 3, False),
]


def inputs(
    text: str, n: int, m: int, sinks: bool
) -> tuple[list[Tensor], dict[str, Tensor], Tensor | None]:
    rng = torch.Generator().manual_seed(0)
    made = [
        torch.randn(2, heads, tokens, D, generator=rng, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((HEADS, n), (KV, m), (KV, m))
    ]
    own = scheme(text).init(Dims(HEADS * D, HEADS, D), rng)
    weights = {name: w.double().requires_grad_() for name, w in own.items()}
    logits = torch.randn(HEADS, generator=rng, dtype=torch.float64, requires_grad=True)
    return made, weights, logits if sinks else None


def inputs_of(text: str, n: int, m: int, x: list[Tensor], weights: Any, **options: Any) -> Any:
    rows = range(m - n, m) if m > n else range(n)
    return prepare(scheme(text), x[0], x[1], x[2], rows, range(m), weights, **options)


def banded(p: AttentionInputs, far_tile_rows: int = 16) -> tuple[Plan, Tensor]:
    plan = plan_bands(CallSpec.of(p), far_tile_rows)
    return plan, run(p, plan, REFERENCE)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("text", "n", "m", "pieces", "far"), CASES)
def test_bands_are_the_scheme(
    text: str, n: int, m: int, pieces: int, far: bool, sinks: bool
) -> None:
    x, weights, logits = inputs(text, n, m, sinks)
    p = inputs_of(text, n, m, x, weights, sink_logits=logits)
    plan, out = banded(p)
    assert (len(plan.steps[-1].bands), len(plan.steps) == 2) == (pieces, far)
    leaves = [*x, *weights.values(), *([] if logits is None else [logits])]
    seed = torch.randn(2, HEADS, n, D, generator=torch.Generator().manual_seed(1)).double()
    want = attention(p.scheme, *x, p.q_pos, p.k_pos, weights, sink_logits=logits, backend="eager")
    results = [[y, *torch.autograd.grad((y * seed).sum(), leaves)] for y in (out, want)]
    assert out.dtype == torch.float64
    with torch.no_grad():  # here q and k are rotated band by band
        torch.testing.assert_close(banded(p)[1], results[0][0], rtol=1e-12, atol=1e-12)
    for mine, its in zip(*results, strict=True):  # the table itself is float32
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("text", "n", "m"), [one[:3] for one in CASES if one[3] > 1 and not scheme(one[0]).bias]
)
def test_bands_in_one_launch_are_the_scheme(text: str, n: int, m: int, sinks: bool) -> None:
    """Each over its own rows and columns, written over queries that were rotated."""
    x, _, logits = inputs(text, n, m, sinks)
    kept = [y.detach().clone() for y in x]
    with torch.no_grad():
        p = inputs_of(text, n, m, x, {}, sink_logits=logits)
        plan = plan_bands(CallSpec.of(p), 10**6)
        together = replace(plan.steps[-1], kernel=Kernel.BANDS_TOGETHER)
        assert len(together.bands) > 1 and len(plan.steps) == 1
        out = run(p, replace(plan, steps=(together,)), REFERENCE)
    want = attention(p.scheme, *kept, p.q_pos, p.k_pos, sink_logits=logits, backend="eager")
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x, kept, rtol=0, atol=0)


def test_a_far_tile_by_our_kernel_has_all_rows() -> None:
    x, weights, logits = inputs(f"rope() + {T5}", 60, 60, True)
    p = inputs_of(f"rope() + {T5}", 60, 60, x, weights, sink_logits=logits)
    far, near = plan_bands(CallSpec.of(p), 16).steps
    starts = []

    def noting(call: BandCall, start: bands.Start | None) -> Any:
        starts.append(start)
        return band_reference(call, start)

    kernels = REFERENCE._replace(forward=noting)
    with torch.no_grad():
        out = run(p, Plan("banded", (replace(far, kernel=Kernel.HOPPER), near)), kernels)
    want = attention(p.scheme, *x, p.q_pos, p.k_pos, weights, sink_logits=logits, backend="eager")
    torch.testing.assert_close(out, want, rtol=2e-6, atol=2e-6)
    assert starts[0] is None and starts[1].out.shape == out.shape and starts[1].top == 0


def test_gradients_of_bands_that_ran_in_one_launch() -> None:
    text, n = "rope(remap=leaky_rerope(8, 3))", 40
    x, weights, logits = inputs(text, n, n, True)
    p = inputs_of(text, n, n, x, weights, sink_logits=logits)
    call = CallSpec.of(p)
    far, near = plan_bands(call, 16).steps
    (ahead,) = plan_bands(call._replace(gradients=False), 1000).steps
    assert ahead.bands[1][1::3] == ((0, n - 8), 8)  # the columns and rows of the far tile
    plan = Plan("banded", (far, replace(near, forward=ahead.bands)))
    its = attention(p.scheme, *x, p.q_pos, p.k_pos, sink_logits=logits, backend="eager")
    outs = (run(p, plan, REFERENCE), its)
    both = [[out, *torch.autograd.grad(out.square().sum(), [*x, logits])] for out in outs]
    torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)


def test_outputs_lie_as_those_of_torch() -> None:
    """Whose plans of cuDNN's backward are kept by the strides of q, k and v alone."""
    q = torch.randn(2, 4, 6, 8)
    for like in (q, q.transpose(1, 2), q[:, :, 2:5], q.transpose(1, 2)[:, :, 1:], q[:1, :, :, :4]):
        for axes in ((0, 1, 2, 3), (2, 1, 0, 3), (0, 2, 1, 3)):
            back = [axes.index(axis) for axis in range(4)]
            x = torch.randn_like(like).permute(axes).contiguous().permute(back)
            made = laid_like(x, like)
            assert made.stride() == torch.empty_like(like).stride() and torch.equal(made, x)
    assert laid_like(q, q).data_ptr() == q.data_ptr()


@pytest.mark.parametrize("far", [False, True])
def test_a_window_differentiated_by_tiles(far: bool) -> None:
    text, n = "rope(remap=leaky_rerope(8, 3))", 40
    x, weights, logits = inputs(text, n, n, True)
    p = inputs_of(text, n, n, x, weights, sink_logits=logits)
    plan = plan_bands(CallSpec.of(p), 16 if far else 1000)
    assert len(plan.steps) == 1 + far
    *first, near = plan.steps
    by_tiles = tuple(
        b._replace(backward=Kernel.CPU_FLASH) if b.band == (0, 8) else b for b in near.bands
    )
    assert by_tiles != near.bands
    mine = run(p, replace(plan, steps=(*first, replace(near, bands=by_tiles))), REFERENCE)
    its = attention(p.scheme, *x, p.q_pos, p.k_pos, sink_logits=logits, backend="eager")
    both = [torch.autograd.grad(out.square().sum(), [*x, logits]) for out in (mine, its)]
    torch.testing.assert_close(both[0], both[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("q_pos", "k_pos"), [((100, 130), (0, 50)), ((40, 70), (20, 50))])
def test_queries_far_from_their_keys(q_pos: tuple[int, int], k_pos: tuple[int, int]) -> None:
    x, weights, _ = inputs(T5, 30, q_pos[1] - q_pos[0] + 20, False)
    x = [x[0], *(t[:, :, : k_pos[1] - k_pos[0]] for t in x[1:])]
    rows, columns = range(*q_pos), range(*k_pos)
    p = prepare(scheme(T5), x[0], x[1], x[2], rows, columns, weights)
    mine, its = banded(p)[1], attention(p.scheme, *x, rows, columns, weights, backend="eager")
    torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)
    both = [torch.autograd.grad(out.square().sum(), [*weights.values()]) for out in (mine, its)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-5)


def test_reach_changes_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "REACH_QUERIES", 8)
    n, text = 200, "alibi(steepness=4)"
    x, weights, _ = inputs(text, n, n, False)
    p = inputs_of(text, n, n, x, weights)
    plan, out = banded(p)
    table = plan.steps[0].table
    assert table is not None and table.reached
    call = BandCall(x[0], x[1], x[2], bias_of(p, table), Band(0, n), p.scale)
    reach = reach_of(call)
    assert reach is not None and bool((reach < n).any())
    want = attention(p.scheme, *x, p.q_pos, p.k_pos, backend="eager")
    for mine, its in zip(
        (out, *torch.autograd.grad(out.sum(), x)),
        (want, *torch.autograd.grad(want.sum(), x)),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("rope()", {}, "Triton kernel"),
        ("rope(remap=dual_chunk(6, 2))", {}, "multiples of 128"),
        ("rope(remap=dual_chunk(512, 128))", {}, "no backward for chunks"),
        ("rope(frequencies=stepped('yarn', original=4))", {}, "a range of rows"),
        ("fire()", {}, "1,024 queries in half precision"),
        ("shaw(4)", {}, "biases that depend on the distance"),
        ("transformer_xl()", {}, "biases that depend on the distance"),
        ("deberta(8) + bidirectional()", {}, "biases that depend on the distance"),
        ("alibi()", {"key_padding": torch.zeros(2, 12, dtype=torch.bool)}, "contiguous"),
        ("alibi()", {"softcap": 5.0}, "soft-capping"),
        ("alibi()", {"dropout": 0.1}, "dropout"),
        ("rope(remap=dual_chunk(6, 2)) + alibi()", {}, "no bias with them"),
        ("alibi()", {}, "Triton kernel"),
    ],
)
def test_what_bands_do_not_run(text: str, options: dict[str, Any], why: str) -> None:
    x, weights, _ = inputs(text, 12, 12, False)
    reason = plan_banded(CallSpec.of(inputs_of(text, 12, 12, x, weights, **options)))
    assert isinstance(reason, str) and why in reason


def test_what_a_kernel_could_not_read_is_declined() -> None:
    x, weights, _ = inputs("alibi()", 12, 12, False)
    gpu = Device("cuda", triton=True)
    call = CallSpec.of(inputs_of("alibi()", 12, 12, x, weights))._replace(device=gpu)
    assert "float16" in str(plan_banded(call))
    call = call._replace(dtype=torch.float32)
    assert isinstance(plan_banded(call), Plan)
    assert "above zero" in str(plan_banded(call._replace(positive_scale=False)))
    assert "heads of up to" in str(plan_banded(call._replace(head_dim=320)))


def test_a_table_is_memoised_where_nothing_is_learned() -> None:
    x, weights, _ = inputs(T5, 60, 60, False)
    tables = []
    for text, own in (("alibi()", {}), (T5, weights)):
        p = inputs_of(text, 60, 60, x, own)
        span = plan_bands(CallSpec.of(p)).steps[-1].table
        assert span is not None
        with torch.no_grad():
            tables.append([bias_of(p, span).table for _ in range(2)])
    assert tables[0][0] is tables[0][1] and tables[1][0] is not tables[1][1]
    weights["t5.table"].data[0, 0] += 1.0  # behind autograd's back
    changed = bias_of(p, span).table
    assert changed.requires_grad and not torch.equal(changed, tables[1][0])
    ones = [torch.ones(1, HEADS, 61, D, requires_grad=True) for _ in range(3)]
    with torch.inference_mode():
        inside = banded(inputs_of("alibi()", 61, 61, ones, {}))[1]
    assert inside.is_inference()
    torch.testing.assert_close(banded(inputs_of("alibi()", 61, 61, ones, {}))[1], inside)


# windows, whose gradients other kernels than ours compute
LAYOUTS = [False, True]  # heads before tokens in memory, or tokens before heads
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = Device("cuda", triton=True, cudnn=True)


def a_window(hi: int, n: int, dtype: torch.dtype, swapped: bool = False, heads=(6, 2)) -> BandCall:
    rng = torch.Generator().manual_seed(0)
    h, hkv = heads
    q, k, v = (torch.randn(2, one, n, 64, generator=rng).to(DEVICE, dtype) for one in (h, hkv, hkv))
    if swapped:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return BandCall(q, k, v, None, Band(0, hi), 0.125)


def in_a_larger_softmax(call: BandCall) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = band_reference(call._replace(band=Band(0, call.q.shape[2])))
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out), out, lse


def by_tiles(call: BandCall, *given: Any) -> list[Tensor]:
    """The gradients whose parts the tiles' are."""
    totals = [GradientSum(x) for x in call[:3]]
    for three in window_backward_tiles(call, *given):
        for total, part in zip(totals, three, strict=True):
            total.add(part)
    return [total.result() for total in totals]


@pytest.mark.parametrize("swapped", LAYOUTS)
@pytest.mark.parametrize(("hi", "n"), [(8, 16), (4, 20), (2, 6)])
def test_tiles_give_the_gradients_of_a_window(hi: int, n: int, swapped: bool) -> None:
    call = a_window(hi, n, torch.float32, swapped)
    call = call._replace(q=call.q.cpu(), k=call.k.cpu(), v=call.v.cpu())
    given = in_a_larger_softmax(call)
    made = by_tiles(call, *given, OPERATORS[Kernel.CPU_FLASH])
    for one, want in zip(made, band_backward_reference(call, *given)[:3], strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "n", "dtype", "backward"),
    [
        ("rope() + window(2048)", 4096, torch.bfloat16, Kernel.CUDNN),
        ("rope() + window(2048)", 5000, torch.bfloat16, Kernel.FLASH),  # no full blocks
        ("rope() + window(1024)", 4096, torch.bfloat16, Kernel.FLASH),  # too small for its launch
        ("rope() + window(2048)", 4096, torch.float32, Kernel.BANDED),
        ("rope() + window(64) + alibi()", 4096, torch.bfloat16, Kernel.BANDED),
    ],
)
def test_which_kernel_differentiates_a_window(
    text: str, n: int, dtype: torch.dtype, backward: Kernel
) -> None:
    x = [torch.empty(1, 16, n, 64, dtype=dtype, device="meta") for _ in range(3)]
    call = CallSpec.of(prepare(scheme(text), *x, range(n), range(n)))
    plan = plan_call(call._replace(device=H200, gradients=True), "banded")
    assert plan.steps[-1].bands[0].backward is backward


def on_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.accelerator(skip(test))


@on_gpu
@pytest.mark.parametrize("swapped", LAYOUTS)
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_cudnn_gives_the_gradients_of_a_window(swapped: bool, heads: tuple[int, int]) -> None:
    call = a_window(2048, 6144, torch.bfloat16, swapped, heads)
    grad, out, lse = in_a_larger_softmax(call)
    if swapped:
        grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    made = by_tiles(call, grad, out, lse, OPERATORS[Kernel.CUDNN])
    for one, want in zip(made, band_backward_reference(call, grad, out, lse)[:3], strict=True):
        assert (one.float() - want).norm() < 1e-2 * want.norm()


@on_gpu
@pytest.mark.parametrize(("hi", "n"), [(1, 40), (100, 300), (300, 300), (128, 1024)])
def test_flash_gives_the_gradients_of_a_window(hi: int, n: int) -> None:
    call = a_window(hi, n, torch.bfloat16)
    grad, out, lse = in_a_larger_softmax(call)
    want = band_backward_reference(call, grad, out, lse)
    made = window_backward_flash(call, grad.transpose(1, 2).contiguous().transpose(1, 2), out, lse)
    for one, exact in zip(made, want[:3], strict=True):
        assert (one.float() - exact).norm() < 1e-2 * exact.norm()


@on_gpu
@pytest.mark.parametrize("text", ["rope(remap=rerope(512))", "rope(remap=dual_chunk(1536, 512))"])
def test_values_that_were_expanded_over_heads_get_the_gradients_of_copies(text: str) -> None:
    n, rng = 8192, torch.Generator("cuda").manual_seed(0)
    draw = {"generator": rng, "device": "cuda", "dtype": torch.bfloat16}
    q, grad = (torch.randn(1, 16, n, 128, **draw) for _ in range(2))
    k, v = (torch.randn(1, 1, n, 128, **draw).requires_grad_() for _ in range(2))
    found = []
    for copied in (False, True):
        wide = [x.expand(-1, 16, -1, -1) for x in (k, v)]
        wide = [x.contiguous() for x in wide] if copied else wide
        out = attention(scheme(text), q, *wide, range(n), range(n))
        found.append(torch.autograd.grad(out, (k, v), grad))
    for one, want in zip(*found, strict=True):
        assert (one - want).float().norm() < 1e-3 * want.float().norm()
