"""Factors on the query, against their formulas."""

import math

import pytest
import torch

from longitude import Dims, UserError, attention, parse
from longitude.parts import Drope, Llama4Temperature, LogN, SsMax, Temperature

POS = torch.tensor([[0, 1, 63, 511, 512, 4095, 8190, 8191, 8192, 16383, 10_000_000]])
SEEN = POS + 1


def scale(part, pos=POS, seen=SEEN, weights=None) -> torch.Tensor:
    made = part.scale(pos, seen, weights or {})
    assert made.dtype == torch.float64 and made.ndim == 3
    return made


def test_logn_is_log_to_the_trained_length():
    """log_L n; below L the unclipped factor cools: 2/3 at n = 64, L = 512."""
    got = scale(LogN(512, clip=False))[0, 0]
    expected = [math.log(n, 512) for n in SEEN[0].tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-15)
    assert float(got[2]) == pytest.approx(2 / 3, rel=1e-13)


def test_logn_clipped_never_cools():
    got = scale(LogN(512))[0, 0]
    expected = [max(1.0, math.log(n, 512)) for n in SEEN[0].tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-13)
    assert got[:4].tolist() == [1.0] * 4 and float(got[4]) > 1


def test_logn_counts_keys_and_not_positions():
    """Bidirectional: n is the number of unpadded keys, the same for every query."""
    got = scale(LogN(16, clip=False), seen=torch.full_like(POS, 256))
    assert got[0, 0].tolist() == pytest.approx([2.0] * POS.shape[1], rel=1e-14)
    assert bool(scale(LogN(16, clip=False), seen=POS * 0).isfinite().all())


@pytest.mark.parametrize("train", [1, 0, -4])
def test_logn_needs_a_length_whose_logarithm_divides(train):
    with pytest.raises(UserError, match="at least 2"):
        LogN(train)
    assert float(scale(LogN(2), seen=POS * 0 + 8)[0, 0, 0]) == pytest.approx(3)


@pytest.mark.parametrize("t", [0.5, 1, 3.0])
def test_temperature_divides_logits(t):
    assert scale(Temperature(t)).flatten().tolist() == [1 / t]


def test_ssmax_is_a_learned_multiple_of_ln_n():
    s = torch.tensor([0.43, -1.0, 2.0], dtype=torch.float64)
    got = scale(SsMax(), weights={"s": s})
    assert got.shape == (1, 3, POS.shape[1])
    for h in range(3):
        expected = [float(s[h]) * math.log(n) for n in SEEN[0].tolist()]
        assert got[0, h].tolist() == pytest.approx(expected, rel=1e-14)
    assert SsMax(0.7).init(Dims(8, 3, 4), None)["s"].tolist() == pytest.approx([0.7] * 3)


def test_llama4_temperature_steps_every_8192():
    """1 + 0.1 ln(1 + ⌊(pos + 1)/8192⌋)."""
    got = scale(Llama4Temperature())[0, 0]
    expected = [1 + 0.1 * math.log(1 + (p + 1) // 8192) for p in POS[0].tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-14)
    assert got[:7].tolist() == [1.0] * 7 and float(got[7]) == 1 + 0.1 * math.log(2)


def test_ministral_counts_from_the_position_itself():
    """1 + β ln(1 + ⌊pos/L⌋), β = 0.1, L = 16384."""
    got = scale(Llama4Temperature(16384, offset=0))[0, 0]
    expected = [1 + 0.1 * math.log(1 + p // 16384) for p in POS[0].tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("part", [LogN(512), LogN(512, clip=False), Llama4Temperature()], ids=str)
def test_each_sequence_has_its_own(part):
    pos = torch.stack([POS[0], POS[0].flip(0)])
    got = scale(part, pos, pos + 1)
    assert got.shape == (2, 1, POS.shape[1])
    assert torch.equal(got[0], got[1].flip(-1))


def test_drope_grows_with_the_logarithm_past_the_window():
    """β = 1 + c ln(n / L), 1 inside the window; with `length` one β for every query."""
    got = scale(Drope(512, 0.412))[0, 0]
    expected = [1 + 0.412 * math.log(n / 512) if n > 512 else 1.0 for n in SEEN[0].tolist()]
    assert got.tolist() == pytest.approx(expected, rel=1e-13)
    assert got[:4].tolist() == [1.0] * 4 and float(got[5]) == pytest.approx(1 + 0.412 * math.log(8))
    fixed = Drope(512, 0.412, length=4096)
    assert scale(fixed)[0, 0].tolist() == pytest.approx([1 + 0.412 * math.log(8)] * POS.shape[1])
    assert fixed.beta(9) == pytest.approx(1 + 0.412 * math.log(8)) and Drope(512).beta(100) == 1


def test_drope_is_attention_without_positions_and_sharper_logits():
    """Written again: softmax(β_i q·k / √d), n = i + 1, causal."""
    n, train, c = 12, 4, 0.3
    q, k, v = torch.randn(3, 1, 2, n, 8, dtype=torch.float64)
    beta = torch.tensor([1 + c * max(0.0, math.log((i + 1) / train)) for i in range(n)])
    scores = (beta.double()[:, None] * (q @ k.mT) / 8**0.5).masked_fill(
        torch.ones(n, n).triu(1).bool(), -torch.inf
    )
    for backend in ("eager", "auto"):
        got = attention(f"drope({train}, c={c})", q, k, v, range(n), range(n), backend=backend)
        torch.testing.assert_close(got, scores.softmax(-1) @ v, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("offset", [0, 7.5])
def test_log_position_is_a_logarithm_of_the_querys_place(offset):
    n, train = 20, 8
    q, k, v = torch.randn(3, 1, 2, n, 8, dtype=torch.float64)
    logs = [math.log(offset + p + 1) / math.log(offset + train) for p in range(n)]
    factor = torch.tensor(logs, dtype=torch.float64)
    assert float(factor[train - 1]) == pytest.approx(1)
    scores = q @ k.mT / 8**0.5 * factor[:, None]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    scheme = parse(f"log_position({train}, offset={offset})")
    for backend in ("eager", "auto"):
        out = attention(scheme, q, k, v, range(n), range(n), backend=backend)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    with pytest.raises(UserError, match="divides by their sum's logarithm"):
        parse("log_position(1)")


def test_where_layers_without_positions_begin():
    """SWAN's period starts with one, those of RNoPE-SWA and iRoPE end with one."""
    for name, layer in (("swan", 0), ("rnope_swa", 3), ("llama4", 3)):
        made = parse(f"{name}()")
        bare = [i for i in range(8) if made.layer(i).rotary is None]
        assert bare == [layer, layer + 4]
        assert all(made.layer(i).windowed for i in range(8) if i not in bare)
    assert parse("swan(8192)").layer(0) == parse("log_position(8192)")
