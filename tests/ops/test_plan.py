"""The choice of kernels is a value: equal inputs give equal plans and equal bits, and `explain`
prints the plan that `attention` runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Dims, UserError, attention, explain, parse
from longitude.ops import plan as plans
from longitude.ops.explain import steps
from longitude.ops.inputs import prepare
from longitude.ops.kernels.launch import Device
from longitude.ops.lse_merge import OPERATORS, Forward, Operator, TileBatch
from longitude.ops.passes import Window
from longitude.ops.plan import AUTO, CallSpec, Kernel, Merge, Plan, make_plan, plan_call
from tests.grid import scheme

N = 640
LEAKY = "rope(remap=leaky_rerope(48, 4))"
H200 = Device("cuda", triton=True, cudnn=True)
FLASH4 = H200._replace(flash4=True)
OURS = H200._replace(hopper=True)
A100 = Device("cuda", triton=True)
TEXTS = {
    "rope()": Kernel.SDPA,
    "causal() + logn(64)": Kernel.SDPA,
    LEAKY: Kernel.CPU_FLASH,
    "rope(remap=dual_chunk(96, 24))": Kernel.CPU_FLASH,
    "rope() + window(64, sinks=4)": Kernel.CPU_FLASH,
    "rope(frequencies=stepped('yarn', original=128))": Kernel.CPU_FLASH,
    "alibi()": Kernel.SDPA_DIAGONALS,
    "rope() + shaw(8) + window(64)": Kernel.SDPA_DIAGONALS,
    "alibi() + window(64, sinks=4)": Kernel.SDPA_MASKED,
    "rope(remap=rerope(48)) + alibi()": Kernel.EAGER,
    "shaw(8, values=True)": Kernel.EAGER,
}


def inputs(rows: int = N) -> tuple[Any, ...]:
    q, k, v = torch.randn(3, 1, 2, N, 16, generator=torch.Generator().manual_seed(0))
    return q[:, :, N - rows :], k, v, range(N - rows, N), range(N)


def weights(text: str) -> dict[str, Tensor]:
    return scheme(text).init(Dims(32, 2, 16), torch.Generator().manual_seed(0))


def on(
    device: Device, text: str, n: int, heads: int = 16, d: int = 128,
    dtype: torch.dtype = torch.bfloat16, rows: int | None = None, **more: Any,
) -> CallSpec:  # fmt: skip
    """A call as that device would see it, without the device."""
    rows = rows or n
    q, k = (torch.empty(1, heads, t, d, dtype=dtype, device="meta") for t in (rows, n))
    own = scheme(text).init(Dims(heads * d, heads, d))
    gated = {"forget_sums": (q[..., 0], k[..., 0])} if scheme(text).gated else {}
    p = prepare(scheme(text), q, k, k, range(n - rows, n), range(n), own, **gated)
    return CallSpec.of(p)._replace(device=device, **more)


@pytest.mark.parametrize(
    ("text", "n", "reached"),
    [("alibi()", 8192, True), ("kerple_power()", 8192, True), ("kerple()", 8192, False),
     ("fire()", 8192, False), ("kerple() + alibi()", 8192, True), ("alibi()", 512, False),
     ("t5()", 8192, False)],
)  # fmt: skip
def test_keys_too_far_away_to_count_are_looked_for_where_there_may_be_some(
    text: str, n: int, reached: bool
) -> None:
    table = plan_call(on(H200, text, n)).steps[-1].table
    assert table is not None and table.reached == reached


@pytest.mark.parametrize("text", TEXTS)
def test_plans_on_a_cpu(text: str) -> None:
    plan = make_plan(prepare(scheme(text), *inputs(), weights(text)))
    assert {step.kernel for step in plan.steps} == {TEXTS[text]}
    assert (plan.merge is Merge.LSE) == (TEXTS[text] is Kernel.CPU_FLASH)
    assert make_plan(prepare(scheme(text), *inputs(), weights(text))) == plan
    assert explain(scheme(text), *inputs(), weights(text)).plan == plan
    none = make_plan(prepare(scheme(text), *inputs(0), weights(text)))
    assert none.steps == () and none.declined == {}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("rows", [N, 1])
def test_the_first_call_and_the_hundredth_give_the_same_bits(text: str, rows: int) -> None:
    call = (scheme(text), *inputs(rows), weights(text))
    first = attention(*call)
    for n in range(3):
        attention(scheme("rope()"), *inputs(rows + n if rows == 1 else rows))
    again = 99 if text == LEAKY and rows == 1 else 2
    assert all(torch.equal(attention(*call), first) for _ in range(again))


@pytest.mark.parametrize(
    ("call", "kernels", "backend"),
    [
        (on(H200, "rope()", 8192), [Kernel.SDPA], "native"),
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 8192), [Kernel.CUDNN, Kernel.BANDED], ""),
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 32768), [Kernel.CUDNN, Kernel.BANDED], ""),
        # a far tile too small for cuDNN's plan: our bands are faster than FlashAttention 2
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 8192, 2), [Kernel.BANDED], ""),
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 8192, 2, gradients=True),
         [Kernel.CUDNN, Kernel.BANDED], ""),
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 2048), [Kernel.BANDED], ""),
        (on(H200, "rope(remap=leaky_rerope(1024, 8))", 8192, d=192),
         [Kernel.FLASH, Kernel.BANDED], ""),
        (on(A100, "rope(remap=leaky_rerope(1024, 8))", 8192), [Kernel.FLASH, Kernel.BANDED], ""),
        (on(H200, "rope() + window(1024, sinks=4)", 8192), [Kernel.BANDED], ""),
        (on(H200, "t5()", 8192), [Kernel.CUDNN, Kernel.BANDED], ""),
        (on(H200, "t5()", 512), [Kernel.BANDED], ""),
        (on(H200, "alibi()", 8192), [Kernel.BANDED], ""),
        (on(Device("cuda", cudnn=True), "alibi()", 8192), [Kernel.SDPA_ALIBI], "alibi"),
        (on(H200, "alibi()", 8192, rows=8), [Kernel.FLEX], "flex"),
        (on(H200, "alibi()", 8192, rows=1), [Kernel.SDPA_MASKED], "native"),
        (on(H200, "fire()", 8192), [Kernel.BANDED], "banded"),
        (on(H200, "fire()", 512), [Kernel.FLEX], "flex"),
        (on(H200, "fire()", 8192, dtype=torch.float32), [Kernel.FLEX], "flex"),
        (on(H200, "fire() + alibi()", 8192), [Kernel.FLEX], "flex"),
        (on(H200, "forget()", 8192), [Kernel.SDPA], "native"),
        (on(H200, "forget() + window(1024)", 8192, d=64), [Kernel.FLASH], "native"),
        (on(H200, "forget() + rope(remap=rerope(512))", 8192), [Kernel.FLASH] * 2, "native"),
        (on(H200, "forget()", 8192, rows=8), [Kernel.FLEX], "flex"),
        (on(H200, "forget()", 8192, rows=1), [Kernel.SDPA_MASKED], "native"),
        (on(H200, "forget()", 8192, d=256), [Kernel.FLEX], "flex"),  # 272 fit into no kernel
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 8192), [Kernel.BANDED], "banded"),
        (on(H200, "rope(remap=dual_chunk(3072, 512))", 12800),
         [Kernel.CUDNN, Kernel.BANDED], "banded"),
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 32256), [Kernel.CUDNN] * 3, "native"),
        # a small model's tiles don't pay for a plan of every shape
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 32256, heads=9, d=64),
         [Kernel.CUDNN, Kernel.BANDED], "banded"),
        # neither of these fits cuDNN's tiles: heads too long, values of another size
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 32256, d=192),
         [Kernel.FLASH, Kernel.BANDED], "banded"),
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 32256, value_dim=64),
         [Kernel.BANDED], "banded"),
        (on(H200, "shaw(255)", 32768), [Kernel.CUDNN, Kernel.FLEX], "flex"),
        (on(H200, "shaw(255)", 2048), [Kernel.FLEX], "flex"),
        (on(H200, "shaw(255)", 32768, gradients=True), [Kernel.FLEX], "flex"),
        (on(H200, "deberta(256) + bidirectional()", 32768),
         [Kernel.CUDNN, Kernel.CUDNN, Kernel.FLEX], "flex"),
        (on(H200, "rope(remap=dual_chunk(4096, 512))", 10752, gradients=True),
         [Kernel.CUDNN] * 3, "native"),
        (on(H200, "rope(remap=dual_chunk(96, 24))", 640), [Kernel.FLASH] * 3, "native"),
        (on(H200, "rope(remap=leaky_rerope(48, 4))", 640, dtype=torch.float32),
         [Kernel.EFFICIENT, Kernel.EFFICIENT], "native"),
        (on(H200, "rope(remap=leaky_rerope(48, 4))", 640, rows=1), [Kernel.DECODE], "native"),
        (on(H200, "rope(remap=leaky_rerope(48, 4))", 640, rows=15), [Kernel.DECODE], "native"),
        (on(H200, "rope(remap=leaky_rerope(48, 4))", 640, rows=1, gradients=True),
         [Kernel.SDPA], "native"),
        (on(FLASH4, "rope()", 8192), [Kernel.FLASH4], "native"),
        (on(FLASH4, "rope()", 8192, gradients=True), [Kernel.SDPA], "native"),
        (on(FLASH4, "rope()", 2048), [Kernel.SDPA], "native"),
        (on(FLASH4, "rope(remap=leaky_rerope(1024, 8))", 8192, 32), [Kernel.FLASH4] * 2, "native"),
        (on(FLASH4, "rope(remap=leaky_rerope(1024, 8))", 8192, gradients=True),
         [Kernel.FLASH4] * 2, "native"),
        (on(FLASH4, "rope(remap=dual_chunk(4096, 512))", 32256), [Kernel.FLASH4] * 3, "native"),
        (on(FLASH4, "rope() + window(2048)", 16384), [Kernel.FLASH4], "native"),
        (on(FLASH4, "rope() + window(2048)", 32768, d=64), [Kernel.FLASH4], "native"),
        # sizes of heads that it was not tried with
        (on(FLASH4, "rope() + window(2048)", 32768, d=64, gradients=True), [Kernel.BANDED], ""),
        (on(FLASH4, "forget() + window(2048)", 32768, d=64), [Kernel.CUDNN], "native"),
        (on(FLASH4, "rope() + window(2048)", 32768, value_dim=64), [Kernel.BANDED], ""),
        (on(FLASH4, "rope(remap=streaming(4, 2044))", 65536), [Kernel.FLASH4] * 2, "native"),
        # what is too small for several calls
        (on(FLASH4, "rope(remap=streaming(4, 1020))", 8192), [Kernel.BANDED], ""),
        (on(FLASH4, "rope(remap=dual_chunk(1024, 128))", 8192),
         [Kernel.FLASH4, Kernel.BANDED], ""),
        (on(FLASH4, "rope(remap=dual_chunk(4096, 512))", 8192, 32), [Kernel.BANDED], ""),
        (on(FLASH4, "rope(remap=leaky_rerope(1024, 8))", 2048), [Kernel.BANDED], ""),
        (on(FLASH4, "rope(remap=leaky_rerope(1024, 8))", 8192, d=192),
         [Kernel.FLASH, Kernel.BANDED], ""),
        (on(FLASH4, "t5()", 8192), [Kernel.FLASH4, Kernel.BANDED], ""),
        (on(OURS, "rope()", 8192), [Kernel.BANDED], ""),
        (on(OURS, "rope()", 8192, gradients=True), [Kernel.SDPA], "native"),
        (on(OURS, "rope()", 8192, d=96), [Kernel.SDPA], "native"),
        (on(OURS, "rope()", 8192, value_dim=64), [Kernel.SDPA], "native"),
        (on(OURS, "rope()", 1024, heads=8), [Kernel.SDPA], "native"),  # too few rows
        (on(OURS, "rope(remap=leaky_rerope(1024, 8))", 8192), [Kernel.BANDS_TOGETHER], ""),
        (on(OURS, "rope() + window(1024, sinks=4)", 8192), [Kernel.BANDS_TOGETHER], ""),
        (on(OURS, "rope(remap=leaky_rerope(1024, 8))", 8192, gradients=True),
         [Kernel.CUDNN, Kernel.BANDED], ""),
        # which takes less memory than tiles of chunks, and no plan for each of them
        (on(OURS, "rope(remap=dual_chunk(4096, 512))", 64512), [Kernel.BANDED], ""),
        (on(OURS, "rope(remap=dual_chunk(4096, 512))", 132608), [Kernel.BANDED], ""),
        (on(OURS, "t5()", 8192), [Kernel.HOPPER, Kernel.BANDED], ""),
        (on(OURS, "shaw(255)", 32768), [Kernel.HOPPER, Kernel.FLEX], "flex"),
        (on(OURS._replace(flash4=True), "rope()", 32768), [Kernel.FLASH4], "native"),
        # bands of few pairs are faster in one launch of ours
        (on(OURS._replace(flash4=True), "rope() + window(1024, sinks=4)", 32768, 32),
         [Kernel.BANDS_TOGETHER], ""),
        (on(OURS._replace(flash4=True), "rope(remap=leaky_rerope(4096, 8))", 8192, 32),
         [Kernel.BANDS_TOGETHER], ""),
        (on(OURS._replace(flash4=True), "rope(remap=leaky_rerope(4096, 8))", 32768, 32),
         [Kernel.FLASH4, Kernel.FLASH4], "native"),
    ],
)  # fmt: skip
def test_plans_on_a_gpu(call: CallSpec, kernels: list[Kernel], backend: str) -> None:
    plan = plan_call(call)
    assert [step.kernel for step in plan.steps] == kernels
    assert plan.backend == (backend or "banded")


def test_gradients_of_what_one_launch_runs_forward() -> None:
    call = on(OURS, "rope(remap=leaky_rerope(1024, 8))", 8192, gradients=True)
    near = plan_call(call).steps[-1]
    assert [one.band for one in near.forward] == [(0, 1024), (1024, 8192)]
    assert not plan_call(call._replace(device=H200)).steps[-1].forward
    biased = on(OURS, "rope(remap=leaky_rerope(1024, 8)) + alibi()", 8192, gradients=True)
    assert not plan_call(biased).steps[-1].forward


def test_a_far_tile_and_its_near_band() -> None:
    plan = plan_call(on(H200, "rope(remap=leaky_rerope(1024, 8))", 8192))
    far, near = plan.steps
    assert (far.passes, far.tiles[0].height, far.tiles[0].kind) == ((1,), 7168, "lower")
    assert (near.passes, near.bands[0].band) == ((0,), (0, 1024))
    assert plan.merge is Merge.RUNNING_SOFTMAX
    assert steps(plan) == (
        "7,168 × 7,168 by cuDNN's attention, "
        "then 1 band by the banded kernel, in one running softmax"
    )


def by_formula(q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float) -> Forward:
    """Attention under FlashAttention 4's window, whose diagonal ends in the last row and column."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    left, right = causal if isinstance(causal, Window) else (None, 0 if causal else None)
    away = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    hidden = (away > (N if right is None else right)) | (away < -(N if left is None else left))
    scores = (scale * q @ k.mT).masked_fill(hidden, -torch.inf)
    return Forward(scores.softmax(-1) @ v, scores.logsumexp(-1))


