"""Bands in a chain are the scheme's own attention, with every gradient: by the twin, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Dims, attention
from longitude.ops import banded
from longitude.ops import swa_cudnn as paved
from longitude.ops.aten import CPU
from longitude.ops.band import TWIN, Gradients, Part, Start, Way, eager, reach_of
from longitude.ops.inputs import AttentionInputs, prepare
from longitude.ops.kernels import launch as available
from longitude.ops.rented import Rent
from tests.grid import scheme

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
    ("rope(remap=streaming(3, 12))", 40, 40, 2, False),
    ("rope(remap=lm_infinite(12, 3))", 40, 40, 2, False),
    ("rope(remap=dual_chunk(12, 4))", 40, 40, 3, False),
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


def problem(
    text: str, n: int, m: int, x: list[Tensor], weights: Any, **options: Any
) -> AttentionInputs:
    plain: dict[str, Any] = {"scale": None, "segments": None, "length": None}
    return prepare(
        scheme(text), x[0], x[1], x[2], range(m - n, m) if m > n else range(n), range(m), weights,
        **(plain | options),
    )  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("text", "n", "m", "pieces", "far"), CASES)
def test_a_chain_of_bands(
    text: str, n: int, m: int, pieces: int, far: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banded, "LARGE", 16)
    banded._plain.cache_clear()
    x, weights, logits = inputs(text, n, m, sinks)
    p = problem(text, n, m, x, weights, sink_logits=logits)
    plan = banded.plan_of(p)
    assert (len(plan.pieces), plan.far is not None) == (pieces, far)
    leaves = [*x, *weights.values(), *([] if logits is None else [logits])]
    seed = torch.randn(2, HEADS, n, D, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for out in (
        banded.run(p),
        attention(p.scheme, *x, p.q_pos, p.k_pos, weights, sink_logits=logits, backend="eager"),
    ):
        assert out.dtype == torch.float64
        results.append([out, *torch.autograd.grad((out * seed).sum(), leaves)])
    with torch.no_grad():  # here q and k are turned piece by piece
        torch.testing.assert_close(banded.run(p), results[0][0], rtol=1e-12, atol=1e-12)
    banded._plain.cache_clear()
    for mine, its in zip(*results, strict=True):  # the table itself is float32
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("far", [False, True])
def test_a_chain_whose_window_is_paved(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banded, "LARGE", 16 if far else 1000)
    banded._plain.cache_clear()
    text, n, paved_bands = "rope(remap=leaky_rerope(8, 3))", 40, []

    def backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor, *how: bool) -> Gradients:
        if part.band != (0, 8):
            return TWIN.backward(part, grad, out, lse, *how)
        paved_bands.append(part.band)
        return paved.backward(part, grad, out, lse, by=CPU)

    x, weights, logits = inputs(text, n, n, True)
    p = problem(text, n, n, x, weights, sink_logits=logits)
    its = attention(p.scheme, *x, p.q_pos, p.k_pos, sink_logits=logits, backend="eager")
    assert (banded.plan_of(p).far is not None) == far
    mine = banded.run(p, Way(TWIN.forward, backward))
    both = [torch.autograd.grad(out.square().sum(), [*x, logits]) for out in (mine, its)]
    banded._plain.cache_clear()
    assert paved_bands == [(0, 8)]
    torch.testing.assert_close(both[0], both[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("q_pos", "k_pos"), [((100, 130), (0, 50)), ((40, 70), (20, 50))])
def test_queries_far_from_their_keys(q_pos: tuple[int, int], k_pos: tuple[int, int]) -> None:
    x, weights, _ = inputs(T5, 30, q_pos[1] - q_pos[0] + 20, False)
    x = [x[0], *(t[:, :, : k_pos[1] - k_pos[0]] for t in x[1:])]
    rows, columns = range(*q_pos), range(*k_pos)
    p = prepare(scheme(T5), x[0], x[1], x[2], rows, columns, weights, scale=None, segments=None,
                length=None)  # fmt: skip
    mine, its = banded.run(p), attention(p.scheme, *x, rows, columns, weights, backend="eager")
    torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)
    both = [torch.autograd.grad(out.square().sum(), [*weights.values()]) for out in (mine, its)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-5)


def test_reach_changes_nothing_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banded, "LONG", 8)
    banded._biased.cache_clear()
    n, text = 200, "alibi(steepness=4)"
    x, weights, _ = inputs(text, n, n, False)
    p = problem(text, n, n, x, weights)
    plan = banded.plan_of(p)
    reach = reach_of(
        plan.part(plan.pieces[0], lambda *_: (x[0], x[1]), x[2], banded.bias_of(p, plan))
    )
    assert plan.reached and reach is not None and bool((reach < n).any())
    want = attention(p.scheme, *x, p.q_pos, p.k_pos, backend="eager")
    for mine, its in zip(
        (banded.run(p), *torch.autograd.grad(banded.run(p).sum(), x)),
        (want, *torch.autograd.grad(want.sum(), x)),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("rope()", {}, "Triton kernel"),
        ("rope(remap=dual_chunk(6, 2))", {}, "multiples of 128"),
        ("rope(remap=dual_chunk(512, 128))", {}, "no gradients of chunks"),
        ("rope(frequencies=stepped('yarn', original=4))", {}, "not of rows"),
        ("fire()", {}, "biases of the distance"),
        ("shaw(4)", {}, "biases of the distance"),
        ("transformer_xl()", {}, "biases of the distance"),
        ("deberta(8) + bidirectional()", {}, "biases of the distance"),
        ("alibi()", {"key_padding": torch.zeros(2, 12, dtype=torch.bool)}, "contiguous"),
        ("alibi()", {"softcap": 5.0}, "soft-capping"),
        ("alibi()", {"dropout": 0.1}, "dropout"),
        ("rope(remap=dual_chunk(6, 2)) + alibi()", {}, "no bias with them"),
        ("alibi()", {}, "Triton kernel"),
    ],
)
def test_refusals(text: str, options: dict[str, Any], why: str) -> None:
    x, weights, _ = inputs(text, 12, 12, False)
    assert why in (banded.refuses(problem(text, 12, 12, x, weights, **options)) or "")


def test_the_far_tile_is_ours_until_its_plan_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    text, n = "rope(remap=leaky_rerope(6, 3))", 40
    x, weights, _ = inputs(text, n, n, False)
    with torch.no_grad():
        p = problem(text, n, n, x, weights)
        tile = 34 * 34 * 2 * D * 2 * HEADS  # operations of two sequences' far tiles
        ran: list[int] = []

        def forward(part: Part, start: Start | None) -> tuple[Tensor, Tensor]:
            ran.append(part.band.hi)
            return eager(part, start)

        monkeypatch.setattr(banded, "LARGE", 16)
        monkeypatch.setattr(banded, "CUDNN", CPU)
        monkeypatch.setattr(banded, "RENT", Rent(1.5 * tile))
        banded._plain.cache_clear()
        made = [banded.run(p, TWIN._replace(forward=forward)) for _ in range(3)]
        banded._plain.cache_clear()
    assert ran == [6, n, 6, n, 6]  # two bands twice, then what is near alone
    torch.testing.assert_close(made[0], made[2])


def test_what_a_kernel_could_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banded, "usable", lambda x: True)
    x, weights, _ = inputs("alibi()", 12, 12, False)
    assert "float16" in (banded.refuses(problem("alibi()", 12, 12, x, weights)) or "")
    narrow = [t.detach().float() for t in x]
    assert banded.refuses(problem("alibi()", 12, 12, narrow, weights)) is None
    assert "above zero" in (
        banded.refuses(problem("alibi()", 12, 12, narrow, weights, scale=-1.0)) or ""
    )
    wide = [torch.zeros(1, 2, 12, 320)] * 3
    assert "heads of up to" in (banded.refuses(problem("alibi()", 12, 12, wide, weights)) or "")


def test_nothing_comes_out_of_nothing() -> None:
    assert not available.usable(torch.zeros(1))
    for n, m in ((0, 0), (0, 4), (4, 0)):
        x = [torch.zeros(1, HEADS, size, D) for size in (n, m, m)]
        p = prepare(scheme("alibi()"), x[0], x[1], x[2], range(n), range(m), None, scale=None,
                    segments=None, length=None)  # fmt: skip
        assert torch.equal(banded.run(p), torch.zeros(1, HEADS, n, D))


def test_a_table_is_kept_where_nothing_is_learned() -> None:
    x, weights, _ = inputs(T5, 60, 60, False)
    found = []
    for text, own in (("alibi()", {}), (T5, weights)):
        p = problem(text, 60, 60, x, own)
        plan = banded.plan_of(p)
        with torch.no_grad():
            found.append([banded.bias_of(p, plan).table for _ in range(2)])
    assert found[0][0] is found[0][1] and found[1][0] is not found[1][1]
    weights["t5.table"].data[0, 0] += 1.0  # behind autograd's back
    changed = banded.bias_of(p, plan).table
    assert changed.requires_grad and not torch.equal(changed, found[1][0])
    with torch.inference_mode():
        inside = banded.run(problem("alibi()", 61, 61, *fresh(61)))
    assert inside.is_inference()
    out = banded.run(problem("alibi()", 61, 61, *fresh(61)))
    torch.testing.assert_close(out, inside)


def fresh(n: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    return [torch.ones(1, HEADS, n, D, requires_grad=True) for _ in range(3)], {}
