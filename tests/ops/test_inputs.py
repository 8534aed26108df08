"""What the door of `attention` makes of its arguments: right numbers, or one sentence.

The first tests are regressions: each failed before positions, counts and weights were checked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longitude import Dims, UserError, attention, parse
from longitude.ops.attention import terms
from longitude.ops.inputs import factors_fit_tables, prepare
from longitude.parts.scales import LogN
from tests.grid import FACTORS, scheme
from tests.ops.test_options import unchecked

N, HEADS, D = 40, 4, 16


def qkv(n: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, n, D, generator=rng, dtype=dtype) for _ in range(3)]


def fresh(text: str) -> dict[str, Tensor]:
    made = scheme(text).init(Dims(HEADS * D, HEADS, D), torch.Generator().manual_seed(0))
    return {name: w.double() for name, w in made.items()}


def run(text: str, pos: Any, backend: Any = "auto", **options: Any) -> Tensor:
    return attention(scheme(text), *qkv(), pos, pos, fresh(text), backend=backend, **options)


COUNTED = [
    "ssmax() + window(4) + bidirectional()",
    "logn(8, clip=False) + window(4) + bidirectional()",
    "rope(remap=dual_chunk(12, 3)) + ssmax() + bidirectional()",
]


@pytest.mark.parametrize("text", COUNTED[:2])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_visible_keys_are_counted_wherever_positions_start(text: str, backend: str) -> None:
    """A bidirectional window used to compare a position with a count: off by 1.67."""
    here, there = (run(text, range(a, a + N), backend) for a in (0, 1000))
    torch.testing.assert_close(there, here, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", COUNTED)
@pytest.mark.parametrize("start", [0, 7])
def test_packed_segments_count_their_own_keys(text: str, start: int) -> None:
    """Segments packed without restarting positions agree with each document alone."""
    sizes, pos = (23, 17), torch.arange(start, start + N)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])[None]
    packed = run(text, pos, segments=ids)
    for first, last in ((0, 23), (23, N)):
        x = [t[:, :, first:last] for t in qkv()]
        alone = attention(scheme(text), *x, pos[first:last], pos[first:last], fresh(text))
        torch.testing.assert_close(packed[:, :, first:last], alone, rtol=0, atol=1e-12)


def test_a_causal_query_of_a_segment_counts_that_segment() -> None:
    text, ids = "logn(8, clip=False)", (torch.arange(N) // 20)[None]
    x, pos = qkv(), torch.arange(N)
    packed = attention(scheme(text), *x, pos, pos, segments=ids)
    alone = attention(scheme(text), *(t[:, :, 20:] for t in x), range(20), range(20))
    torch.testing.assert_close(packed[:, :, 20:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float32])
@pytest.mark.parametrize("text", ["rope()", "logn(8)", "ssmax()", "llama4_temperature(floor=4)",
                                  "rope(remap=leaky_rerope(7, 3))", "t5()"])  # fmt: skip
def test_positions_of_any_type_are_exact(text: str, dtype: torch.dtype) -> None:
    """int32 used to crash every scale part, uint8 to wrap around."""
    want = run(text, torch.arange(N))
    torch.testing.assert_close(run(text, torch.arange(N).to(dtype)), want, rtol=0, atol=1e-12)


BY_LENGTH = [
    "rope(frequencies=dynamic_ntk(16, 2))",
    "rope(frequencies=dynamic_linear(16))",
    f"rope(frequencies=longrope({FACTORS[0]}, {FACTORS[1]}, original=16, factor=4))",
    "rope(frequencies=stepped('yarn', original=12))",
]


@pytest.mark.parametrize("text", BY_LENGTH)
def test_a_reversed_range_has_the_length_of_its_positions(text: str) -> None:
    back = range(N - 1, -1, -1)
    want = run(text, torch.tensor(list(back)))
    assert torch.equal(run(text, back), want)
    q, k, v = (t.flip(2) for t in qkv())
    forth = attention(scheme(text), q, k, v, range(N), range(N)).flip(2)
    torch.testing.assert_close(run(text, back), forth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "name", "shape"),
    [
        ("shaw(4)", "shaw.keys", (7, D)),
        ("deberta(8) + bidirectional()", "deberta.keys", (HEADS, 12, D)),
        ("t5()", "t5.table", (16, HEADS)),
        ("t5()", "t5.table", (32, 2 * HEADS)),
        ("kerple_log()", "kerple_log.r1", (1,)),
        ("fire()", "fire.outward", (32, 2)),
        ("ssmax()", "ssmax.s", (1,)),
        ("transformer_xl()", "transformer_xl.u", (HEADS, D, 1)),
    ],
)
def test_weights_of_another_shape_are_refused(text: str, name: str, shape: Any) -> None:
    weights = fresh(text)
    attention(scheme(text), *qkv(), range(N), range(N), weights)
    weights[name] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(UserError, match=f"{name} must be"):
        attention(scheme(text), *qkv(), range(N), range(N), weights)


def test_the_models_width_is_its_own() -> None:
    """Transformer-XL's projection has the model's width, which a call does not know."""
    s = scheme("transformer_xl()")
    for width in (24, 96):
        weights = s.init(Dims(width, HEADS, D), torch.Generator().manual_seed(0))
        own = {name: w.double() for name, w in weights.items()}
        assert attention(s, *qkv(), range(N), range(N), own).isfinite().all()


def test_checking_weights_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run("t5(buckets=12)", range(N))
    assert torch.equal(torch.get_rng_state(), before)


MISTAKES: dict[str, dict[str, Any]] = {
    "q_pos holds nan or infinity": {"q_pos": torch.full((N,), float("nan"))},
    "k_pos holds nan or infinity": {"k_pos": torch.full((N,), float("inf"))},
    "q_pos must be a range or a tensor of numbers": {"q_pos": [*range(N)]},
    "k_pos must be a range or a tensor of numbers": {"k_pos": torch.ones(N, dtype=torch.bool)},
    "k must be (batch, heads, tokens, size)": {"k": 3},
    "share one floating-point dtype": {"k": torch.zeros(1, HEADS, N, D)},
    "dtype and device, but got torch.int64": {
        name: torch.zeros(1, HEADS, N, D, dtype=torch.int64) for name in "qkv"
    },
    "key_padding must be bool": {"key_padding": torch.zeros(1, N, dtype=torch.int64)},
    "segments must be one integer": {"segments": torch.zeros(1, N)},
    "segments must be one integer per token": {"segments": (torch.zeros(1, N).long(),)},
    "sink_logits must be one number per head": {"sink_logits": torch.zeros(HEADS).long()},
    "scale must be a finite number": {"scale": float("nan")},
    "scale must be a finite number, but got '": {"scale": "1"},
    "softcap must be a number above zero": {"softcap": 0.0},
    "softcap must be a number above zero, but got -": {"softcap": -1.0},
    "dropout must lie in [0, 1)": {"dropout": 1.5},
    "dropout must lie in [0, 1), but got -": {"dropout": -0.1},
    "length must be one number above zero": {"length": 0},
    "length must be one number": {"length": 3.5},
    "length must be one number above zero, or one for each of 1": {"length": [3, 4]},
    "runs one layer": {"scheme": parse("layers(rope(), causal())")},
    "a scheme or its text is needed": {"scheme": 7},
    "is not a scheme": {"scheme": "rope("},
}


@pytest.mark.parametrize("says", MISTAKES)
def test_what_can_not_be_right_gets_one_sentence(says: str) -> None:
    q, k, v = qkv()
    call = {"scheme": scheme("rope()"), "q": q, "k": k, "v": v, "q_pos": range(N),
            "k_pos": range(N)} | MISTAKES[says]  # fmt: skip
    with pytest.raises(UserError) as raised:
        unchecked(**call)
    assert says in str(raised.value) and str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


def test_a_scheme_may_be_its_text() -> None:
    text = "rope(remap=leaky_rerope(7, 3))"
    want = attention(scheme(text), *qkv(), range(N), range(N))
    assert torch.equal(attention(text, *qkv(), range(N), range(N)), want)
    assert torch.equal(terms(text, *qkv()[:2], range(N), range(N)).visible[0, 0].sum(1),
                       torch.arange(1, N + 1))  # fmt: skip


def test_lengths_by_sequence_or_for_all() -> None:
    text = BY_LENGTH[0]
    want = run(text, range(N), length=64)
    for length in ([64], torch.tensor([64])):
        torch.testing.assert_close(run(text, range(N), length=length), want)


EMPTY = [
    "rope()", "rope(remap=leaky_rerope(7, 3))", "alibi()", "t5()", "shaw(4, values=True)",
    "transformer_xl()", "deberta(8) + bidirectional()", "fire()", "logn(8) + bidirectional()",
    "rope(decay=xpos())", "ssmax() + window(4) + bidirectional()", *BY_LENGTH,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "eager", "native", "flex", "banded", "alibi"])
@pytest.mark.parametrize("text", EMPTY)
def test_no_queries_or_no_keys(text: str, backend: Any) -> None:
    """Dynamic, LongRoPE and Transformer-XL used to raise."""
    q, k, v = qkv()
    for pos in (range, torch.arange):
        none = attention(scheme(text), q[:, :, :0], k, v, pos(0), pos(N), fresh(text),
                         backend=backend)  # fmt: skip
        assert none.shape == (1, HEADS, 0, D)
        zero = attention(scheme(text), q, k[:, :, :0], v[:, :, :0], pos(N), pos(0), fresh(text),
                         backend=backend)  # fmt: skip
        assert torch.equal(zero, torch.zeros_like(q))


def test_gradients_of_nothing_are_zeros() -> None:
    x = [t.requires_grad_() for t in qkv()]
    attention("rope()", x[0], x[1][:, :, :0], x[2][:, :, :0], range(N), range(0)).sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in x)


@pytest.mark.parametrize(
    ("text", "fit"),
    [
        ("rope() + logn(8)", True), ("rope(remap=rerope(4)) + temperature(2) + logn(8)", True),
        ("rope(fraction=0.5) + logn(8)", False), ("logn(8)", False), ("rope()", False),
        ("rope() + ssmax()", False), ("rope() + logn(8) + bidirectional()", False),
        ("rope() + alibi() + logn(8)", False),
    ],
)  # fmt: skip
def test_which_factors_rotary_tables_can_hold(text: str, fit: bool) -> None:
    assert factors_fit_tables(scheme(text), D) == fit


def test_tables_hold_no_factors_of_single_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our parts has such without weights; one that a user writes may."""
    of_two_heads = torch.ones(1, 2, 1, dtype=torch.float64)
    monkeypatch.setattr(LogN, "scale", lambda *_: of_two_heads)
    assert not factors_fit_tables.__wrapped__(scheme("rope() + logn(8)"), D)


