"""Embeddings with their positions in."""

import math

import pytest
import torch

from longitude import Dims, UserError
from longitude.parts import (
    Floater,
    Hierarchical,
    Learned,
    LearnedInterpolated,
    LearnedTiled,
    Multiplicative,
    Sinusoidal,
)

RNG = torch.Generator().manual_seed(0)


def added(part, pos: torch.Tensor, weights: dict, dim: int) -> torch.Tensor:
    """What the part adds to embeddings of zeros."""
    x = torch.zeros(*pos.shape, dim, dtype=torch.float64)
    return part.embed(x, pos, weights)


def table(rows: int, dim: int) -> dict[str, torch.Tensor]:
    return {"table": torch.randn(rows, dim, dtype=torch.float64, generator=RNG)}


def test_sinusoidal_as_published():
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos of the same."""
    got = added(Sinusoidal(), torch.arange(200)[None], {}, 12)[0]
    for p in range(200):
        for i in range(6):
            angle = p / 10000 ** (2 * i / 12)
            assert float(got[p, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-13)
            assert float(got[p, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-13)


@pytest.mark.parametrize("base", [10000, 500.0])
def test_sinusoidal_as_in_tensor2tensor_and_whisper(base):
    """All sines, then all cosines, at exp(-i ln(base)/(d/2 - 1))."""
    part = Sinusoidal(base, layout="concatenated", spacing="endpoint")
    got = added(part, torch.arange(50)[None], {}, 10)[0]
    step = math.log(base) / (10 // 2 - 1)
    for p in range(50):
        angles = [p * math.exp(-step * i) for i in range(5)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert got[p].tolist() == pytest.approx(expected, abs=1e-13)


def test_sinusoidal_layouts_and_spacings_are_four():
    pos = torch.arange(9)[None]
    made = [
        added(Sinusoidal(layout=a, spacing=b), pos, {}, 8)
        for a in ("interleaved", "concatenated")
        for b in ("paper", "endpoint")
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(made) for b in made[:i])


def test_sinusoidal_adds_and_keeps_the_dtype():
    x = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    got = Sinusoidal().embed(x, torch.tensor([[0, 1, 10**7]]), {})
    exact = added(Sinusoidal(), torch.tensor([[0, 1, 10**7]]), {}, 8)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), 1 + exact, rtol=0, atol=2**-6)


def test_sinusoidal_inner_products_cannot_tell_direction():
    p = added(Sinusoidal(), torch.arange(300)[None], {}, 16)[0]
    omega = torch.tensor([10000 ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    for m, n in [(0, 0), (7, 3), (250, 20)]:
        expected = float(torch.cos((m - n) * omega).sum())
        assert float(p[m] @ p[n]) == pytest.approx(expected, abs=1e-12)
        assert float(p[n] @ p[m]) == float(p[m] @ p[n])


def test_sinusoidal_needs_an_even_dimension():
    with pytest.raises(UserError, match="even, but got 7"):
        added(Sinusoidal(), torch.arange(3)[None], {}, 7)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_adds_its_rows(offset):
    """RoBERTa, BART and OPT keep the first two rows for padding: position 0 is row 2."""
    w = table(10 + offset, 4)
    got = added(Learned(10, offset), torch.tensor([[0, 9, 3]]), w, 4)[0]
    assert torch.equal(got, w["table"][[offset, 9 + offset, 3 + offset]])
    made = Learned(10, offset).init(Dims(4, 1, 4), RNG)["table"]
    assert made.shape == (10 + offset, 4) and float(made.std()) == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize("position", [10, 11, 500])
def test_learned_past_its_table_names_hierarchical(position):
    with pytest.raises(UserError, match=rf"position {position} .*hierarchical\(10\)"):
        added(Learned(10, 2), torch.tensor([[0, position]]), table(12, 4), 4)


@pytest.mark.parametrize("pos", [torch.tensor([[-1]]), torch.tensor([[0.5]])])
def test_learned_has_no_rows_before_or_between(pos):
    with pytest.raises(UserError):
        added(Learned(10), pos, table(10, 4), 4)


def test_offsets_are_not_negative():
    for make in (Learned, Hierarchical, LearnedTiled):
        with pytest.raises(UserError, match="offset"):
            make(10, offset=-1)


@pytest.mark.parametrize("alpha", [0.4, 0.1, 0.7])
@pytest.mark.parametrize("offset", [0, 2])
def test_hierarchical_is_the_posts_decomposition(alpha, offset):
    """q_((i-1)n+j) = α u_i + (1-α) u_j, u = (p - α p_1)/(1-α), counted from 1."""
    n, w = 6, table(6 + offset, 5)
    p = w["table"][offset:]
    u = [(p[i - 1] - alpha * p[0]) / (1 - alpha) for i in range(1, n + 1)]
    got = added(Hierarchical(n, alpha, offset), torch.arange(n * n)[None], w, 5)[0]
    for i in range(1, n + 1):
        for j in range(1, n + 1):
            expected = alpha * u[i - 1] + (1 - alpha) * u[j - 1]
            torch.testing.assert_close(got[(i - 1) * n + j - 1], expected, rtol=0, atol=1e-13)


def test_hierarchical_leaves_the_first_rows_bit_for_bit():
    """In float32 too, and wherever the batch starts."""
    w = {"table": torch.randn(512, 8, generator=RNG)}
    pos = torch.stack([torch.arange(512), torch.arange(100, 612)])
    got = Hierarchical(512).embed(torch.zeros(2, 512, 8), pos, w)
    assert torch.equal(got[0], w["table"])
    assert torch.equal(got[1, :412], w["table"][100:])


def test_hierarchical_codes_are_all_distinct():
    n = 12
    codes = added(Hierarchical(n), torch.arange(n * n)[None], table(n, 3), 3)[0]
    apart = torch.cdist(codes, codes) + torch.eye(n * n) * 9
    assert float(apart.min()) > 1e-6


@pytest.mark.parametrize("alpha", [0.5, 0, 1, -0.2, 1.5])
def test_hierarchical_refuses_an_alpha_that_mixes_codes_up(alpha):
    with pytest.raises(UserError, match=r"differ from 0\.5"):
        Hierarchical(512, alpha)


def test_hierarchical_ends_at_the_square():
    with pytest.raises(UserError, match="0 to 35"):
        added(Hierarchical(6), torch.tensor([[36]]), table(6, 4), 4)


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("factor", [4, 2.5])
def test_interpolated_reads_between_the_rows(factor, offset):
    """(1 - f) P[a] + f P[a + 1] at t/s = a + f, and P[n - 1] past the last row."""
    n, w = 6, table(6 + offset, 5)
    p, reach = w["table"][offset:], int(6 * factor)
    got = added(LearnedInterpolated(n, factor, offset), torch.arange(reach)[None], w, 5)[0]
    for t in range(reach):
        a, f = int(t // factor), t / factor - int(t // factor)
        expected = (1 - f) * p[a] + f * p[min(a + 1, n - 1)]
        torch.testing.assert_close(got[t], expected, rtol=0, atol=1e-13)


def test_interpolated_by_one_is_the_table_bit_for_bit():
    w = {"table": torch.randn(64, 8, generator=RNG)}
    got = LearnedInterpolated(64, 1).embed(torch.zeros(1, 64, 8), torch.arange(64)[None], w)
    assert torch.equal(got[0], w["table"])


@pytest.mark.parametrize("position", [-1, 24])
def test_interpolated_ends_at_the_factor(position):
    with pytest.raises(UserError, match="0 to 23"):
        added(LearnedInterpolated(6, 4), torch.tensor([[0, position]]), table(6, 4), 4)


@pytest.mark.parametrize("offset", [0, 2])
def test_tiled_starts_again_after_the_last_row(offset):
    w, pos = table(6 + offset, 5), torch.tensor([[0, 5, 6, 11, 12, 6 * 10**9 + 3]])
    got = added(LearnedTiled(6, offset), pos, w, 5)[0]
    assert torch.equal(got, w["table"][offset:][[0, 5, 0, 5, 0, 3]])


@pytest.mark.parametrize("pos", [torch.tensor([[-1]]), torch.tensor([[0.5]])])
def test_tiled_has_no_rows_before_or_between(pos):
    with pytest.raises(UserError, match="integer positions from 0 on"):
        added(LearnedTiled(6), pos, table(6, 4), 4)


def test_multiplicative_is_one_plus_the_table():
    w, x = table(7, 4), torch.randn(2, 3, 4, dtype=torch.float64, generator=RNG)
    pos = torch.tensor([[0, 1, 2], [6, 5, 4]])
    expected = x * (1 + w["table"][pos])
    assert torch.equal(Multiplicative(7).embed(x, pos, w), expected)
    fresh = Multiplicative(7).init(Dims(4, 1, 4), None)
    assert torch.equal(Multiplicative(7).embed(x, pos, fresh), x)
    with pytest.raises(UserError, match="outside the table"):
        Multiplicative(7).embed(x, pos + 1, w)


def flow(start, inward, inward_bias, outward, outward_bias) -> dict[str, torch.Tensor]:
    names = ("start", "inward", "inward_bias", "outward", "outward_bias")
    values = (start, inward, inward_bias, outward, outward_bias)
    return {n: torch.tensor(v, dtype=torch.float64) for n, v in zip(names, values, strict=True)}


def errors(exact, w: dict) -> list[float]:
    """How far the path is from an exact one-dimensional solution, with 1, 2 and 4 steps."""
    expected = torch.tensor([exact(t) for t in range(9)], dtype=torch.float64)
    return [
        float((Floater(1, steps).path(9, w)[:, 0] - expected).abs().max()) for steps in (1, 2, 4)
    ]


def test_floater_follows_the_state():
    """dp/dt = tanh(a p): sinh(a p(t)) = sinh(a p(0)) e^(a t), to fourth order in the step."""
    a, p = 0.3, 0.4
    w = flow([p], [[a], [0.0]], [0.0], [[1.0]], [0.0])
    found = errors(lambda t: math.asinh(math.sinh(a * p) * math.exp(a * t)) / a, w)
    assert found[0] < 1e-3 and found[0] / found[1] > 10 and found[1] / found[2] > 10


def test_floater_follows_the_time():
    """dp/dt = tanh(t - 4) + 0.1: p(t) = p(0) + ln(cosh(t - 4)/cosh(4)) + 0.1 t."""
    w = flow([0.2], [[0.0], [1.0]], [-4.0], [[1.0]], [0.1])

    def exact(t):
        return 0.2 + math.log(math.cosh(t - 4) / math.cosh(4)) + 0.1 * t

    found = errors(exact, w)
    assert found[0] < 1e-2 and found[0] / found[1] > 10 and found[1] / found[2] > 10


def test_floater_codes_do_not_depend_on_what_else_is_asked():
    part, x = Floater(8), torch.zeros(1, 2, 6, dtype=torch.float64)
    w = {k: v.double() for k, v in part.init(Dims(6, 1, 6), RNG).items()}
    path = part.path(12, w)
    assert torch.equal(path[0], w["start"])
    assert torch.equal(part.path(5, w), path[:5])
    assert torch.equal(part.embed(x, torch.tensor([[3, 11]]), w)[0], path[[3, 11]])
    assert float((path[1:] - path[:-1]).abs().min(0).values.max()) > 0


@pytest.mark.parametrize("pos", [torch.tensor([[-1]]), torch.tensor([[0.5]])])
def test_floater_is_read_off_at_whole_positions(pos):
    w = Floater().init(Dims(6, 1, 6), RNG)
    with pytest.raises(UserError, match="integer positions"):
        Floater().embed(torch.zeros(1, 1, 6), pos, w)
