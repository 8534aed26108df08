"""Windows stacked by the kernel are those stacked by torch: slices, one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longitude import attention, parse
from longitude.ops import lse_merge
from longitude.ops.lse_merge import stacked
from longitude.ops.passes import Windows

pytest.importorskip("triton")

from longitude.ops.kernels.merge import Blocks
from longitude.ops.kernels.merge import stack as by_kernel

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)


def slices(source: Windows, flipped: bool) -> Tensor:
    """(t·b h size d), slice by slice."""
    found = [source.x[:, :, s : s + source.size] for s in source.starts]
    return torch.cat([x.flip(2) if flipped else x for x in found])


SOURCES = st.tuples(
    st.integers(1, 4),  # heads
    st.integers(0, 3),  # the first start
    st.integers(-2, 6),  # the step
    st.integers(1, 7),  # rows of a window
    st.sampled_from(["heads first", "tokens first", "dimensions first"]),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(SOURCES, min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([1, 16, 80]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_windows_are_slices(
    sources: list[tuple[int, int, int, int, str]],
    b: int,
    count: int,
    d: int,
    dtype: torch.dtype,
    flipped: bool,
) -> None:
    made = []
    for seed, (h, start, step, size, layout) in enumerate(sources):
        starts = [4 + start + step * n for n in range(count)]
        x = drawn(b, h, max(starts) + size + 1, d, seed=seed, dtype=dtype)
        axes = {"tokens first": (1, 2), "dimensions first": (2, 3)}.get(layout, (0, 0))
        made.append(Windows(x.transpose(*axes).contiguous().transpose(*axes), starts, size))
    want = [slices(source, flipped) for source in made]
    for way in (stacked(made, flipped), by_kernel(made, flipped, blocks=Blocks(4, 1))):
        for got, exact in zip(way, want, strict=True):
            assert torch.equal(got, exact)


@pytest.mark.parametrize("b", [1, 2])
def test_attention_stacks_by_the_kernel_where_it_runs(
    b: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, n = parse("rope(remap=leaky_rerope(6, 2))"), 18
    q = drawn(b, 2, n, 16, seed=0).requires_grad_()
    k, v = (drawn(b, 1, n, 16, seed=seed).requires_grad_() for seed in (1, 2))

    def results() -> list[Tensor]:
        out = attention(s, q, k, v, range(n), range(n), backend="native")
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    want, calls = results(), []
    monkeypatch.setattr(lse_merge, "triton_available", lambda x: not calls.append(x))
    for got, exact in zip(results(), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert calls