def gradients_by_formula(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward, *how: Any
) -> Any:
    """Of a part of a softmax whose output and log-sum-exp are given."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse, _ = by_formula(*given, *how)
        weight = (lse - ran.lse).exp()[..., None]  # of this part in the whole
        shift = ((grad * (out - ran.out)).sum(-1, keepdim=True) * weight).detach()
        total = (grad * weight.detach() * out).sum() + (shift * lse[..., None]).sum()
        return torch.autograd.grad(total, given)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("rope()", N),
        (LEAKY, N),
        (LEAKY, 200),
        ("rope(remap=dual_chunk(96, 24))", N),
        ("rope() + window(100)", N),
    ],
)
def test_bands_as_windows_are_the_same_attention(
    text: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles and windows given to FlashAttention 4, run by the formula of its documentation."""
    monkeypatch.setattr(plans, "device_of", lambda _: FLASH4._replace(triton=False))
    monkeypatch.setattr(plans, "lse_kernel", lambda *_: Kernel.FLASH)
    monkeypatch.setattr(plans, "FLASH4_OPERATIONS", 0)
    monkeypatch.setattr(plans, "FLASH4_BANDS", 0)
    plan_call.cache_clear()
    operator = Operator(by_formula, gradients_by_formula, grouped=True)
    monkeypatch.setitem(OPERATORS, Kernel.FLASH4, operator)
    pos, rng = (range(N - rows, N), range(N)), torch.Generator().manual_seed(0)
    sizes = ((4, rows), (2, N), (2, N))
    q, k, v = (torch.randn(1, *size, 128, generator=rng, dtype=torch.float64) for size in sizes)
    given = [x.requires_grad_() for x in (q, k, v)]
    plan = make_plan(prepare(scheme(text), *(x.detach() for x in given), *pos))
    assert {step.kernel for step in plan.steps} == {Kernel.FLASH4}
    kinds = {t.kind for step in plan.steps for t in step.tiles}
    assert kinds == {"lower"} if text == "rope()" else "window" in kinds
    grad = torch.randn_like(q)
    made, want = (
        (out, *torch.autograd.grad(out, given, grad))
        for out in (attention(scheme(text), *given, *pos, backend=b) for b in ("native", "eager"))
    )
    for one, other in zip(made, want, strict=True):
        assert torch.allclose(one, other, atol=1e-11)
    with torch.no_grad():
        out = attention(scheme(text), *given, *pos, backend="native")
    assert torch.allclose(out, want[0], atol=1e-11)
    plan_call.cache_clear()