def test_llama4s_temperature_before_position_zero() -> None:
    text = "llama4_temperature(floor=8)"
    assert run(text, range(-1, N - 1)).isfinite().all()
    with pytest.raises(UserError, match=r"llama4_temperature.*negative"):
        run(text, range(-20, N - 20))
    with pytest.raises(UserError, match=r"llama4_temperature.*negative"):
        run(text, torch.arange(-20, N - 20))


def test_transformer_xl_costs_by_tokens_not_positions() -> None:
    """A hole of a hundred million positions used to take a table of as many rows."""
    text, hole = "transformer_xl()", 100_000_000
    x, own = qkv(), fresh(text)
    pos = torch.cat([torch.arange(20), torch.arange(hole, hole + 20)])
    got = attention(scheme(text), *x, pos, pos, own)
    near = [t[:, :, :20] for t in x]
    want = attention(scheme(text), *near, range(20), range(20), own)
    torch.testing.assert_close(got[:, :, :20], want, rtol=0, atol=1e-12)
    # the same distances one by one: each query alone over its keys
    for i in (20, 39):
        alone = attention(scheme(text), x[0][:, :, i : i + 1], x[1], x[2], pos[i : i + 1], pos, own)
        torch.testing.assert_close(alone, got[:, :, i : i + 1], rtol=0, atol=1e-12)
    p = prepare(scheme(text), *x, pos, pos, own)
    assert p.q_rows.dtype == torch.int64
