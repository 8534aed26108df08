"""Parts of a softmax joined by the kernel, by its twin, and by the softmax of all keys at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longitude import attention, parse
from longitude.ops import lse_merge
from longitude.ops.lse_merge import MergeOneByOne, TileOutput

pytest.importorskip("triton")

from longitude.ops.kernels.merge import Blocks, MergeTogether, blocks_for, merge

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(DEVICE, dtype)


def a_part(
    sizes: tuple[int, int, int, int], height: int, tops: list[int], flipped: bool, seed: int,
    dtype: torch.dtype,
) -> TileOutput:  # fmt: skip
    """A part as a kernel leaves it: rows outside heads in memory, some rows of weight nothing."""
    b, hkv, group, d = sizes
    out = drawn(len(tops), b, hkv, height, group, d, seed=seed, dtype=dtype).transpose(3, 4)
    lse = 3 * drawn(len(tops), b, hkv, group, height, seed=seed + 1)
    lse[drawn(*lse.shape, seed=seed + 2) > 1.5] = float("-inf")
    return TileOutput(out, lse, tops, flipped)


def exactly(
    parts: list[TileOutput], rows: tuple[int, int, int], d: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every row by itself, in float64: the softmax over its parts' log-sum-exps."""
    out, lse = torch.zeros(*rows, d).double(), torch.full(rows, float("-inf")).double()
    for b in range(rows[0]):
        for h in range(rows[1]):
            for row in range(rows[2]):
                found = list(covering(parts, b, h, row))
                if sinks is not None:
                    found.append((torch.zeros(d).double(), sinks[h].double().cpu()))
                weights = torch.stack([w for _, w in found]) if found else torch.zeros(0)
                if len(found) and weights.max() > float("-inf"):
                    lse[b, h, row] = weights.logsumexp(0)
                    shares = weights.softmax(0)
                    out[b, h, row] = sum(s * x for s, (x, _) in zip(shares, found, strict=True))
    return out, lse


def covering(parts: list[TileOutput], b: int, h: int, row: int) -> Iterator[tuple[Tensor, Tensor]]:
    for part in parts:
        height, group = part.out.shape[4], part.out.shape[3]
        for t, top in enumerate(part.tops):
            if top <= row < top + height:
                n = top + height - 1 - row if part.flipped else row - top
                at = (t, b, h // group, h % group, n)
                yield part.out[at].double().cpu(), part.lse[at].double().cpu()


PARTS = st.lists(
    st.tuples(
        st.integers(1, 7),  # rows of a window
        st.integers(0, 9),  # the first one's top
        st.integers(-2, 4),  # how far apart they are; less than 0: they overlap
        st.integers(1, 3),  # windows
        st.booleans(),  # flipped
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    PARTS,
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from([16, 80, 128]),
    st.sampled_from(list(CLOSE)),
    st.booleans(),
)
def test_parts_joined_together_or_one_by_one_are_one_softmax(
    drawn_parts: list[tuple[int, int, int, int, bool]],
    heads: tuple[int, int, int],
    d: int,
    dtype: torch.dtype,
    sink: bool,
) -> None:
    sizes = (*heads, d)
    parts = [
        a_part(sizes, height, [top + n * max(1, height + gap) for n in range(count)], flipped,
               10 * seed, dtype)
        for seed, (height, top, gap, count, flipped) in enumerate(drawn_parts)
    ]  # fmt: skip
    rows = (heads[0], heads[1] * heads[2], 1 + max(p.tops[-1] + p.out.shape[4] for p in parts))
    sinks = drawn(rows[1], seed=99) if sink else None
    like = parts[0].out
    want = exactly(parts, rows, d, sinks)
    for way in (MergeOneByOne(rows, like), MergeTogether(rows, like)):
        for part in parts:
            way.add(part)
        out, lse = way.result(sinks)
        assert out.dtype == dtype and out.shape == (*rows, d)
        torch.testing.assert_close(lse.double().cpu(), want[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            out.double().cpu(), want[0], rtol=CLOSE[dtype], atol=2 * CLOSE[dtype]
        )


def test_only_the_rows_of_the_span_are_written() -> None:
    part = a_part((1, 2, 1, 16), 3, [4], False, 0, torch.float32)
    out, lse = drawn(1, 2, 12, 16, seed=5), drawn(1, 2, 12, seed=6)
    before = out.clone(), lse.clone()
    merge([part], out, lse, span=(3, 8), running=(out, lse), blocks=Blocks(2, 1))
    outside = [0, 1, 2, 8, 9, 10, 11]
    assert torch.equal(out[:, :, outside], before[0][:, :, outside])
    assert torch.equal(lse[:, :, outside], before[1][:, :, outside])
    torch.testing.assert_close(out[:, :, 3], before[0][:, :, 3])  # it has no part there
    assert not torch.equal(out[:, :, 4:7], before[0][:, :, 4:7])


@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(4, 2))", "rope() + window(4, sinks=2)",
                                  "rope(remap=dual_chunk(8, 2))"])  # fmt: skip
def test_attention_joins_by_the_kernel_where_it_runs(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, n = parse(text), 19
    q = drawn(1, 2, n, 16, seed=0).requires_grad_()
    k, v = (drawn(1, 1, n, 16, seed=seed).requires_grad_() for seed in (1, 2))
    sinks = drawn(2, seed=3).requires_grad_()

    def results() -> list[Tensor]:
        out = attention(s, q, k, v, range(n), range(n), backend="native", sink_logits=sinks)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, sinks))]

    want, calls = results(), []
    monkeypatch.setattr(lse_merge, "triton_available", lambda x: not calls.append(x))
    for got, exact in zip(results(), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert calls


def test_blocks_fit_any_head() -> None:
    for d in (1, 16, 80, 128, 256):
        found = blocks_for(d)
        assert found.rows & (found.rows - 1) == 0 and 1 <= found.rows * d <= 2048
