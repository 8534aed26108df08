"""Biases of rows that go flat: far keys by plain tiles, near ones by flex, as one softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from longitude.core.part import Dims
from longitude.ops import bands, flex
from longitude.ops.attention import attention
from longitude.ops.inputs import prepare
from longitude.ops.plan import Kernel, make_plan, plan_call
from tests.grid import scheme

CALLS = {
    "all": (range(160), range(160)),
    "last": (range(60, 220), range(220)),
    "ahead": (range(20, 180), range(160)),
}
SCHEMES = (
    "shaw(7)", "shaw(7) + bidirectional()", "transformer_xl(clamp=9)",
    "transformer_xl(clamp=9) + bidirectional()", "deberta(8)", "deberta(8) + bidirectional()",
    "deberta(8, c2p=False)", "deberta(12, buckets=6, p2c=False) + bidirectional()",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _short_calls_have_far_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bands, "FAR_TILE_ROWS", 32)
    plan_call.cache_clear()
    yield
    plan_call.cache_clear()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("scratch", [flex.SCRATCH, 1])
def test_it_equals_the_score_matrix(
    text: str, call: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once, or those of a head of keys after another."""
    monkeypatch.setattr(flex, "SCRATCH", scratch)
    own_scheme, (q_pos, k_pos) = scheme(text), CALLS[call]
    rng = torch.Generator().manual_seed(0)
    own = {name: 3 * w.double() for name, w in own_scheme.init(Dims(32, 4, 8), rng).items()}
    q = torch.randn(2, 4, len(q_pos), 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, len(k_pos), 8, generator=rng, dtype=torch.float64)
    given = (own_scheme, q, k, v, q_pos, k_pos, own)
    steps = make_plan(prepare(*given), "flex").steps
    assert steps[-1].kernel is Kernel.FLEX and all(step.tiles for step in steps[:-1])
    assert len(steps) >= (3 if "bidirectional" in text else 2)
    for sinks in (None, torch.randn(4, generator=rng, dtype=torch.float64)):
        want = attention(*given, backend="eager", sink_logits=sinks)
        got = attention(*given, backend="flex", sink_logits=sinks)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("text", ["shaw(7)", "transformer_xl(clamp=9)", "deberta(8)"])
def test_our_kernels_far_tile_is_merged_unrounded(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Hopper GPU, by Triton's interpreter, which has no bfloat16."""
    pytest.importorskip("triton")
    from longitude.ops.kernels.merge import MergeTogether

    joined = []

    class Merging(MergeTogether):
        def add(self, part: Any) -> None:
            joined.append(part.out.dtype)
            super().add(part)

    monkeypatch.setattr(flex, "merging_for", Merging)
    rng, own_scheme, n = torch.Generator().manual_seed(0), scheme(text), range(160)
    own = {name: w.half() for name, w in own_scheme.init(Dims(32, 4, 16), rng).items()}
    q, k, v = (torch.randn(1, h, len(n), 16, generator=rng).half() for h in (4, 2, 2))
    steps = make_plan(prepare(own_scheme, q.float(), k.float(), v.float(), n, n, own), "flex").steps
    far = [replace(step, kernel=Kernel.HOPPER) for step in steps[:-1]]
    with torch.no_grad():
        got = flex._with_far_tiles(prepare(own_scheme, q, k, v, n, n, own), far)
    wide = {name: w.double() for name, w in own.items()}
    exact = (own_scheme, q.double(), k.double(), v.double(), n, n, wide)
    want = attention(*exact, backend="eager")
    assert joined == [torch.float32, torch.float16]
    assert float((got.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize(("text", "vectors"), [("shaw(7)", 8), ("shaw(7) + bidirectional()", 15)])
def test_causal_calls_multiply_by_no_vectors_of_keys_ahead(text: str, vectors: int) -> None:
    own_scheme, x = scheme(text), torch.zeros(1, 2, 40, 8)
    p = prepare(own_scheme, x, x, x, range(40), range(40), own_scheme.init(Dims(16, 2, 8), None))
    lookup: Any = flex._as_lookup(p.terms()["shaw"], p)
    assert lookup.rows.shape[-1] == vectors == lookup.query_bytes // 4


def test_products_of_half_precision_are_float32() -> None:
    """Rounded ones would add to each score's error as much as queries and keys themselves."""
    x, text = torch.randn(1, 2, 40, 8).bfloat16(), "transformer_xl(clamp=9)"
    own_scheme = scheme(text)
    own = {name: w.bfloat16() for name, w in own_scheme.init(Dims(16, 2, 8), None).items()}
    (term,) = prepare(own_scheme, x, x, x, range(40), range(40), own).terms().values()
    assert term.rows.dtype == torch.float32  # type: ignore[attr-defined]
    with torch.enable_grad():
        (term,) = (
            prepare(own_scheme, x.requires_grad_(), x, x, range(40), range(40), own)
            .terms()
            .values()
        )
        assert term.rows.dtype == torch.bfloat16  # type: ignore[attr-defined]
