"""Every bias's term on a grid of pairs, against its paper's formula."""

import math

import pytest
import torch

from longitude import Dims, UserError
from longitude.core.part import PARTS
from longitude.parts import (
    T5,
    Alibi,
    AlibiInterpolated,
    Deberta,
    Fire,
    KerpleLog,
    KerplePower,
    NtkAlibi,
    Sandwich,
    Shaw,
    TransformerXl,
)
from longitude.parts.biases import bucket

B, H, D, SCALE = 2, 4, 6, 0.37
Q = torch.tensor([[0, 3, 4, 9, 150, 151], [5, 6, 7, 8, 40, 1000]])  # other positions in each batch
K = torch.tensor([[0, 1, 2, 3, 9, 149, 600], [8, 7, 6, 5, 0, 39, 999]])


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def evaluate(part, weights=None, heads=H, q=None, k=None, q_pos=Q, k_pos=K) -> torch.Tensor:
    """The term of every pair (b, h, i, j), from index tensors that broadcast."""
    b, nq, nk = max(len(q_pos), len(k_pos)), q_pos.shape[1], k_pos.shape[1]
    q = rand(b, heads, nq, D) if q is None else q
    k = rand(b, heads, nk, D, seed=1) if k is None else k
    term = part.term(q, k, q_pos, k_pos, weights or {}, SCALE)
    index = [torch.arange(size) for size in (b, heads, nq, nk)]
    grid = torch.meshgrid(*index, indexing="ij")
    whole = term(*grid)
    spread = [x.view([-1 if a == n else 1 for a in range(4)]) for n, x in enumerate(index)]
    torch.testing.assert_close(term(*spread).expand(whole.shape), whole)  # and by broadcasting
    return whole


def each(value, heads=H) -> torch.Tensor:
    """value(b, h, i, j, r) over the grid, r = position of the query minus that of the key."""
    cells = [[[[float(value(b, h, i, j, int(Q[b, i] - K[b, j]))) for j in range(K.shape[1])]
               for i in range(Q.shape[1])] for h in range(heads)] for b in range(B)]  # fmt: skip
    return torch.tensor(cells, dtype=torch.float64)


def same(got, expected, atol=1e-12) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-12, atol=atol)