def test_calls_of_flash_attention_4_are_explained() -> None:
    assert steps(plan_call(on(FLASH4, "rope()", 8192))) == "one causal FlashAttention 4"
    assert steps(plan_call(on(FLASH4, "rope(remap=leaky_rerope(1024, 8))", 16384))) == (
        "2 tiles in 2 calls of FlashAttention 4, merged by their log-sum-exp"
    )


@pytest.mark.parametrize(
    ("text", "rows", "dtype", "passed_over"),
    [
        ("alibi()", N, torch.float32, "alibi"),  # whose sums round more than plain attention's
        ("alibi()", 8, torch.bfloat16, "banded alibi"),  # too few for its programs
        ("alibi()", 1, torch.bfloat16, "banded alibi flex"),
        ("rope()", N, torch.bfloat16, "banded alibi flex"),
        (LEAKY, N, torch.float32, "banded alibi flex"),
    ],
)
def test_every_backend_before_the_chosen_one_has_its_reason(
    text: str, rows: int, dtype: torch.dtype, passed_over: str
) -> None:
    for device in (H200._replace(triton=False), Device("cpu")):
        plan = plan_call(on(device, text, N, 2, 16, dtype, rows))
        assert [*plan.declined, plan.backend] == [*AUTO[: len(plan.declined) + 1]]
        if device.type == "cuda":
            assert set(passed_over.split()) <= set(plan.declined)


