"""DPE: a group size for each band of rotary pairs, against the paper's formula in float64."""

import pytest
import torch

from longitude import Cache, UserError, attention, explain, parse
from longitude.core.part import Region
from longitude.core.region import PairShifts, Shift
from longitude.ops.decode import supports
from longitude.parts import DimensionWise, Rope
from longitude.parts.rotary_tables import cos_sin

N, D = 40, 16
GROUPS = (2, 3, 1, 8)
Q, K, V = torch.randn(
    3, 1, 2, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
)


def written_again(groups, window, exact=()):
    """Every score from the distance that each pair of dimensions sees, one pair at a time."""
    pairs = D // 2
    scores = torch.zeros(1, 2, N, N, dtype=torch.float64)
    for m in range(N):
        for n in range(m + 1):
            for i in range(pairs):
                g = groups[i // (pairs // len(groups))]
                far = m - n >= window and i not in exact
                r = m // g - n // g + window - window // g if far else m - n
                angle = torch.tensor(r * 10000.0 ** (-2 * i / D), dtype=torch.float64)
                a, b = Q[:, :, m, i], Q[:, :, m, i + pairs]
                c, d = K[:, :, n, i], K[:, :, n, i + pairs]
                scores[:, :, m, n] += (a * c + b * d) * angle.cos() + (a * d - b * c) * angle.sin()
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    return (scores / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ V


@pytest.mark.parametrize("exact", [(), (0, 5)])
def test_each_band_of_pairs_has_its_own_groups(exact):
    want = written_again(GROUPS, 8, exact)
    scheme = parse(f"rope(remap=dimension_wise({GROUPS}, window=8, exact={exact}))")
    for backend in ("eager", "native", "auto"):
        got = attention(scheme, Q, K, V, range(N), range(N), backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    cache, steps = Cache(scheme, length=N), []
    for t in range(N):
        here = slice(t, t + 1)
        keys = cache.update(K[:, :, here], V[:, :, here], range(t, t + 1))
        steps.append(attention(scheme, Q[:, :, here], *keys[:2], range(t, t + 1), keys[2]))
    torch.testing.assert_close(torch.cat(steps, 2), want, rtol=0, atol=1e-12)


def test_equal_groups_are_self_extend_to_the_bit():
    of = {
        text: attention(parse(f"rope(remap={text})"), Q, K, V, range(N), range(N))
        for text in ("self_extend(3, 8)", "dimension_wise((3, 3, 3, 3), window=8)")
    }
    assert torch.equal(*of.values())
    one = Shift(divide=3, floor=True, add=6)  # and so are the tables of pairs, one by one
    regions = Region(q=one), Region(q=PairShifts((one, one), exact=()))
    how = {"dtype": torch.float64, "device": torch.device("cpu")}
    plain, banded = (cos_sin(Rope(), r, "q", range(N), D, N, **how) for r in regions)
    assert all(map(torch.equal, plain, banded))


def test_the_decoding_kernel_leaves_it_to_others():
    assert supports(parse("rope(remap=self_extend(3, 8))"))
    assert not supports(parse(f"rope(remap=dimension_wise({GROUPS}, window=8))"))
    shown = str(
        explain(parse(f"rope(remap=dimension_wise({GROUPS}, 8))"), Q, K, V, range(N), range(N))
    )
    assert "⌊j/2⌋, ⌊j/3⌋, j, ⌊j/8⌋ by band of pairs" in shown


@pytest.mark.parametrize(
    "text", [f"dimension_wise({(2,) * 8 + (3,)}, 8)", "dimension_wise((2, 3), 8, exact=(8,))"]
)
def test_more_bands_than_pairs_are_refused(text):
    with pytest.raises(UserError, match="of 8 pairs"):
        attention(parse(f"rope(remap={text})"), Q, K, V, range(N), range(N))


def test_groups_must_be_positive():
    with pytest.raises(UserError, match="positive"):
        DimensionWise((2, 0))
