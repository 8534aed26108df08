"""The notes' mistakes that would give wrong results: the library does otherwise.

Each test is named after the note's file and line, holds the part to the right statement, and shows
that the note's own version differs.
"""

import math

import pytest
import torch

from longitude import Scheme
from longitude.core.part import Region
from longitude.core.region import visible
from longitude.parts import (
    Alibi,
    DynamicNtk,
    Linear,
    LogN,
    Ntk,
    Randomized,
    Rope,
    Sinusoidal,
    Unscaled,
)
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

CPU = torch.device("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tables(pos, dim: int, rope: Rope | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return cos_sin(
        rope or Rope(), Region(), "k", pos, dim, 1, dtype=torch.float64, device=CPU
    )  # fmt: skip


def turned(x: torch.Tensor, position: int, pairs: str = "adjacent") -> torch.Tensor:
    """One vector turned to one position."""
    made = tables(range(position, position + 1), x.shape[-1])
    return apply_rotary(x.view(1, 1, 1, -1), *made, pairs).flatten()


def sinusoidal(positions, dim: int) -> torch.Tensor:
    pos = torch.tensor([list(positions)])
    return Sinusoidal().embed(torch.zeros(1, pos.shape[1], dim, dtype=torch.float64), pos, {})[0]


def alibi(heads: int, i: int, j: int) -> torch.Tensor:
    q, zero = rand(1, heads, 1, 4), torch.zeros((), dtype=torch.int64)
    term = Alibi().term(q, q, torch.tensor([[i]]), torch.tensor([[j]]), {}, 0.5)
    return term(zero, torch.arange(heads), zero, zero)


def test_000_354_log_to_base_m_of_n_and_never_below_one():
    """log_m n, not log_m^n; for models trained without it the factor is max(1, log_m n)."""
    m, seen = 512, torch.tensor([[64, 512, 4096]])
    factor = LogN(m).scale(seen - 1, seen, {})[0, 0].tolist()
    assert factor == pytest.approx([1, 1, math.log(4096) / math.log(512)], rel=1e-14)
    plain = LogN(m, clip=False).scale(seen - 1, seen, {})[0, 0].tolist()
    assert plain[0] == pytest.approx(2 / 3, rel=1e-14)  # the note's formula would cool here


