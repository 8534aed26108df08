"""The banded kernel and its gradients match their reference: every band, head size and type."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longitude import Dims, attention, explain
from longitude.core.validate import UserError
from longitude.ops.bands import (
    SHARE_ERROR,
    SHARE_ROWS,
    BandCall,
    Bias,
    Shares,
    Start,
    reach_of,
)
from longitude.ops.plan import Band, Chunk
from longitude.parts.fire import Fire
from tests.grid import scheme
from tests.ops.references import band_backward_reference, band_reference

triton = pytest.importorskip("triton")

from longitude.ops.kernels.banded import Blocks, LaunchCall, banded, blocks_for  # noqa: E402
from longitude.ops.kernels.banded_backward import BlockPlan, backward  # noqa: E402
from longitude.ops.kernels.banded_backward import blocks_for as plan_for  # noqa: E402
from longitude.ops.kernels.fire import share_table  # noqa: E402
from longitude.ops.kernels.launch import device_of  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Blocks(32, 16, 4, 1)
PLAN = BlockPlan(SMALL, Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1))
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def _interpreted_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as whole numbers, and its dot multiplies them as such."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def wide(x: Any) -> np.ndarray:
        if x.data.dtype != np.uint16:
            return x.data
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(wide(a), wide(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


class Case(NamedTuple):
    """Sizes of a call: batch, query and key heads, rows, columns, head sizes, its band."""

    b: int
    h: int
    hkv: int
    n: int
    m: int
    d: int
    dv: int
    lo: int
    hi: int
    entries: int | None = None  # of the table, where it goes flat before the band ends
    dtype: torch.dtype = torch.float32
    biased: bool = True


CAUSAL, FAR = 0, 10**9
CASES = [
    Case(1, 2, 2, 34, 34, 16, 16, CAUSAL, FAR),
    Case(2, 2, 1, 19, 37, 32, 16, -FAR, FAR),  # full, odd lengths, values of another size
    Case(1, 2, 1, 50, 50, 16, 16, CAUSAL, 9),  # a window
    Case(1, 2, 1, 17, 49, 16, 16, -32, 20),  # queries that follow a cache
    Case(1, 1, 1, 50, 30, 16, 16, 3, 40),  # a far band: some rows see nothing
    Case(1, 1, 1, 40, 40, 16, 16, CAUSAL, FAR, entries=7),
    Case(1, 1, 1, 34, 34, 16, 16, 3, 30, entries=1),
    Case(1, 1, 1, 20, 20, 80, 96, CAUSAL, FAR),
    Case(1, 3, 1, 1, 1, 16, 16, CAUSAL, FAR),
    Case(1, 2, 1, 5, 9, 16, 16, 60, 120),  # nothing at all is visible
    Case(1, 2, 1, 24, 24, 16, 16, CAUSAL, FAR, dtype=torch.bfloat16),
    Case(1, 2, 1, 24, 24, 16, 16, CAUSAL, 9, dtype=torch.float16),
    Case(1, 1, 1, 16, 16, 256, 256, CAUSAL, FAR, dtype=torch.bfloat16),
    Case(1, 2, 1, 50, 50, 16, 16, CAUSAL, 9, biased=False),
    Case(1, 2, 1, 24, 40, 16, 16, -16, 9, dtype=torch.bfloat16, biased=False),
]


def part(case: Case, layout: str = "b h n d", seed: int = 0) -> BandCall:
    rng = torch.Generator().manual_seed(seed)

    def make(heads: int, tokens: int, size: int) -> Tensor:
        x = torch.randn(case.b, heads, tokens, size, generator=rng).to(DEVICE, case.dtype)
        if layout == "b n h d":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.mT.contiguous().mT if layout == "b h d n" else x

    first = max(case.lo, 1 - case.m)
    entries = case.entries or max(1, min(case.hi, case.n) - first)
    bias = Bias((2 * torch.randn(case.h, entries, generator=rng)).to(DEVICE), first)
    q, k = make(case.h, case.n, case.d), make(case.hkv, case.m, case.d)
    v = make(case.hkv, case.m, case.dv)
    return BandCall(q, k, v, bias if case.biased else None, Band(case.lo, case.hi), case.d**-0.5)


def double(p: BandCall) -> BandCall:
    bias = p.bias and Bias(p.bias.table.double(), p.bias.first)
    return BandCall(p.q.double(), p.k.double(), p.v.double(), bias, p.band, p.scale, chunk=p.chunk)


def far_apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_and_its_gradients_match_their_reference(case: Case) -> None:
    p = part(case)
    out, lse = banded(p, blocks=SMALL)
    want, want_lse = band_reference(double(p))
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    assert far_apart(out, want) < CLOSE[case.dtype]
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    got = backward(p, grad, out, lse, table=case.biased, plan=PLAN)
    wanted = band_backward_reference(double(p), grad.double(), out.double(), lse.double())
    for mine, its in zip(got[:3], wanted[:3], strict=True):
        assert far_apart(mine, its) < 2 * CLOSE[case.dtype]
    if p.bias is None:
        assert got.table is wanted.table is None
        return
    assert got.table is not None and wanted.table is not None
    said = p.bias.table.shape[1] - (case.entries is not None)  # the last holds on beyond
    assert far_apart(got.table[:, :said], wanted.table[:, :said]) < 2e-5


@pytest.mark.parametrize(("lo", "hi"), [(0, 1), (1, 2), (2, 2**20), (0, 3)])
@pytest.mark.parametrize(("row", "column", "m"), [(0, 0, 70), (64, 32, 100), (96, 17, 90)])
@pytest.mark.parametrize("within", [FAR, 64])
def test_chunks_are_cut_out_of_a_band(
    within: int, lo: int, hi: int, row: int, column: int, m: int
) -> None:
    at = row - column  # causal by positions
    p = part(Case(1, 1, 1, 70, m, 16, 16, -at, within - at, biased=False))
    p = p._replace(chunk=Chunk(32, lo, hi, row, column))
    out, lse = banded(p, blocks=SMALL)
    want, want_lse = band_reference(double(p))
    assert far_apart(out, want) < CLOSE[torch.float32]
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["b n h d", "b h d n"])
def test_any_layout_will_do(layout: str) -> None:
    p = part(Case(1, 2, 2, 17, 20, 32, 16, -3, 12), layout)
    assert not p.q.is_contiguous() and not p.k.is_contiguous()
    out, lse = banded(p, blocks=SMALL)
    want, _ = band_reference(double(p))
    assert far_apart(out, want) < 2e-6
    grad = torch.randn(1, 2, 16, 17, generator=torch.Generator().manual_seed(1)).to(DEVICE).mT
    got = backward(p, grad, out, lse, table=True, wide=True, plan=PLAN)
    wanted = band_backward_reference(double(p), grad.double(), out.double(), lse.double())
    for mine, its in zip(got, wanted, strict=True):
        assert mine is not None and its is not None and far_apart(mine, its) < 4e-6


@pytest.mark.parametrize("top", [0, 5])
def test_a_softmax_goes_on_where_another_ended(top: int) -> None:
    p = part(CASES[2])
    rng = torch.Generator().manual_seed(2)
    shape = (1, 2, p.q.shape[2] - top, 16)
    so_far, sums = torch.randn(shape, generator=rng), 3 * torch.randn(shape[:3], generator=rng)
    sums[:, :, 3] = -torch.inf
    start = Start(so_far.to(DEVICE), sums.to(DEVICE), top)
    want, want_lse = band_reference(double(p), Start(start.out.double(), start.lse.double(), top))
    out, lse = banded(p, start, blocks=SMALL)
    assert (out is start.out) == (top == 0)  # a start that has every row is written over
    assert far_apart(out, want) < 2e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "n", "d"), [(2, 40, 32), pytest.param(16, 2000, 128, marks=pytest.mark.accelerator)]
)
def test_a_wide_output_is_not_rounded(heads: int, n: int, d: int) -> None:
    sizes, half = (1, heads, heads // 2, n, n, d, d), torch.bfloat16
    p = part(Case(*sizes, CAUSAL, FAR, dtype=half, biased=False))
    (out, lse), (wide, same) = banded(p), banded(p, wide=True)
    assert wide.dtype == torch.float32 and torch.equal(lse, same)
    assert far_apart(wide, out) < CLOSE[half] and not torch.equal(wide, out.float())


@pytest.mark.parametrize("values", [16, 32], ids=["as queries", "wider"])
def test_nothing_is_made_but_outputs(values: int) -> None:
    p, made = part(Case(1, 2, 1, 40, 40, 16, values, CAUSAL, FAR)), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = f(*args, **(kwargs or {}))
            if "empty" in f.name() and out.numel():
                made.append(out.numel())
            return out

    with Watch():
        out, lse = banded(p, blocks=SMALL)
    assert made == [out.numel(), lse.untyped_storage().nbytes() // 4]


def alibi(n: int) -> BandCall:
    """Slopes so steep that most keys weigh nothing."""
    p = part(Case(1, 2, 1, n, n, 16, 16, CAUSAL, FAR))
    slopes = torch.tensor([[4.0], [0.02]], device=DEVICE)
    return p._replace(bias=Bias(-slopes * torch.arange(n, device=DEVICE), 0))


def test_keys_beyond_reach_are_not_read_and_not_missed() -> None:
    p = alibi(80)
    reach = reach_of(p)
    assert reach is not None and reach.shape == (1, 2)
    assert bool((reach[:, 0] < 40).all()) and bool((reach[:, 1] >= 80).all())
    v = p.v.clone()
    v[:, :, 0] = torch.nan  # who reads the first key can't hide it
    out, _ = banded(p._replace(reach=reach, v=v), blocks=SMALL)
    assert not out[:, 0, 64:].isnan().any() and out[:, 1, 64:].isnan().all()
    out, lse = banded(p._replace(reach=reach), blocks=SMALL)
    want, _ = band_reference(double(p))
    assert far_apart(out, want) < 2e-6
    grad = torch.ones_like(out)
    got = backward(p._replace(reach=reach), grad, out, lse, table=True, plan=PLAN)
    wanted = band_backward_reference(double(p), grad.double(), out.double(), lse.double())
    for mine, its in zip(got, wanted, strict=True):
        assert mine is not None and its is not None and far_apart(mine, its) < 4e-6


def test_no_reach_where_a_row_may_miss_its_nearest_key() -> None:
    assert reach_of(part(CASES[4])) is None
    assert reach_of(part(Case(1, 1, 1, 9, 5, 16, 16, 0, FAR))) is None


@pytest.mark.parametrize(
    ("n", "away", "threshold", "rows"),
    [(290, 0, 30, 32), (260, 0, 130, 32), (40, 4000, 30, 32), (290, 0, 30, 128)],
)
@pytest.mark.parametrize("steep", [1.0, 60.0])
def test_fire_by_its_table_of_shares(
    n: int, away: int, threshold: int, rows: int, steep: float
) -> None:
    """Block by block where a row can stand for those around it, of 128 or 64, else pair by pair."""
    own = scheme(f"fire(threshold={threshold})")
    p = part(Case(1, 2, 1, n, n + away, 16, 16, -away, FAR))
    weights = own.init(Dims(16, 2, 16), torch.Generator().manual_seed(1))
    weights = {name.removeprefix("fire."): w.to(DEVICE) for name, w in weights.items()}
    weights["outward"] *= steep
    q, k, here = range(away, away + n), range(away + n), torch.zeros(1, 1, device=DEVICE)
    wide = Blocks(rows, 256 if away else 128, 4, 1)  # the interpreter's time is by tile
    term = own.bias[0].term(p.q, p.k, here, here, weights, 1.0)
    table, pace, c, steepest = term.by_share(q, k, 0, SHARE_ROWS)  # type: ignore[attr-defined]
    exact = attention(
        own, p.q.double(), p.k.double(), p.v.double(), q, k,
        {f"fire.{name}": w.double() for name, w in weights.items()}, backend="eager",
    )  # fmt: skip
    outs = []
    for change in (steepest, steepest + 1e30):  # and never block by block
        bias = Bias(table, -away, shares=Shares(pace, c, change))
        outs.append(banded(p._replace(bias=bias), blocks=wide))
    (some, some_lse), (pairs, lse) = outs
    assert far_apart(pairs, exact) < steep * 2e-4 and far_apart(some, exact) < SHARE_ERROR
    i = torch.arange(n, device=DEVICE)
    stand_in, found = i.expand(2, n).clone(), torch.zeros(2, n, dtype=torch.bool, device=DEVICE)
    for size in (rows, 64) if rows > 64 else (rows,):
        first = i // size * size
        steady = (1 - pace[first + size] / pace[first]) * steepest[:, None] <= 2 * SHARE_ERROR
        stand_in = torch.where(steady & ~found, first + size // 2, stand_in)
        found |= steady
    r = torch.tensor([*q], device=DEVICE)[:, None] - torch.tensor([*k], device=DEVICE)
    content = p.q.double() @ p.k.double().mT.repeat_interleave(2, 1) * p.scale
    for row, got in ((stand_in, some_lse), (i.expand(2, n), lse)):
        entry = (torch.log2(1 + c * r.clamp(min=0)) * pace[row][..., None] + 0.5).long()
        entry = entry.clamp(max=table.shape[1] - 1)
        scores = content + table.gather(1, entry.flatten(1)).view_as(entry)
        want = scores.masked_fill(r < 0, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6 * steep)


@pytest.mark.parametrize(
    ("q", "k", "least", "c", "dtype"),
    [(range(90), range(90), 0, 0.1, torch.float32),
     (range(1060, 1100), range(1100), 0, -1e-6, torch.float32),
     (range(90), range(90), -89, 2.0, torch.bfloat16),
     (range(3, 7), range(-5, 7), 0, -1e-9, torch.float32)],
)  # fmt: skip
def test_fire_has_its_table_in_one_launch(
    q: range, k: range, least: int, c: float, dtype: torch.dtype
) -> None:
    """Against the reference in float64; heads lie apart in memory, as a slice's do."""
    part = Fire(hidden=5, threshold=20)
    weights = part.init(Dims(16, 3, 16), torch.Generator().manual_seed(1))
    weights |= {"c": torch.tensor(c), "multiplier": torch.tensor(-1.5)}
    weights = {name: x.to(DEVICE, dtype) for name, x in weights.items()}
    weights["outward"] = weights["outward"].repeat(1, 2)[:, :3]
    here = torch.zeros(1, 1, device=DEVICE)
    wide = {name: x.double() for name, x in weights.items()}
    x = torch.zeros(1, 3, 1, 16, device=DEVICE)
    term = part.term(x, x, here, here, wide, 1.0)
    want = term.by_share(q, k, least, SHARE_ROWS)  # type: ignore[attr-defined]
    table, shares = share_table(part, weights, q, k, least, SHARE_ROWS)
    for got, its, close in zip((table, *shares), want, (2e-6, 2e-6, 0, 1e-3), strict=True):
        torch.testing.assert_close(got.double(), its, rtol=close, atol=close)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"q": torch.zeros(1, 2, 40, 512, device=DEVICE)},
        {"v": torch.zeros(1, 2, 40, 16, device=DEVICE, dtype=torch.float16)},
        {"bias": Bias(torch.zeros(3, 4, device=DEVICE), 0)},
    ],
    ids=["scale", "head size", "types", "table"],
)
def test_what_it_can_not_run_is_said(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"but got .*: .*\.$"):
        banded(part(CASES[0])._replace(**change))