def test_explain_prints_why() -> None:
    told = explain(scheme("rope(remap=rerope(48)) + alibi()"), *inputs())
    assert told.backend == "eager" and "contiguous positions" in told.declined["native"]
    assert all(f"not {name}: {why}" in str(told) for name, why in told.declined.items())


@pytest.mark.parametrize("text", [t for t, k in TEXTS.items() if k is Kernel.CPU_FLASH])
def test_tiles_and_calls_are_those_that_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = re.search(r"(\d+) tiles in (\d+) calls", str(explain(scheme(text), *inputs())))
    assert said is not None
    batches: list[int] = []
    own, band = OPERATORS[Kernel.CPU_FLASH], TileBatch.band

    def along(part: TileBatch, *rest: Any) -> Any:
        batches.append(len(part.rows))
        return band(part, *rest)

    def counted(q: Tensor, *rest: Any) -> Forward:
        batches.append(q.shape[0])
        return own.forward(q, *rest)

    monkeypatch.setitem(OPERATORS, Kernel.CPU_FLASH, Operator(counted, own.backward))
    monkeypatch.setattr(TileBatch, "band", along)
    attention(scheme(text), *inputs())
    assert (sum(batches), len(batches)) == (int(said[1]), int(said[2]))


def test_it_prints_the_regions_as_they_are() -> None:
    near, far = explain(
        scheme("rope(remap=leaky_rerope(48, 4)) + window(500, sinks=4)"), *inputs()
    ).passes
    # a triangle of 48 rows, then 592 rows in blocks of 32, of which the last has 16
    assert near == "where 0 <= i-j < 48: 1 lower, 19 band"
    assert far.startswith("where 48 <= i-j < 500 or 500 <= i-j and j < 4, q at i/4 + 36, k at j/4")
    dual = str(explain(scheme("rope(remap=dual_chunk(96, 24))"), *inputs()))
    assert "q at min((i mod 72) + 72, 96), k at (j mod 72)" in dual
    assert "q at 96, k at (j mod 72)" in dual
    assert "⌊i/4⌋" in str(explain(scheme("rope(remap=self_extend(4, 48))"), *inputs()))
    assert "one causal scaled_dot_product_attention" in str(explain(scheme("rope()"), *inputs()))


