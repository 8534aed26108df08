"""A few queries of every sequence in one launch, over the paged cache itself: what gathered keys
give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longitude import parse
from longitude.ops import decode
from longitude.ops.decode import Run, TableSpec, make_decode_plan
from longitude.ops.paged import paged_attention, plan_paged
from tests.grid import scheme
from tests.ops.kernels.test_decode import CLOSE, DEVICE, SCHEMES, off
from tests.ops.test_paged import Paged

pytest.importorskip("triton")

FEW = ((1, 40), (1, 29), (1, 1), (1, 33))
MIXED = ((1, 40), (20, 29), (3, 27), (0, 7), (1, 1), (16, 33))
SMALL = {"heads": (2, 1), "dtype": torch.float32, "device": DEVICE}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The kernel chosen on a CPU too, as on a GPU; the queries of each launch."""
    ran: list[tuple[int, ...]] = []
    run = decode.run_kernel

    def counted(s: Any, q: Any, *rest: Any, **where: Any) -> Any:
        ran.append(tuple(q.shape[:3]))
        return run(s, q, *rest, **where)

    monkeypatch.setattr(decode, "triton_available", lambda x: True)
    monkeypatch.setattr(decode, "run_kernel", counted)
    return ran


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_reads_scattered_blocks(name: str, launches: list[Any]) -> None:
    s, batch = scheme(SCHEMES[name]), Paged(FEW, **SMALL)
    assert off(batch.run(s, length=40), batch.expected(s, length=40)) < 2e-6
    assert launches == [(4, 2, 1)]


@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(8, 4))", "rope() + window(9, sinks=2)",
                                  "rope(remap=rerope(8)) + logn(4)"])  # fmt: skip
@pytest.mark.parametrize("layout", ["blocks", "heads first"])
def test_decoding_beside_chunks_of_a_prefill(text: str, layout: str, launches: list[Any]) -> None:
    """Sequences of 1, 3 and 16 queries share a launch; one of 20 is gathered."""
    s, batch = scheme(text), Paged(MIXED, layout=layout, **SMALL)
    sinks = torch.tensor([-1.0, 2.0], device=DEVICE) if layout == "blocks" else None
    want = batch.expected(s, scale=0.3, sink_logits=sinks)
    assert off(batch.run(s, scale=0.3, sink_logits=sinks), want) < 2e-6
    assert launches == [(4, 2, 16)]


@pytest.mark.parametrize(
    ("heads", "size", "block", "dtype"),
    [
        ((8, 2), 64, 16, torch.bfloat16),
        ((3, 3), 80, 24, torch.float16),  # a block that is no power of two
        ((4, 1), 128, 64, torch.bfloat16),
        ((6, 2), 20, 1, torch.float32),
    ],
)
def test_sizes_and_types(heads: tuple[int, int], size: int, block: int, dtype: Any) -> None:
    s = scheme("rope(remap=self_extend(5, 8))")
    batch = Paged(((2, 19), (2, 70)), dtype, heads=heads, size=size, device=DEVICE, block=block)
    assert off(batch.run(s), batch.expected(s)) < CLOSE[dtype]


def test_a_long_sequence_beside_short_ones_has_shares_of_one_size() -> None:
    s, lens = scheme("rope(remap=rerope(64))"), (8000, 100, 70, 30)
    spec = TableSpec(16, 1, torch.float32, torch.device("cpu"))
    lines = [(Run(0, 0, n),) for n in lens]
    plan = make_decode_plan(s, spec, lines, [(n - 1,) for n in lens], 16)
    assert plan is not None
    assert max(plan.blocks) < sum(plan.blocks) < 1.1 * max(plan.blocks)
    batch = Paged(((1, 200), (1, 9), (1, 17)), **SMALL)
    assert off(batch.run(s), batch.expected(s)) < 2e-6


def test_a_plan_serves_every_layer_and_says_why_not(launches: list[Any]) -> None:
    s, batch = scheme("rope()"), Paged(FEW, **SMALL)
    given = (batch.q, batch.key_cache, batch.value_cache, batch.table, batch.starts, batch.lens)
    plan = plan_paged(s, *given)
    assert plan.decoded is not None and not plan.gathered and plan.declined is None
    for _ in range(2):
        out = torch.empty_like(batch.q)
        assert paged_attention(s, *given, plan=plan, out=out) is out
        assert off(out, batch.expected(s)) < 2e-6
    assert len(launches) == 2
    reasons = {
        "alibi()": "scores must be q·k alone",
        "rope() + ssmax()": "must follow from their positions",
        "rope(frequencies=dynamic_linear(8))": "one length for all",
    }
    for text, why in reasons.items():
        one = parse(text)
        plan = plan_paged(one, *given)  # type: ignore[arg-type]
        assert plan.decoded is None and len(plan.gathered) == 4 and why in (plan.declined or "")
    assert "soft-capping" in (plan_paged(s, *given, softcap=5.0).declined or "")
    assert plan_paged(s, batch.q.double(), *given[1:]).decoded is None


def test_sequences_of_many_bands_step_through_their_own_only() -> None:
    """Stepped frequencies: each sequence lies in another band, and has one segment, not all."""
    s = scheme("rope(frequencies=stepped('yarn', original=8))")
    batch = Paged(((1, 9), (1, 18), (1, 30), (1, 61)), **SMALL)
    assert off(batch.run(s), batch.expected(s)) < 2e-6
    plan = plan_paged(
        s, batch.q, batch.key_cache, batch.value_cache, batch.table, batch.starts, batch.lens
    )
    assert plan.decoded is not None and plan.decoded.plan.segments == 1


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("alone", "block"), [(False, 16), (True, 8), (True, 16), (True, 64)])
@pytest.mark.parametrize("text", [
    "rope()", "rope(remap=rerope(4096))", "rope(remap=leaky_rerope(4096, 8))",
    "rope(remap=self_extend(8, 2048))", "rope(remap=dual_chunk(3072, 1024))",
    "rope(remap=streaming(4, 4096))", "rope(frequencies=yarn(4, original=8192))",
])  # fmt: skip
def test_at_length(text: str, alone: bool, block: int) -> None:
    """Unequal sequences, decoding beside chunks of a prefill or alone (by single warps, where
    their blocks of keys lie in one page each): as near as the type lets it be."""
    s, few = scheme(text), ((1, 50_000), (1, 17), (1, 16_001))
    mixed = ((1, 32768), (1, 131_072), (5, 9000), (300, 20_000), (1, 17))
    batch = Paged(few if alone else mixed, torch.bfloat16, heads=(32, 8), size=128, block=block,
                  device="cuda")  # fmt: skip
    got, want = batch.run(s).double(), batch.expected(s).double()
    for start, stop in zip(batch.starts, batch.starts[1:], strict=False):
        wanted = want[start:stop]
        assert float((got[start:stop] - wanted).norm() / wanted.norm()) < 8e-3