REAL = [(torch.bfloat16, 128, 8, 2), (torch.bfloat16, 64, 4, 4), (torch.float32, 64, 2, 1)]


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "d", "h", "hkv"), REAL)
@pytest.mark.parametrize("window", [FAR, 1000])
def test_at_real_sizes(dtype: torch.dtype, d: int, h: int, hkv: int, window: int) -> None:
    n = 4097
    p = part(Case(1, h, hkv, n, n, d, d, CAUSAL, window, dtype=dtype))
    out, lse = banded(p)
    want, _ = band_reference(double(p))
    assert far_apart(out, want) < CLOSE[dtype] / 2
    grad = torch.randn_like(out)
    got = backward(p, grad, out, lse, table=True)
    wanted = band_backward_reference(double(p), grad.double(), out.double(), lse.double())
    for mine, its in zip(got, wanted, strict=True):
        assert mine is not None and its is not None and far_apart(mine, its) < CLOSE[dtype]


BF16, FP16 = torch.bfloat16, torch.float16
LARGE = [  # enough rows for every multiprocessor
    Case(1, 16, 4, 1300, 1300, 128, 128, CAUSAL, FAR, dtype=BF16),
    Case(1, 16, 16, 1300, 1300, 128, 128, CAUSAL, FAR, dtype=BF16, biased=False),
    Case(2, 8, 2, 1290, 1500, 64, 64, -210, FAR, dtype=FP16),  # queries that follow a cache
    Case(2, 8, 4, 1290, 1500, 64, 64, -210, 90, dtype=BF16, biased=False),  # a window
    Case(1, 16, 4, 1300, 900, 128, 128, 3, 400, dtype=BF16),  # some rows see nothing
    Case(1, 24, 8, 1111, 777, 128, 128, -FAR, FAR, dtype=FP16),
    Case(1, 16, 8, 1300, 1300, 64, 64, CAUSAL, FAR, entries=33, dtype=BF16),
    Case(1, 16, 8, 1300, 1300, 128, 128, 128, 640, dtype=BF16, biased=False),
    Case(1, 16, 8, 2000, 60, 64, 64, -FAR, FAR, dtype=BF16),  # less than a tile of keys
]


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["b h n d", "b n h d"])
@pytest.mark.parametrize("begun", [None, 0, 500])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_specialised_warps_match_their_reference(
    case: Case, begun: int | None, layout: str
) -> None:
    from longitude.ops.kernels import hopper_launch

    if not device_of(torch.device(DEVICE)).hopper:
        pytest.skip("needs a Hopper GPU")
    p, start = part(case, layout, seed=3), None
    if begun is not None:
        rng = torch.Generator("cuda").manual_seed(4)
        shape = (case.b, case.h, case.n - begun, case.dv)
        sums = 3 * torch.randn(shape[:3], generator=rng, device=DEVICE)
        sums[:, :, 3] = -torch.inf
        so_far = torch.randn(shape, generator=rng, device=DEVICE).to(case.dtype)
        so_far[:, :, 3] = 0  # as rows stand that nothing was seen of
        start = Start(so_far, sums, begun)

    def again() -> Start | None:
        return start and Start(start.out.clone(), start.lse.clone(), start.top)

    exact_part = double(p)
    exact = start and Start(start.out.double(), start.lse.double(), start.top)
    want, want_lse = band_reference(exact_part, exact)
    first = None
    for _ in range(3):  # a race would show as other bits
        out, lse = banded(p, again())
        assert far_apart(out, want) < CLOSE[case.dtype] / 2
        torch.testing.assert_close(lse.double(), want_lse, rtol=2e-4, atol=2e-4)
        first = first or (out, lse)
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
    so_far = again() or Start(out, lse)
    outputs = (out, lse, *so_far[:2])
    assert hopper_launch.forward(LaunchCall.of(p), so_far, begun is not None, outputs)


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["b h n d", "b n h d"])
@pytest.mark.parametrize(("n", "m", "d"), [(2048, 2048, 128), (1500, 2777, 128), (1411, 1411, 64)])
@pytest.mark.parametrize(
    "text",
    ["rope(remap=leaky_rerope(300, 8))", "rope(remap=rerope(128)) + logn(512)",
     "rope(remap=self_extend(4, 512))", "rope() + window(700, sinks=4)",
     "rope(remap=streaming(4, 256))", "rope(remap=lm_infinite(1000, 10))"],
)  # fmt: skip
def test_specialised_warps_run_bands_together(
    text: str, n: int, m: int, d: int, layout: str
) -> None:
    if not device_of(torch.device(DEVICE)).hopper:
        pytest.skip("needs a Hopper GPU")
    rng = torch.Generator(DEVICE).manual_seed(n)
    q, k, v = (
        torch.randn(2, *((tokens, h) if layout == "b n h d" else (h, tokens)), d, generator=rng,
                    device=DEVICE, dtype=BF16)
        for tokens, h in ((n, 16), (m, 4), (m, 4))
    )  # fmt: skip
    q, k, v = (x.transpose(1, 2) if layout == "b n h d" else x for x in (q, k, v))
    call, kept = (range(m - n, m), range(m)), [x.clone() for x in (q, k, v)]
    assert "2 bands by warp-specialised" in str(explain(text, q, k, v, *call))
    want = attention(text, *(x.double() for x in (q, k, v)), *call, backend="eager")
    for _ in range(3):  # a race would show as other bits
        out = attention(text, q, k, v, *call)
        assert far_apart(out, want) < CLOSE[BF16] / 2
        assert torch.equal(out, attention(text, q, k, v, *call))
    odd = torch.empty(v.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(v.shape).copy_(v)
    assert torch.equal(out, attention(text, q, k, odd, *call))  # not aligned: copied
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True))


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("lo", "hi"), [(0, 1), (1, 2), (2, 2**20)])
@pytest.mark.parametrize(("row", "column", "m"), [(0, 0, 1400), (128, 32, 1500)])
def test_specialised_warps_run_chunks(lo: int, hi: int, row: int, column: int, m: int) -> None:
    at = row - column
    p = part(Case(1, 16, 4, 1400, m, 128, 128, -at, FAR, dtype=BF16, biased=False))
    p = p._replace(chunk=Chunk(384, lo, hi, row, column))
    out, lse = banded(p)
    want, want_lse = band_reference(double(p))
    assert far_apart(out, want) < CLOSE[BF16] / 2
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-4, atol=2e-4)


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("steep", [1.0, 60.0])
@pytest.mark.parametrize("threshold", [30, 2000])
def test_specialised_warps_run_fire(threshold: int, steep: float) -> None:
    own, n = scheme(f"fire(threshold={threshold})"), 3000
    p = part(Case(1, 16, 4, n, n, 128, 128, CAUSAL, FAR, dtype=BF16))
    weights = own.init(Dims(16, 16, 16), torch.Generator().manual_seed(1))
    weights = {name: w.to(DEVICE) for name, w in weights.items()}
    weights["fire.outward"] *= steep
    out = attention(own, p.q, p.k, p.v, range(n), range(n), weights, backend="banded")
    exact = attention(
        own, p.q.double(), p.k.double(), p.v.double(), range(n), range(n),
        {name: w.double() for name, w in weights.items()}, backend="eager",
    )  # fmt: skip
    assert far_apart(out, exact) < CLOSE[BF16]


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("n", [8192, 131072])
def test_sampled_rows_against_float64(n: int) -> None:
    p = part(Case(1, 4, 2, n, n, 128, 128, CAUSAL, FAR, dtype=torch.bfloat16))
    assert p.bias is not None
    out, _ = banded(p)
    rows = torch.linspace(0, n - 1, 256, device=DEVICE).long()
    k, v = (x.repeat_interleave(2, 1).double() for x in (p.k, p.v))
    away = rows[:, None] - torch.arange(n, device=DEVICE)
    scores = p.q[:, :, rows].double() @ k.mT * p.scale + p.bias.table[:, away.clamp(min=0)].double()
    want = scores.masked_fill(away < 0, -torch.inf).softmax(-1) @ v
    assert far_apart(out[:, :, rows], want) < 4e-3


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("hkv", [4, 2])
@pytest.mark.parametrize(
    "text",
    ["t5()", "alibi()", "kerple_log() + window(300, sinks=4)", "rope(remap=rerope(64)) + alibi()"],
)
def test_the_backend_on_a_gpu(text: str, hkv: int) -> None:
    s, n = scheme(text), 2048
    rng = torch.Generator().manual_seed(0)
    x = [
        torch.randn(1, h, n, 64, generator=rng).to(DEVICE, torch.bfloat16).requires_grad_()
        for h in (4, hkv, hkv)
    ]
    own = s.init(Dims(256, 4, 64), rng)
    weights = {name: w.to(DEVICE).requires_grad_() for name, w in own.items()}
    leaves, results = [*x, *weights.values()], []
    seed = torch.randn(1, 4, n, 64, generator=rng).to(DEVICE)
    for backend, dtype in (("banded", torch.bfloat16), ("eager", torch.float64)):
        given = {name: w.to(torch.promote_types(w.dtype, dtype)) for name, w in weights.items()}
        q, k, v = (t.to(dtype) for t in x)
        out = attention(s, q, k, v, range(n), range(n), given, backend=backend)  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad((out * seed).sum(), leaves)])
    for mine, its in zip(*results, strict=True):
        assert far_apart(mine.detach(), its.detach().double()) < 1.2e-2


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("text", ["t5()", "alibi()"])
def test_memory_is_linear(text: str) -> None:
    s, peaks = scheme(text), []
    own = s.init(Dims(256, 4, 64), torch.Generator().manual_seed(0))
    weights = {name: w.to(DEVICE) for name, w in own.items()}
    for n in (16384, 16384, 32768, 65536):  # the first also compiles
        q = torch.randn(1, 4, n, 64, device=DEVICE, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(s, q, q, q, range(n), range(n), weights, backend="banded")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[3] < 2.2 * peaks[2] < 2.2 * 2.2 * peaks[1], peaks


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_head_size_has_blocks(d: int, dtype: torch.dtype) -> None:
    x = torch.empty(1, 1, 1, d, dtype=dtype, device="meta")
    for one in (blocks_for(x, x), blocks_for(x, x, 128), *plan_for(x, x)):
        assert min(one.rows, one.columns) >= 16
        assert one.rows & (one.rows - 1) == 0 == one.columns & (one.columns - 1)
    assert plan_for(x, x).diagonals.rows == plan_for(x, x).diagonals.columns