def test_a_chosen_backend_is_explained_or_refused_as_attention_does() -> None:
    chosen = explain(scheme("rope()"), *inputs(), backend="eager")
    assert (chosen.backend, chosen.declined) == ("eager", {})
    with pytest.raises(UserError, match="native can't run"):
        explain(scheme("rope()"), *inputs(), backend="native", softcap=30.0)
    with pytest.raises(UserError, match="no backend is called 'quick'"):
        explain(scheme("rope()"), *inputs(), backend="quick")


def test_a_call_passes_few_modules() -> None:
    """From the arguments to the kernel: which modules of the package run code, once warm."""
    call = (parse("rope(remap=leaky_rerope(47, 5))"), *inputs())  # which no other test runs
    bare: Any = attention
    while hasattr(bare, "__wrapped__"):
        bare = bare.__wrapped__
    bare(*call)
    passed: set[str] = set()

    def watch(frame: Any, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("longitude."):
            passed.add(name)

    sys.setprofile(watch)
    try:
        bare(*call)
    finally:
        sys.setprofile(None)
    assert len(passed) <= 8, sorted(passed)


def test_plans_are_comparable() -> None:
    one, two = (plan_call(on(H200, LEAKY, n)) for n in (8192, 8192))
    assert one == two and plan_call(on(H200, LEAKY, 8193)) != one
    assert isinstance(one, Plan)


def test_calls_that_differ_in_values_alone_are_checked_once(monkeypatch: Any) -> None:
    """The layers of a forward share what follows from shapes; what is refused stays refused."""
    made: list[Any] = []
    module = sys.modules["longitude.ops.attention"]
    monkeypatch.setattr(module, "prepare", lambda *a, **b: made.append(a) or prepare(*a, **b))
    known, (q, *rest) = scheme("rope(remap=leaky_rerope(40, 4))"), inputs()
    for x in (q, 2 * q, q.flip(2)):
        expected = attention(known, x, *rest, backend="eager")
        torch.testing.assert_close(attention(known, x, *rest), expected, rtol=1e-4, atol=1e-5)
    assert len(made) == 1
    for option, value in (("dropout", 0), ("softcap", 1), ("length", 1)):
        attention(known, q, *rest, **{option: value})
        with pytest.raises(UserError):  # though False == 0, and True == 1
            attention(known, q, *rest, **{option: bool(value)})
    x = q.clone().requires_grad_()  # by another plan
    torch.testing.assert_close(attention(known, x, *rest), attention(known, q, *rest))
    short = inputs(8)[0], rest[0], rest[1], range(N - 8, N), range(N)
    expected = attention(known, *short, backend="eager")
    torch.testing.assert_close(attention(known, *short), expected, rtol=1e-4, atol=1e-5)
