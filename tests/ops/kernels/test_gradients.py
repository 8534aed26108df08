"""Parts of a gradient rotated back and added up by the kernel, by torch, and row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude import Dims, attention
from longitude.ops import lse_merge
from longitude.ops.banded import run
from longitude.ops.bands import plan_bands
from longitude.ops.inputs import prepare
from longitude.ops.lse_merge import GradientPart, GradientSum
from longitude.ops.plan import CallSpec, lse_kernel
from longitude.parts.rope import Pairs, apply_rotary
from tests.grid import scheme
from tests.ops.references import REFERENCE

pytest.importorskip("triton")

from longitude.ops.kernels import rope
from longitude.ops.kernels.gradients import MAX_PARTS, add_up
from longitude.ops.kernels.rope import Blocks

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts numbers off where a GPU rounds them: one place is lost either way
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYOUTS = ("heads first", "tokens first", "dimensions first")


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)


def laid(x: Tensor, layout: str) -> Tensor:
    axes = {"tokens first": (-3, -2), "dimensions first": (-2, -1)}.get(layout, (0, 0))
    return x.transpose(*axes).contiguous().transpose(*axes)


def exactly(parts: list[GradientPart], like: Tensor, pairs: Pairs) -> Tensor:
    """Window by window, row by row, in float64."""
    total = torch.zeros_like(like, dtype=torch.float64)
    for x, starts, flipped, tables in parts:
        for start, one in zip(starts, x.double(), strict=True):
            for r in range(one.shape[2]):
                row = start + (one.shape[2] - 1 - r if flipped else r)
                here, found = slice(row, row + 1), one[:, :, r : r + 1]
                if tables is not None:
                    cos, sin = (t[:, :, here].double() for t in tables)
                    found = apply_rotary(found, cos, -sin, pairs)
                total[:, :, here] += found
    return total


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=CLOSE[dtype], atol=2 * CLOSE[dtype])


PARTS = st.lists(
    st.tuples(
        st.integers(0, 7),  # rows of a window
        st.integers(0, 9),  # the first one's start
        st.integers(-2, 4),  # how far apart they are; less than 0: they overlap
        st.integers(1, 3),  # windows
        st.booleans(),  # flipped
        st.sampled_from([None, *CLOSE]),  # its type, if it is another than the sum's
        st.sampled_from(LAYOUTS),
        st.booleans(),  # whether each sequence has its own tables
    ),
    min_size=0,
    max_size=4,
)
DIMS = st.sampled_from([(16, 8), (128, 64), (80, 40), (20, 3), (24, 0), (128, 0)])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    PARTS,
    st.tuples(st.integers(1, 2), st.integers(1, 5)),
    DIMS,
    st.sampled_from(["half", "adjacent"]),
    st.sampled_from(list(CLOSE)),
    st.sampled_from(LAYOUTS),
)
def test_parts_added_up_together_or_one_by_one(
    given: list[tuple[Any, ...]],
    lanes: tuple[int, int],
    dims: tuple[int, int],
    pairs: Pairs,
    dtype: torch.dtype,
    layout: str,
) -> None:
    (b, h), (d, half), n = lanes, dims, 33
    parts = []
    for seed, (size, first, gap, count, flipped, own_dtype, own_layout, by_batch) in enumerate(
        given
    ):
        x = drawn(count, b, h, size, d, seed=seed, dtype=own_dtype or dtype)
        starts, tables = [first + t * max(1, size + gap) for t in range(count)], None
        if half:  # tables of no rotation in particular: a gain or decay scales them
            cos, sin = drawn(2, b if by_batch else 1, 1, n, half, seed=seed + 20)
            tables = cos, sin
        parts.append(GradientPart(laid(x, own_layout), starts, flipped, tables))
    like = laid(drawn(b, h, n, d, seed=50, dtype=dtype), layout)
    want = exactly(parts, like, pairs)
    for by_kernel in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lse_merge, "triton_available", lambda _, ran=by_kernel: ran)
            total = GradientSum(like, pairs)
            for part in parts:
                total.add(part)
            close(total.result(), want, dtype)


@pytest.mark.parametrize("blocks", [(4, 1, 1), (2, 8, 4), (64, 1, 2), (16, 4, 4)])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("chunk_bytes", [rope.CHUNK_BYTES, 5000])  # the second: of 16 tokens
def test_any_blocks_give_the_same(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int, int], layout: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr(rope, "CHUNK_BYTES", chunk_bytes)
    cos, sin = drawn(2, 2, 1, 21, 12, seed=0)
    given = [([0, 8], False), ([3], True), ([5, 11], True)]
    parts = [
        GradientPart(drawn(len(at), 2, 6, 6, 32, seed=seed), at, flipped, (cos, sin))
        for seed, (at, flipped) in enumerate(given)
    ]
    like = laid(drawn(2, 6, 21, 32, seed=9), layout)
    got = add_up(parts, like, "half", Blocks(*blocks))
    assert got.stride() == like.stride()
    close(got, exactly(parts, like, "half"), torch.float32)


def test_more_parts_than_one_launch_takes() -> None:
    like, (cos, sin) = (
        drawn(1, 3, 40, 16, seed=0, dtype=torch.bfloat16),
        drawn(2, 1, 1, 40, 8, seed=1),
    )
    parts = [
        GradientPart(drawn(1, 1, 3, 30, 16, seed=n), [n % 10], n % 2 == 0, (cos, sin))
        for n in range(2 * MAX_PARTS + 1)
    ]
    close(add_up(parts, like), exactly(parts, like, "half"), torch.bfloat16)


def test_a_gradient_that_is_there_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lse_merge, "triton_available", lambda _: True)
    x = drawn(1, 2, 3, 8, seed=0)
    total = GradientSum(x)
    total.add(GradientPart(x[None], [0]))
    assert total.result().data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("text", "tiles"),
    [
        ("rope(remap=leaky_rerope(8, 3))", True),  # triangles of both kinds and a far tile
        ("rope(fraction=0.5, pairs='adjacent', remap=self_extend(3, 8))", False),
        ("rope(remap=streaming(3, 8))", False),
        ("rope() + window(8, sinks=2)", False),
        ("window(8)", True),
        ("rope() + t5(buckets=8, max_distance=6)", False),
    ],
)
def test_gradients_of_bands(text: str, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, s, rng = 32, scheme(text), torch.Generator().manual_seed(0)
    x = [drawn(2, h, n, 16, seed=h + m).requires_grad_() for m, h in enumerate((4, 2, 2))]
    weights = {
        name: w.to(DEVICE).requires_grad_() for name, w in s.init(Dims(64, 4, 16), rng).items()
    }
    sinks, seed = drawn(4, seed=9).requires_grad_(), drawn(2, 4, n, 16, seed=10)
    leaves = [*x, *weights.values(), sinks]

    def results(backend: str) -> list[Tensor]:
        p = prepare(s, *x, range(n), range(n), weights, sink_logits=sinks)
        if backend == "eager":
            out = attention(s, *x, p.q_pos, p.k_pos, weights, sink_logits=sinks, backend="eager")
            return [out, *torch.autograd.grad((out * seed).sum(), leaves)]
        plan = plan_bands(CallSpec.of(p), 8)
        *far, near = plan.steps
        kernel = lse_kernel(DEVICE, torch.float32, 16) if tiles else None
        bands = [
            one._replace(backward=kernel) if kernel and one.band == (0, 8) else one
            for one in near.bands
        ]
        out = run(p, replace(plan, steps=(*far, replace(near, bands=tuple(bands)))), REFERENCE)
        return [out, *torch.autograd.grad((out * seed).sum(), leaves)]

    want, calls = results("eager"), []
    monkeypatch.setattr(lse_merge, "triton_available", lambda x: not calls.append(x))
    for mine, its in zip(results("banded"), want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=2e-5)
    assert calls


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize(
    "text",
    [
        "rope(remap=leaky_rerope(2048, 8))",
        "rope(fraction=0.5, pairs='adjacent', remap=self_extend(8, 2048))",
        "rope(remap=streaming(4, 2044))",
        "rope() + window(2048)",
        "window(1000)",
        "rope(remap=dual_chunk(1536, 512))",
    ],
)
def test_at_real_sizes(text: str, layout: str) -> None:
    n, results, at = 8192, [], (range(8192), range(8192))
    x = [drawn(2, h, n, 128, seed=s, dtype=torch.bfloat16) for s, h in enumerate((2, 1, 1, 2))]
    for dtype, backend in ((torch.bfloat16, "auto"), (torch.float64, "eager")):
        *qkv, grad = (laid(t, layout).to(dtype) for t in x)
        qkv = [t.requires_grad_() for t in qkv]
        out = attention(scheme(text), *qkv, *at, backend=backend)
        results.append(torch.autograd.grad(out, qkv, grad))
    for mine, its in zip(*results, strict=True):
        assert (mine - its).norm() < 1.2e-2 * its.norm()


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_gradients_do_not_depend_on_what_ran_before() -> None:
    """torch keeps cuDNN's plans by the strides of q, k and v: these calls share their shapes."""
    n, short = 8192, 6144
    made = [drawn(2, h, n, 128, seed=h, dtype=torch.bfloat16) for h in (4, 2, 3)]
    q, k, v = made[0], made[1], made[2][:, :2]
    grad = drawn(2, 4, n, 128, seed=9, dtype=torch.bfloat16)

    def gradients(text: str, tokens: int, layout: str) -> list[Tensor]:
        x = [laid(t[:, :, :tokens].contiguous(), layout).requires_grad_() for t in (q, k, v)]
        if text:
            out = attention(text, *x, range(tokens), range(tokens))
        else:  # anybody's attention over as many tokens as a far tile has
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = sdpa(*x, is_causal=True, enable_gqa=True)
        return list(torch.autograd.grad(out, x, grad[:, :, :tokens]))

    calls = [
        (text, short if not text else n, layout)
        for layout in LAYOUTS[:2]
        for text in ("rope(remap=rerope(2048))", "rope(remap=dual_chunk(1536, 512))", "")
    ]
    for text, tokens, layout in calls + calls[::-1]:
        wide = [t[:, :, :tokens].double().requires_grad_() for t in (q, k, v)]
        scheme = text or "causal()"
        want = attention(scheme, *wide, range(tokens), range(tokens), backend="eager")
        its = torch.autograd.grad(want, wide, grad[:, :, :tokens].double())
        for mine, exact in zip(gradients(text, tokens, layout), its, strict=True):
            assert (mine.double() - exact).norm() < 1e-2 * exact.norm(), (text, layout)
