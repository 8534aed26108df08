"""The kernel that turns q and k together is `turn`, whatever the shapes, strides and types."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longitude import UserError, attention, parse
from longitude.ops import banded, passes
from longitude.ops.bands import plan_bands
from longitude.ops.inputs import prepare
from longitude.ops.plan import CallSpec, Kernel, Plan
from longitude.parts.rope import Pairs, apply_rotary
from longitude.parts.rotary_tables import Tables, cos_sin
from tests.ops.references import REFERENCE

triton = pytest.importorskip("triton")

from longitude.ops.kernels import rope as kernels  # noqa: E402
from longitude.ops.kernels.rope import Blocks, Twice, blocks_for, chunks_of, rotate_qk  # noqa: E402

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Triton's interpreter cuts numbers off where a GPU rounds them: one place is lost either way
CLOSE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)


def tables_for(x: Tensor, half: int, batch: int, seed: int) -> Tables:
    """Tables of no rotation in particular: a gain or decay scales them."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = drawn(2, batch, 1, x.shape[2], half, seed=seed, dtype=dtype)
    return cos, sin


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers, laid out in memory as they come from elsewhere."""
    if layout == "tokens first":  # a projection's output, heads taken apart
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "dimensions first":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "cut out":  # aligned nowhere
        wide = torch.zeros(*(n + 2 for n in x.shape), dtype=x.dtype, device=x.device)
        wide[1:-1, 1:-1, 1:-1, 1:-1] = x
        return wide[1:-1, 1:-1, 1:-1, 1:-1]
    return x.contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = "half") -> Tensor:
    """One tensor by the kernel."""
    return rotate_qk(x, x, (cos, sin), (cos, sin), pairs)[0]


def exactly(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """The formula, pair by pair, in float64."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    out, half = x.clone(), cos.shape[-1]
    for t in range(half):
        one, two = (t, t + half) if pairs == "half" else (2 * t, 2 * t + 1)
        out[..., one] = x[..., one] * cos[..., t] - x[..., two] * sin[..., t]
        out[..., two] = x[..., two] * cos[..., t] + x[..., one] * sin[..., t]
    return out


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