def test_000_371_every_entry_holds_the_same_position():
    """[cos(n/β⁰), sin(n/β⁰), cos(n/β¹), …]; the note's numerators run 0, 1, 2, …, n."""
    n, d = 29, 8
    beta = 10000 ** (2 / d)
    cos, sin = (t[0, 0, 0] for t in tables(range(n, n + 1), d))
    assert cos.tolist() == pytest.approx([math.cos(n / beta**t) for t in range(d // 2)], abs=1e-13)
    assert sin.tolist() == pytest.approx([math.sin(n / beta**t) for t in range(d // 2)], abs=1e-13)
    note = [math.cos(2 * t / beta**t) for t in range(d // 2)]
    assert cos.tolist() != pytest.approx(note, abs=0.1)


def scores_and_terms(d: int = 8, width: int = 5):
    """Scores of two embedded tokens, and the four terms of the expansion in row vectors."""
    x, p = rand(2, d), sinusoidal([3, 9], d)
    wq, wk = rand(d, width, seed=1), rand(d, width, seed=2)
    given = Sinusoidal().embed(x[None], torch.tensor([[3, 9]]), {})[0]
    score = (given @ wq)[0] @ (given @ wk)[1]
    terms = [a @ wq @ wk.T @ b for a in (x[0], p[0]) for b in (x[1], p[1])]
    return score, terms, (given, wq, wk)


def test_001_41_the_expansion_is_conformable():
    """X_i W_Q W_Kᵀ X_jᵀ and its three sisters; X_i W_Q X_jᵀ W_Kᵀ can't be multiplied."""
    score, terms, (given, wq, wk) = scores_and_terms()
    assert float(score) == pytest.approx(float(sum(terms)), rel=1e-12)
    with pytest.raises(RuntimeError, match="shapes"):
        given[:1] @ wq @ given[1:].T @ wk.T


def test_002_22_a_score_is_a_number_and_not_an_outer_product():
    """Row vectors: x_i W_q W_kᵀ x_jᵀ; the note's (x_i W_q)ᵀ(x_j W_k) is a matrix."""
    score, terms, (given, wq, wk) = scores_and_terms()
    assert score.ndim == 0 and all(t.ndim == 0 for t in terms)
    note = (given[:1] @ wq).T @ (given[1:] @ wk)
    assert note.shape == (5, 5)
    assert float(note.trace()) == pytest.approx(float(score), rel=1e-12)


def test_001_66_theta_has_no_two_pi():
    """θ_i = 10000^(-2i/d); 2π/θ is the wavelength, and with 2π in θ pair 0 would carry nothing."""
    d = 16
    theta = Unscaled().inv_freq(d, 10000, 1).tolist()
    assert theta == pytest.approx([10000 ** (-2 * i / d) for i in range(d // 2)], rel=1e-14)
    p = sinusoidal(range(100), d)
    assert float(p[1, 0]) == pytest.approx(math.sin(1), abs=1e-14)
    assert float(p[:, 0].std()) > 0.5
    assert all(abs(math.sin(2 * math.pi * n)) < 1e-12 for n in range(100))


def test_002_69_the_shift_matrix_has_its_plus_above():
    """For (sin, cos) order PE(p + k) = [[cos kω, sin kω], [-sin kω, cos kω]] PE(p)."""
    k, d, p = 7, 8, sinusoidal(range(40), 8)
    right = wrong = 0.0
    for t in range(d // 2):
        c, s = math.cos(k * 10000 ** (-2 * t / d)), math.sin(k * 10000 ** (-2 * t / d))
        shift = torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
        pair = p[:, 2 * t : 2 * t + 2]
        right = max(right, float((pair[:-k] @ shift.T - pair[k:]).abs().max()))
        wrong = max(wrong, float((pair[:-k] @ shift - pair[k:]).abs().max()))
    assert right < 1e-14 and wrong > 1


def test_002_92_pairs_do_not_overlap():
    """(q_2i, q_2i+1) turn by θ_i; the note turns (q_i, q_i+1) by θ_i."""
    d, m, q = 6, 5, rand(6)
    got = turned(q, m)
    for t in range(d // 2):
        angle = m * 10000 ** (-2 * t / d)
        a, b = float(q[2 * t]), float(q[2 * t + 1])
        pair = [
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        ]
        assert got[2 * t : 2 * t + 2].tolist() == pytest.approx(pair, abs=1e-13)
    angle = m * 10000 ** (-2 / d)  # the note's pair 1: (q_1, q_2), which pair 0 has turned already
    note = float(q[1]) * math.cos(angle) - float(q[2]) * math.sin(angle)
    assert abs(float(got[1]) - note) > 0.1 and abs(float(got[2]) - note) > 0.1
    assert float(got.norm()) == pytest.approx(float(q.norm()), rel=1e-13)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_002_129_scores_are_divided_by_the_root_of_d(d):
    """q·k/√d - m|i - j|: the note leaves 1/√d out."""
    assert Scheme.of(Alibi()).softmax_scale(d) == pytest.approx(1 / math.sqrt(d), rel=1e-15)


def test_003_11_randomized_ids_are_sorted_without_replacement_and_spread_at_test_time():
    """n of [0, L), not [0, L], rising; "normal positions" 0 … n-1 at test time are a mismatch."""
    n, top, rng = 10, 12, torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = Randomized(top).ids(n, rng=rng)
        assert bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < top
    assert Randomized(2048).ids(4).tolist() == [0, 512, 1024, 1536]


def test_003_18_distance_is_subtracted():
    """Far keys score less: the note adds a distance that grows."""
    near, far = alibi(8, 10, 9), alibi(8, 10, 2)
    assert bool((far < near).all()) and bool((near < 0).all())
    assert far.tolist() == pytest.approx([8 * x for x in near.tolist()], rel=1e-13)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_003_19_slopes_are_geometric(heads):
    """From 2^(-8/H) down to 2^-8 by a constant ratio; not evenly spread over 0 … 1/2^8."""
    m = -alibi(heads, 1, 0)
    assert float(m[0]) == pytest.approx(2 ** (-8 / heads)) and float(m[-1]) == pytest.approx(2**-8)
    ratio = m[1:] / m[:-1]
    assert float((ratio - ratio[0]).abs().max()) < 1e-14
    note = torch.linspace(0, 2**-8, heads, dtype=torch.float64)
    assert float(m.min()) >= float(note.max()) * (1 - 1e-12) and float(m[0]) > 50 * float(
        note.max()
    )


def test_003_37_the_base_grows_by_a_power():
    """scale^(d/(d-2)) = 8.268 for scale 8, d = 128; the note's scale·(d/d-2) is -8."""
    d, scale = 128, 8
    got = Ntk(scale).inv_freq(d, 10000, 1)
    grown = float(got[1]) ** (-d / 2) / 10000
    assert grown == pytest.approx(scale ** (d / (d - 2)), rel=1e-10)
    assert round(grown, 3) == 8.268
    assert scale * (d / d - 2) == -8 and round(scale * (d / (d - 2)), 3) == 8.127
    ends = got / Unscaled().inv_freq(d, 10000, 1)
    assert float(ends[0]) == 1 and float(ends[-1]) == pytest.approx(1 / scale, rel=1e-12)


def test_003_39_what_depends_on_the_length_is_dynamic_ntk():
    """NTK-aware is one static base; max(1, L_inf/L_train) anew each call is another method."""
    static, dynamic = Ntk(4), DynamicNtk(4096)
    lengths = (100, 4096, 16384, 65536)
    assert len({tuple(static.inv_freq(64, 10000, n).tolist()) for n in lengths}) == 1
    assert len({tuple(dynamic.inv_freq(64, 10000, n).tolist()) for n in lengths}) == 3
    assert not static.by_length and dynamic.by_length  # so that the length is an input of the call
    same = dynamic.inv_freq(64, 10000, 16384).tolist()
    assert same == pytest.approx(static.inv_freq(64, 10000, 1).tolist(), rel=1e-13)


def test_003_118_the_phase_is_signed_and_pairs_match():
    """Re Σ_t q̃_t k̃_t* e^(i(m-n)θ_t), the same t for q and k; θ_|i-j| could not tell sides."""
    d, q, k = 8, rand(8), rand(8, seed=1)

    def score(r):
        pairs = torch.view_as_complex(torch.stack([q, k]).view(2, d // 2, 2))
        theta = torch.tensor([10000 ** (-2 * t / d) for t in range(d // 2)], dtype=torch.float64)
        return float((pairs[0] * pairs[1].conj() * torch.polar(torch.ones(1).double(), r * theta))
                     .real.sum())  # fmt: skip

    for m, n in [(9, 4), (4, 9), (100, 3)]:
        got = float(turned(q, m) @ turned(k, n))
        assert got == pytest.approx(score(m - n), abs=1e-12)
    assert abs(score(5) - score(-5)) > 0.5


def precomputed(dim: int, end: int) -> torch.Tensor:
    """The note's freqs_cis before it is viewed as real."""
    freqs = 1.0 / (10000 ** (torch.arange(0, dim, 2).double() / dim))
    angle = torch.outer(torch.arange(end).double(), freqs)
    return torch.polar(torch.ones_like(angle), angle)


def test_003_140_real_freqs_cis_do_not_broadcast():
    """Viewed as real they raise for every length; complex, they are our turn of adjacent pairs."""
    x, cis = rand(2, 7, 3, 8), precomputed(8, 7)  # batch, length, heads, head size
    pairs = torch.view_as_complex(x.reshape(2, 7, 3, 4, 2))
    with pytest.raises(RuntimeError):
        torch.view_as_real(cis)[None, :, None, :].expand_as(pairs)
    fixed = torch.view_as_real(pairs * cis[None, :, None, :]).flatten(3)
    got = apply_rotary(x.transpose(1, 2), *tables(range(7), 8), "adjacent").transpose(1, 2)
    torch.testing.assert_close(got, fixed, rtol=0, atol=1e-13)


def test_003_140_a_scheme_is_causal():
    """The note's attention has no mask: a later token changes the first."""
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    assert torch.equal(visible(Scheme.of(Rope()).areas(), i, j), i >= j)


def test_003_140_positions_are_passed_in():
    """With no offset a cached step would turn by 0; here any range can be asked for."""
    whole, step = tables(range(50), 8), tables(range(49, 50), 8)
    assert all(torch.equal(a[:, :, 49:], b) for a, b in zip(whole, step, strict=True))
    assert not torch.equal(step[0], whole[0][:, :, :1])


def test_003_140_no_angle_lives_in_a_model():
    """The note's table is an attribute, neither moved nor saved; a part holds numbers only."""
    rope = Rope(frequencies=Linear(4))
    assert not any(isinstance(v, torch.Tensor) for v in vars(rope).values())
    assert hash(rope) == hash(Rope(frequencies=Linear(4)))
    assert tables(range(7), 8)[0].shape == (1, 1, 7, 4)  # half the dimension, not all of it


def test_004_84_a_turned_pair_is_a_column():
    """(q0 cos - q1 sin, q0 sin + q1 cos): two numbers; the note shows a 2×2 matrix."""
    q, m = rand(2), 3
    got = turned(q, m)
    a, b, c, s = float(q[0]), float(q[1]), math.cos(m), math.sin(m)
    assert got.shape == (2,)
    assert got.tolist() == pytest.approx([a * c - b * s, a * s + b * c], abs=1e-14)
    note = torch.tensor([[c, -s], [s, c]]) * q
    assert note.shape == (2, 2)
    assert note.sum(1).tolist() == pytest.approx(got.tolist(), abs=1e-7)