def press(heads: int) -> list[float]:
    """The slopes of the ALiBi paper's own code."""

    def power(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power(heads)
    below = 2 ** math.floor(math.log2(heads))
    return power(below) + press(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", range(1, 129))
def test_alibi_for_every_head_count(heads):
    one = torch.tensor([[1]])
    got = evaluate(Alibi(), heads=heads, q_pos=one + 9, k_pos=one)[0, :, 0, 0]
    torch.testing.assert_close(
        got, -9 * torch.tensor(press(heads), dtype=torch.float64), rtol=1e-13, atol=0
    )


def test_one_row_of_positions_serves_every_batch():
    q, k = rand(B, H, 6, D), rand(B, H, 7, D)
    one, each_its_own = (
        evaluate(Alibi(), q=q, k=k, q_pos=a, k_pos=b)
        for a, b in ((Q[:1], K[:1]), (Q[:1].expand(B, -1), K[:1].expand(B, -1)))
    )
    assert torch.equal(one, each_its_own[:1])
    term = Alibi().term(q, k, Q[:1], K[:1], {}, SCALE)
    second, zero = torch.tensor(1), torch.tensor(0)
    assert torch.equal(term(second, zero, zero, torch.tensor(5)), one[0, 0, 0, 5])


def test_alibi_is_symmetric_by_default():
    same(evaluate(Alibi()), each(lambda b, h, i, j, r: -(2.0 ** (-2 * (h + 1))) * abs(r)))


@pytest.mark.parametrize(("future", "offset"), [(2.0, 0), (0, 0), (1, 0.5), (0.5, 3.0)])
def test_alibi_tells_sides_apart(future, offset):
    """Keys ahead at `future` times the slope, `offset` further away."""

    def value(b, h, i, j, r):
        return -(2.0 ** (-2 * (h + 1))) * (r if r >= 0 else future * (-r + offset))

    same(evaluate(Alibi(future, offset)), each(value))


def test_alibi_steepness_sets_the_shallowest_slope():
    """m_h = 2^(-s·h/H): MPT's alibi_bias_max."""
    same(evaluate(Alibi(steepness=4)), each(lambda b, h, i, j, r: -(2.0 ** -(h + 1)) * abs(r)))


def test_alibi_is_not_scaled_with_the_logits():
    q, k = rand(B, H, 6, D), rand(B, H, 7, D)
    zero = [torch.zeros((), dtype=torch.int64)] * 3 + [torch.tensor(5)]
    values = {float(Alibi().term(q * s, k, Q, K, {}, s)(*zero)) for s in (1.0, 0.01)}
    assert values == {-0.25 * 149}


def test_alibi_in_float32_for_half_precision_vectors():
    got = evaluate(Alibi(), q=rand(B, H, 6, D).bfloat16(), k=rand(B, H, 7, D).bfloat16())
    assert got.dtype == torch.float32
    same(got, evaluate(Alibi()))


@pytest.mark.parametrize("factor", [1, 2, 4.5])
def test_alibi_interpolated_divides_every_slope(factor):
    expected = each(lambda b, h, i, j, r: -(2.0 ** (-2 * (h + 1))) * abs(r) / factor)
    same(evaluate(AlibiInterpolated(factor)), expected)


def slopes(part, heads) -> torch.Tensor:
    one = torch.tensor([[1]])
    return -evaluate(part, heads=heads, q_pos=one, k_pos=one - 1)[0, :, 0, 0]


@pytest.mark.parametrize("heads", [2, 4, 8, 16, 32, 64])
def test_ntk_alibi_as_published_for_powers_of_two(heads):
    """m_h = 1 / (2^(8h/H) a^((h-1)/(H-1)))."""
    for a in (2.0, 4):
        published = [
            1 / (2 ** (8 * h / heads) * a ** ((h - 1) / (heads - 1))) for h in range(1, heads + 1)
        ]
        assert slopes(NtkAlibi(a), heads).tolist() == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("heads", [3, 12, 20, 40, 71, 112])
def test_ntk_alibi_ranks_slopes_for_other_head_counts(heads):
    """The steepest stays, the shallowest is divided by a, and slopes keep their order."""
    a, m = 4.0, torch.tensor(press(heads), dtype=torch.float64)
    got = slopes(NtkAlibi(a), heads)
    ratio = got / m
    assert float(ratio[m.argmax()]) == pytest.approx(1, rel=1e-13)
    assert float(ratio[m.argmin()]) == pytest.approx(1 / a, rel=1e-12)
    assert torch.equal(m.argsort(), got.argsort()) and torch.equal(m.argsort(), ratio.argsort())
    # geometric in between: log ratio is linear in log slope
    t = (m.log() - m.log().max()) / (m.log().min() - m.log().max())
    torch.testing.assert_close(ratio.log(), -t * math.log(a), rtol=0, atol=1e-12)


def test_ntk_alibi_of_one_head_is_alibi():
    assert slopes(NtkAlibi(4), 1).tolist() == slopes(Alibi(), 1).tolist()


def t5_bucket(r: int, buckets: int, top: int, both: bool) -> int:
    """exact + ⌊(n - exact) ln(r/exact)/ln(top/exact)⌋ past the exact ones; n buckets for a side."""
    n = buckets // 2 if both else buckets
    exact, ahead = n // 2, n if both and r < 0 else 0
    r = abs(r) if both else max(r, 0)
    if r < exact:
        return r + ahead
    share = (n - exact) * math.log(r / exact) / math.log(top / exact)
    return min(exact + math.floor(share + 1e-9), n - 1) + ahead


def test_t5_encoder_buckets():
    """The released checkpoints' buckets: half for each side, future keys 16 further."""
    edges = [7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91]
    into = [7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15]
    behind = torch.tensor([*range(8), *edges, 127, 128, 10**6])
    expected = torch.tensor([*range(8), *into, 15, 15, 15])
    assert torch.equal(bucket(behind, 32, 128, True), expected)
    ahead = behind > 0
    assert torch.equal(bucket(-behind[ahead], 32, 128, True), expected[ahead] + 16)


def test_t5_decoder_buckets():
    distances = torch.tensor([-5, 0, 1, 15, 16, 17, 18, 19, 112, 113, 127, 128, 10**6])
    expected = [0, 0, 1, 15, 16, 16, 16, 17, 30, 31, 31, 31, 31]
    assert bucket(distances, 32, 128, False).tolist() == expected


@pytest.mark.parametrize(
    ("buckets", "top", "both"), [(32, 128, True), (32, 128, False), (8, 20, True), (16, 500, False)]
)
def test_t5_buckets_are_log_spaced(buckets, top, both):
    r = range(-3 * top, 3 * top)
    got = bucket(torch.tensor(r), buckets, top, both).tolist()
    assert got == [t5_bucket(x, buckets, top, both) for x in r]


@pytest.mark.parametrize("both", [True, False])
def test_t5_adds_its_tables_entry(both):
    """At real positions too, where distances are rounded."""
    part, table = T5(bidirectional=both), rand(32, H)
    assert part.init(Dims(8, H, 2), torch.Generator())["table"].shape == (32, H)
    expected = each(lambda b, h, i, j, r: table[t5_bucket(r, 32, 128, both), h])
    same(evaluate(part, {"table": table}), expected)
    real = evaluate(part, {"table": table}, q_pos=Q.double() + 0.2, k_pos=K.double())
    same(real, expected)


@pytest.mark.parametrize(
    ("buckets", "top", "both"), [(30, 128, True), (1, 9, False), (32, 8, True), (32, 16, False)]
)
def test_t5_refuses_buckets_that_cannot_be(buckets, top, both):
    with pytest.raises(UserError):
        T5(buckets, top, both)


def test_fresh_weights_are_as_published():
    """KERPLE draws r1, p from U(0, 2) and r2, a from U(0, 1); tables start small."""
    rng, dims = torch.Generator().manual_seed(0), Dims(8, 4000, 2)
    made = KerpleLog().init(dims, rng) | KerplePower().init(dims, rng)
    for name, top in (("r1", 2), ("p", 2), ("r2", 1), ("a", 1)):
        w = made[name]
        assert float(w.min()) >= 0 and float(w.max()) <= top
        assert float(w.mean()) == pytest.approx(top / 2, rel=0.05)
    assert float(T5().init(dims, rng)["table"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(Deberta().init(Dims(8, 8, 64), rng)["keys"].std()) == pytest.approx(0.02, rel=0.05)


def test_kerple_log():
    w = {"r1": torch.tensor([0.5, 1.9, 0.0, -3.0]), "r2": torch.tensor([1.5, 0.001, 0.7, 2.0])}
    w = {name: x.double() for name, x in w.items()}

    def value(b, h, i, j, r):
        r1, r2 = max(float(w["r1"][h]), 0.01), max(float(w["r2"][h]), 0.01)
        return -r1 * math.log(1 + r2 * abs(r))

    same(evaluate(KerpleLog(), w), each(value))


def test_kerple_power():
    w = {"a": torch.tensor([0.5, 1.9, 0.0, 1.0]), "p": torch.tensor([1.5, 0.001, 0.7, 7.0])}
    w = {name: x.double() for name, x in w.items()}

    def value(b, h, i, j, r):
        a, p = max(float(w["a"][h]), 0.01), min(max(float(w["p"][h]), 0.01), 2.0)
        return -a * abs(r) ** p

    same(evaluate(KerplePower(), w), each(value))


@pytest.mark.parametrize("part", [KerpleLog(), KerplePower()], ids=str)
def test_kerple_weights_are_clamped_where_read_and_learn(part):
    w = part.init(Dims(8, H, 2), torch.Generator().manual_seed(1))
    before = {name: x.clone() for name, x in w.items()}
    leaves = {name: x.requires_grad_() for name, x in w.items()}
    evaluate(part, leaves, q=rand(B, H, 6, D).float(), k=rand(B, H, 7, D).float()).sum().backward()
    for name, x in leaves.items():
        assert torch.equal(x.detach(), before[name])
        assert bool(x.grad.isfinite().all()) and bool((x.grad != 0).any())


def test_fire():
    """f(ψ(i-j)/ψ(max(L, i))), ψ(x) = ln(c x + 1), f = W₂ ReLU(W₁ x + b₁) + b₂."""
    hidden = 5
    w = {
        "inward": rand(hidden),
        "inward_bias": rand(hidden, seed=1),
        "outward": rand(hidden, H, seed=2),
        "outward_bias": rand(H, seed=3),
        "c": torch.tensor(0.25, dtype=torch.float64),
        "multiplier": torch.tensor(0.5, dtype=torch.float64),
    }

    def psi(x):
        return math.log(0.25 * x + 1)

    def value(b, h, i, j, r):
        x = psi(abs(r)) / (psi(max(0.5 * 20, int(Q[b, i]))) + 1e-6)
        out = float(w["outward_bias"][h])
        for u in range(hidden):
            unit = max(0.0, float(w["inward"][u]) * x + float(w["inward_bias"][u]))
            out += unit * float(w["outward"][u, h])
        return out

    same(evaluate(Fire(hidden, threshold=20), w), each(value))
    fresh = Fire().init(Dims(8, H, 2), torch.Generator())
    assert float(fresh["c"]) == pytest.approx(0.1) and fresh["outward"].shape == (32, H)


def test_fire_rows_do_not_change_as_keys_arrive():
    w = {name: x.double() for name, x in Fire().init(Dims(8, H, 2), torch.Generator()).items()}
    whole = evaluate(Fire(), w)
    q, k = rand(B, H, 2, D), rand(B, H, 3, D)
    part = evaluate(Fire(), w, q=q, k=k, q_pos=Q[:, :2], k_pos=K[:, :3])
    assert torch.equal(whole[:, :, :2, :3], part)


@pytest.mark.parametrize(
    ("q", "k", "least"),
    [(range(90), range(90), 0), (range(60, 100), range(100), 0), (range(90), range(90), -89)],
)
def test_fire_by_a_table_is_off_by_half_a_step_at_most(q, k, least):
    """Times f's steepest slope, which no sum of all units' slopes falls below."""
    w = {name: x.double() for name, x in Fire().init(Dims(8, H, 2), torch.Generator()).items()}
    q_pos, k_pos = torch.tensor([*q])[None], torch.tensor([*k])[None]
    term = Fire(threshold=20).term(rand(1, H, len(q), D), rand(1, H, len(k), D), q_pos, k_pos, w, 1)
    table, pace, c, steepest = term.by_share(q, k, least, 3)  # type: ignore[attr-defined]
    assert len(pace) == len(q) + 3 and torch.equal(c, w["c"])
    away = q_pos[0, :, None] - k_pos
    entry = (torch.log2(1 + c * away.abs()) * pace[: len(q), None] + 0.5).long()
    exact = evaluate(Fire(threshold=20), w, q_pos=q_pos, k_pos=k_pos)[0]
    slopes = (w["inward"][:, None] * w["outward"]).abs().sum(0).max()
    off = (table[:, entry.clamp(max=2**14)] - exact).abs()[:, away >= least].max()
    end = 2 if least < 0 else 1  # the largest share
    assert 0 < off <= slopes * end / 2**14 / 2 and bool((steepest <= slopes * end * 1.01).all())


@pytest.mark.parametrize("dim", [128, 8])
def test_sandwich(dim):
    """H/(8h) Σ_t cos(r 10000^(-2t/dim)), h from 1."""

    def value(b, h, i, j, r):
        return (
            H / (8 * (h + 1)) * sum(math.cos(r * 10000 ** (-2 * t / dim)) for t in range(dim // 2))
        )

    same(evaluate(Sandwich(dim)), each(value))


def test_sandwich_keeps_its_phase_far_out():
    far = torch.tensor([[10_000_000]])
    got = evaluate(Sandwich(), heads=1, q=rand(1, 1, 1, D).float(), k=rand(1, 1, 1, D).float(),
                   q_pos=far, k_pos=far * 0)  # fmt: skip
    exact = sum(math.cos(1e7 * 10000 ** (-2 * t / 128)) for t in range(64)) / 8
    assert float(got) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("clip", [1, 3, 16])
def test_shaw_keys(clip):
    """q_i · a^K[clip(j - i)]: the offset is the key's minus the query's; heads share the table."""
    q, table = rand(B, H, 6, D), rand(2 * clip + 1, D, seed=4)

    def value(b, h, i, j, r):
        return SCALE * q[b, h, i] @ table[min(max(-r, -clip), clip) + clip]

    same(evaluate(Shaw(clip), {"keys": table}, q=q), each(value))


def test_shaw_values():
    """Σ_j α_ij a^V[clip(j - i)]."""
    clip, table = 3, rand(7, D, seed=4)
    weights = rand(B, H, 6, 7).softmax(-1)
    got = Shaw(clip, values=True).value_term(weights, Q, K, {"values": table})
    expected = torch.zeros(B, H, 6, D, dtype=torch.float64)
    for b in range(B):
        for i in range(6):
            for j in range(7):
                row = min(max(int(K[b, j] - Q[b, i]), -clip), clip) + clip
                expected[b, :, i] += weights[b, :, i, j, None] * table[row]
    same(got, expected)
    made = Shaw(clip, values=True).init(Dims(8, H, D), torch.Generator())
    assert {name: tuple(x.shape) for name, x in made.items()} == {"keys": (7, D), "values": (7, D)}
    assert set(Shaw(clip).init(Dims(8, H, D), None)) == {"keys"}


def wave(r: float, dim: int) -> torch.Tensor:
    angles = [r * 10000 ** (-2 * t / dim) for t in range(dim // 2)]
    both = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(both, dtype=torch.float64)


@pytest.mark.parametrize("clamp", [0, 5])
@pytest.mark.parametrize("shared", [1, 2])
def test_transformer_xl(clamp, shared):
    """(q + v)·(W R_r) + u·k, times the scale."""
    dim, q, k = 10, rand(B, H, 6, D), rand(B, H // shared, 7, D, seed=1)
    w = {"relative": rand(H, D, dim, seed=2), "u": rand(H, D, seed=3), "v": rand(H, D, seed=4)}

    def value(b, h, i, j, r):
        r = min(max(r, -clamp), clamp) if clamp else r
        key = w["relative"][h] @ wave(r, dim)
        content = w["u"][h] @ k[b, h // shared, j]
        return SCALE * ((q[b, h, i] + w["v"][h]) @ key + content)

    same(evaluate(TransformerXl(clamp), w, q=q, k=k), each(value), atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_transformer_xl_rounds_nothing_of_its_position_scores(dtype):
    """In half precision q keeps its digits, and what it is multiplied by comes in two parts."""
    dim, heads, tokens, size = 64, 2, 48, 32
    q, k = (rand(1, heads, tokens, size, seed=n).to(dtype) for n in range(2))
    w = {"relative": rand(heads, size, dim) / 8, "u": rand(heads, size), "v": rand(heads, size)}
    pos = torch.arange(tokens)[None]

    def of_position(part, q, k, w):  # without the products of keys and u
        return part.term(q, k, pos, pos, w | {"u": 0 * w["u"]}, SCALE).rows

    got = of_position(TransformerXl(), q, k, {n: x.float() for n, x in w.items()})
    want = of_position(TransformerXl(), q.double(), k.double(), w)
    assert got.dtype == torch.float32
    error = (got.double() - want).norm() / want.norm()
    assert error < 2e-3 * torch.finfo(dtype).eps  # 0.17 with vectors rounded, 0.56 with q + v, too


@pytest.mark.parametrize(("c2p", "p2c"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shared", [1, 2])
def test_deberta(c2p, p2c, shared):
    """q_i·K[δ(i,j)] + k_j·Q[δ(i,j)], δ = clip(i - j + s, 0, 2s - 1): both by i - j, as released."""
    s, part = 8, Deberta(8, c2p=c2p, p2c=p2c)
    q, k = rand(B, H, 6, D), rand(B, H // shared, 7, D, seed=1)
    w = {"keys": rand(H, 2 * s, D, seed=2), "queries": rand(H, 2 * s, D, seed=3)}

    def value(b, h, i, j, r):
        row = min(max(r + s, 0), 2 * s - 1)
        here = q[b, h, i] @ w["keys"][h, row] if c2p else 0
        return SCALE * (here + (k[b, h // shared, j] @ w["queries"][h, row] if p2c else 0))

    same(evaluate(part, w, q=q, k=k), each(value))
    terms = 1 + c2p + p2c
    assert part.softmax_scale(64) == pytest.approx(1 / math.sqrt(64 * terms), rel=1e-15)
    made = part.init(Dims(8, H, D), torch.Generator())
    assert set(made) == {n for n, used in (("keys", c2p), ("queries", p2c)) if used}


def test_deberta_paper_would_index_the_last_term_the_other_way():
    part, w = Deberta(8, c2p=False), {"queries": rand(H, 16, D, seed=3)}
    k = rand(B, H, 7, D, seed=1)
    papers = each(
        lambda b, h, i, j, r: SCALE * k[b, h, j] @ w["queries"][h, min(max(-r + 8, 0), 15)]
    )
    assert not torch.allclose(evaluate(part, w, k=k), papers)


@pytest.mark.parametrize(("buckets", "span"), [(16, 64), (256, 512), (4, 9), (2, 100)])
def test_deberta_log_buckets(buckets, span):
    """sign(r) (⌈ln(|r|/m)/ln((span-1)/m) (m-1)⌉ + m) beyond m = buckets/2, r itself up to it."""
    part, mid = Deberta(span, buckets), buckets // 2
    distances = range(-3 * span, 3 * span + 1)
    for r, got in zip(distances, part.delta(torch.tensor(distances)).tolist(), strict=True):
        index = r
        if abs(r) > mid:
            share = math.log(abs(r) / mid) / math.log((span - 1) / mid) * (mid - 1)
            if share % 1 and min(share % 1, 1 - share % 1) < 1e-4:
                continue  # float32 decides, as in the released code
            index = int(math.copysign(math.ceil(share) + mid, r))
        expected = min(max(index + buckets, 0), 2 * buckets - 1)
        assert got == expected


@pytest.mark.parametrize(("span", "buckets"), [(512, 1), (512, -4), (512, 1022), (1, 2)])
def test_deberta_refuses_buckets_that_cannot_be(span, buckets):
    with pytest.raises(UserError, match="256 is usual"):
        Deberta(span, buckets)


FLAT = [T5(), T5(8, 20, True), Shaw(5), Deberta(9), Deberta(64, 16), TransformerXl(4)]


@pytest.mark.parametrize("part", FLAT, ids=str)
def test_flat_beyond_is_where_the_term_stops_changing(part):
    """Equal for all distances from there on, for both signs, whatever the vectors."""
    w = {n: x.double() for n, x in part.init(Dims(8, H, D), torch.Generator()).items()}
    edge = part.flat_beyond
    for sign in (1, -1):
        k_pos = torch.tensor([[0]])
        q_pos = sign * torch.tensor([[edge, edge + 1, 2 * edge, 50 * edge]])
        q = rand(1, H, 1, D).expand(1, H, 4, D)
        got = evaluate(part, w, q=q, k=rand(1, H, 1, D), q_pos=q_pos, k_pos=k_pos)
        assert torch.equal(got, got[:, :, :1].expand_as(got))


def test_keys_behind_need_no_vectors_of_keys_ahead():
    for part in (Shaw(5), Deberta(9), Deberta(64, 16), TransformerXl(4), TransformerXl()):
        w = {n: x.double() for n, x in part.init(Dims(8, H, D), torch.Generator()).items()}
        for q_pos, k_pos in (
            (range(3, 40), range(40)),
            (range(9), range(40)),
            (range(3), range(3, 9)),
        ):
            q, k = rand(1, H, len(q_pos), D), rand(1, H, len(k_pos), D, seed=1)
            rows = [torch.tensor([*pos])[None] for pos in (q_pos, k_pos)]
            term = part.term(q, k, *rows, w, SCALE)
            b, h, i, j = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)])
                          for axis, n in enumerate((1, H, len(q_pos), len(k_pos))))  # fmt: skip
            seen = (rows[0].mT >= rows[1]).expand(1, H, -1, -1)
            few = term.behind()
            torch.testing.assert_close(few(b, h, i, j)[seen], term(b, h, i, j)[seen])
            many, left = (x.rows[0] if isinstance(part, Deberta) else x.rows for x in (term, few))
            assert left.shape[-1] <= max(1, many.shape[-1] // 2 + 1) or part == TransformerXl()


def test_other_biases_never_go_flat():
    flat = {type(p).name for p in FLAT}
    names = [n for n, p in PARTS.items() if p.site == "bias" and n not in flat]
    scaled = ("alibi_interpolated", "ntk_alibi")
    other = [PARTS[n](4) if n in scaled else PARTS[n]() for n in names]
    assert other and all(p.flat_beyond is None for p in other)
    assert TransformerXl().flat_beyond is None


def test_transformer_xl_clamps_keys_that_all_lie_beyond():
    dims = Dims(16, 2, 4)
    s = TransformerXl(clamp=3)
    weights = s.init(dims, torch.Generator().manual_seed(0))
    q, k = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 5))
    far, near = torch.tensor([[40, 41]]), torch.arange(5)[None]
    grid = [
        torch.arange(n).view(shape)
        for n, shape in ((1, (-1, 1, 1, 1)), (2, (-1, 1, 1)), (2, (-1, 1)), (5, (-1,)))
    ]
    got = s.term(q, k, far, near, weights, 0.5)(*grid)
    edge = s.term(q, k, torch.tensor([[7, 7]]), near, weights, 0.5)(*grid)  # distances 3 to 7
    assert torch.allclose(got, edge, atol=1e-6)