LAYOUTS = ("plain", "tokens first", "dimensions first", "cut out")
SIZES = st.tuples(
    st.integers(1, 2),  # batch
    st.integers(1, 2),  # heads of keys
    st.integers(1, 3),  # queries in a group
    st.integers(0, 19),  # tokens of q
    st.integers(0, 19),  # and of k
)
DIMS = st.sampled_from([(16, 8), (64, 32), (80, 40), (96, 16), (20, 3), (128, 64), (256, 128)])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    SIZES,
    DIMS,
    st.sampled_from(["half", "adjacent"]),
    st.sampled_from(DTYPES),
    st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    st.tuples(st.booleans(), st.booleans()),
)
def test_kernel_is_the_formula(
    sizes: tuple[int, ...],
    dims: tuple[int, int],
    pairs: Pairs,
    dtype: torch.dtype,
    layouts: tuple[str, str],
    own: tuple[bool, bool],
) -> None:
    b, hkv, group, nq, nk = sizes
    d, half = dims
    q = laid(drawn(b, hkv * group, nq, d, seed=0, dtype=dtype), layouts[0])
    k = laid(drawn(b, hkv, nk, d, seed=1, dtype=dtype), layouts[1])
    q_tables = tables_for(q, half, b if own[0] else 1, seed=2)
    k_tables = tables_for(k, half, b if own[1] else 1, seed=3)
    got = rotate_qk(q, k, q_tables, k_tables, pairs)
    for x, made, tables in zip((q, k), got, (q_tables, k_tables), strict=True):
        close(made, exactly(x, *tables, pairs), dtype)
        close(made, apply_rotary(x, *tables, pairs), dtype)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    SIZES,
    st.sampled_from([(16, 8), (80, 40), (96, 16), (20, 3), (128, 64)]),
    st.sampled_from(["half", "adjacent"]),
    st.sampled_from((torch.bfloat16, torch.float64)),
    st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.tuples(st.booleans(), st.booleans()),
)
def test_some_tokens_by_other_tables_as_well(
    sizes: tuple[int, ...], dims: tuple[int, int], pairs: Pairs, dtype: torch.dtype,
    layouts: tuple[str, str], ends: tuple[float, ...], own: tuple[bool, bool],
) -> None:  # fmt: skip
    b, hkv, group, nq, nk = sizes
    xs = [
        laid(drawn(b, h, n, dims[0], seed=h, dtype=dtype), layout)
        for h, n, layout in zip((hkv * group, hkv), (nq, nk), layouts, strict=True)
    ]
    starts = [int(x.shape[2] * min(two)) for x, two in zip(xs, (ends[:2], ends[2:]), strict=True)]
    stops = [int(x.shape[2] * max(two)) for x, two in zip(xs, (ends[:2], ends[2:]), strict=True)]
    cut = [x[:, :, a:z] for x, a, z in zip(xs, starts, stops, strict=True)]
    near = [tables_for(x, dims[1], b if own[0] else 1, seed=2) for x in xs]
    far = [tables_for(x, dims[1], b if own[1] else 1, seed=3) for x in cut]
    by_both = Twice((*near[0], *near[1]), (*far[0], *far[1]), (starts[0], starts[1]), pairs)
    with pytest.MonkeyPatch.context() as patch:
        if "dimensions first" not in layouts:  # which the kernel does not read
            patch.setattr(kernels, "rotate_qk", None)
        both = by_both(*xs)
    for made, tokens, tables in zip(both, (xs, cut), (near, far), strict=True):
        for got, x, of_x in zip(made, tokens, tables, strict=True):
            close(got, exactly(x, *of_x, pairs), dtype)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_gradients_turn_back_to_any_order(pairs: Pairs) -> None:
    q, k = drawn(1, 2, 3, 10, seed=0), drawn(1, 1, 4, 10, seed=1)
    tables = tables_for(q, 3, 1, seed=2), tables_for(k, 3, 1, seed=3)
    xs = (q.requires_grad_(), k.requires_grad_())
    blocks = Blocks(4, 2, 4)

    def kernel(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_qk(q, k, *tables, pairs, blocks=blocks)

    want = [apply_rotary(x, *own, pairs).square().sum() for x, own in zip(xs, tables, strict=True)]
    made = [y.square().sum() for y in kernel(q, k)]
    for got, exact in zip(
        torch.autograd.grad(sum(made), xs), torch.autograd.grad(sum(want), xs), strict=True
    ):
        torch.testing.assert_close(got, exact)
    assert torch.autograd.gradcheck(kernel, xs, fast_mode=True)
    assert torch.autograd.gradgradcheck(kernel, xs, fast_mode=True)


def test_the_gradient_of_one_side_alone() -> None:
    q, k = drawn(1, 2, 5, 8, seed=0), drawn(1, 1, 7, 8, seed=1).requires_grad_()
    q_tables, k_tables = tables_for(q, 4, 1, seed=2), tables_for(k, 4, 1, seed=3)
    out = rotate_qk(q, k, q_tables, k_tables)
    (got,) = torch.autograd.grad(out[1].sum(), k)  # a gradient whose strides are all zero
    (want,) = torch.autograd.grad(apply_rotary(k, *k_tables).sum(), k)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("blocks", [(4, 1, 1), (2, 8, 4), (32, 1, 8), (16, 4, 4)])
def test_any_blocks_give_the_same(blocks: tuple[int, int, int]) -> None:
    q, k = drawn(2, 6, 9, 24, seed=0), drawn(2, 3, 21, 24, seed=1)
    tables = tables_for(q, 12, 1, seed=2), tables_for(k, 12, 2, seed=3)
    for x, own, got in zip(
        (q, k), tables, rotate_qk(q, k, *tables, blocks=Blocks(*blocks)), strict=True
    ):
        torch.testing.assert_close(got, apply_rotary(x, *own))


def test_long_tables_are_read_by_all_heads_in_turn() -> None:
    n, blocks = 11 * 1024 - 5, Blocks(1024, 2, 4)
    assert chunks_of(n, 1024, True, 512) == (6, 12)  # two times six runs of 1,024 tokens, one empty
    assert chunks_of(n, 1024, False, 512) == (1, 11)  # where all heads of a token lie together
    q, k = drawn(2, 3, n, 128, seed=0), drawn(2, 1, 5000, 128, seed=1)
    q, k = q.float(), k.float()
    tables = tables_for(q, 64, 1, seed=2), tables_for(k, 64, 2, seed=3)
    made = rotate_qk(q, k, *tables, blocks=blocks)
    for x, own, got in zip((q, k), tables, made, strict=True):
        close(got, apply_rotary(x, *own), torch.float32)


@pytest.mark.parametrize("start", [0, 1_000_000, 10_000_000, 2**31])
def test_angles_are_exact_at_any_position(start: int) -> None:
    from mpmath import mp

    n, d, s = 4, 8, parse("rope()")
    x = drawn(1, 1, n, d, seed=0, dtype=torch.float32)
    rope, at = s.rotary, range(start, start + n)
    how = {"dtype": torch.float32, "device": x.device}
    tables = cos_sin(rope, rope.regions()[0], "k", at, d, 1, **how)  # type: ignore[union-attr]
    got = rotate(x, *tables)
    mp.dps = 40
    for i in range(n):
        for t in range(d // 2):
            angle = (start + i) * mp.mpf(10000) ** (mp.mpf(-2 * t) / d)
            a, b = float(x[0, 0, i, t]), float(x[0, 0, i, t + d // 2])
            want = float(a * mp.cos(angle) - b * mp.sin(angle))
            assert abs(float(got[0, 0, i, t]) - want) < 1e-6 + start * 1e-15


def test_attention_turns_by_the_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    s = parse("rope(fraction=0.5, pairs='adjacent', remap=leaky_rerope(4, 2))")
    q, k = (
        drawn(1, 4, 9, 16, seed=0, dtype=torch.float32),
        drawn(1, 2, 9, 16, seed=1, dtype=torch.float32),
    )
    want = attention(s, q, k, k, range(9), range(9))
    calls = []
    monkeypatch.setattr(passes, "triton_available", lambda x: not calls.append(x))
    got = attention(s, q, k, k, range(9), range(9))
    assert len(calls) == 2  # a pass near, a pass far
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("text", ["leaky_rerope(6, 3)", "rerope(6)", "self_extend(3, 6)"])
@pytest.mark.parametrize(("n", "m"), [(40, 40), (20, 60)])
def test_both_bands_of_a_remap_are_rotated_in_one_launch(
    text: str, n: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = parse(f"rope(remap={text}) + logn(16)")
    x = drawn(2, 4, n, 16, seed=0), drawn(2, 2, m, 16, seed=1), drawn(2, 2, m, 16, seed=2)
    pos = range(m - n, m), range(m)
    want = attention(s, *x, *pos, backend="eager")
    for module in (passes, banded):
        monkeypatch.setattr(module, "triton_available", lambda device: True)
    monkeypatch.setattr(kernels, "rotate_qk", None)
    p = prepare(s, *x, *pos)
    (step,) = plan_bands(CallSpec.of(p), 10**6).steps
    plan = Plan("banded", (replace(step, kernel=Kernel.BANDS_TOGETHER),))
    torch.testing.assert_close(banded.run(p, plan, REFERENCE), want, rtol=1e-12, atol=1e-12)


def test_tables_laid_in_memory_in_any_way() -> None:
    x = drawn(2, 3, 5, 8, seed=0)
    cos, sin = tables_for(x, 4, 2, seed=1)
    want = apply_rotary(x, cos, sin)
    for other in (laid(sin, "dimensions first"), laid(sin, "cut out"), laid(sin, "tokens first")):
        torch.testing.assert_close(rotate(x, cos, other), want)
        torch.testing.assert_close(rotate(x, other, cos), apply_rotary(x, sin, cos))
    one = tuple(t.expand(-1, -1, 5, -1) for t in (cos[:, :, :1], sin[:, :, :1]))
    torch.testing.assert_close(rotate(x, *one), apply_rotary(x, *one))


def test_equal_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[str] = []
    made = passes.cos_sin
    monkeypatch.setattr(passes, "cos_sin", lambda *a, **b: sides.append(a[2]) or made(*a, **b))
    q, k = (drawn(1, h, n, 8, seed=0, dtype=torch.float32) for h, n in ((2, 6), (1, 9)))
    for text, nq, want in (
        ("rope()", 9, ["q"]),
        ("rope()", 6, ["q", "k"]),
        ("rope(frequencies=yarn(4, original=8))", 9, ["q", "k"]),  # queries carry a gain
        ("rope(remap=rerope(3))", 9, ["q", "q", "k"]),  # far away, they turn by different angles
    ):
        sides.clear()
        x = q if nq == 6 else k.expand(1, 2, 9, 8)
        attention(parse(text), x, k, k, range(9 - nq, 9), range(9), backend="native")
        assert sides == want, text


def test_mistakes_get_a_sentence() -> None:
    x = drawn(2, 2, 5, 8, seed=0)
    cos, sin = tables_for(x, 4, 1, seed=1)
    with pytest.raises(UserError, match="slice the tables to fit"):
        rotate_qk(x, x[:, :, :4], (cos, sin), (cos, sin))
    with pytest.raises(UserError, match="slice the tables to fit"):
        rotate(x[..., :6], cos, sin)


def test_blocks_fit_their_shapes() -> None:
    for heads in (1, 3, 32):
        for tokens in (0, 1, 5, 8192):
            for half in (1, 40, 64, 128):
                found = blocks_for([torch.Size((2, heads, tokens, 2 * half))], 2)
                assert all(n & (n - 1) == 0 and n > 0 for n in found)
                assert found.tokens * found.heads * triton.next_power_of_2(half) <= 2**13
