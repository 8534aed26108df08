"""Remaps by the query's own position: AdaGroPE by counting, llama.cpp's groups by its cache."""

import pytest
import torch

from longitude import UserError, parse
from longitude.inspection.score_variance import remapped_distance
from longitude.parts import AdaGroPE, GroupAttention, Rope

N = 70
i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]
CAUSAL = i >= j


def believed(remap) -> torch.Tensor:
    """The distance of each pair of a causal call, which every one of them must have."""
    got = remapped_distance(parse(f"rope(remap={remap})"), i, j)
    assert not got[CAUSAL].isnan().any() and got[~CAUSAL].isnan().all()
    return got


def counted(positions, share, query):
    """For a query, the reuse of each position: 1, 2, 4, … as often as asked, then n each, with the
    least n that reaches it."""
    n = 1
    while True:
        counts, k = [], 1
        while k < n:
            counts += [k] * int(share * positions / k)
            k *= 2
        counts += [n] * (positions - len(counts))
        if sum(counts) > query:
            return counts
        n += 1


@pytest.mark.parametrize(("positions", "share"), [(16, 0.25), (12, 0.4), (30, 0.1), (100, 0.25)])
def test_adagrope_reuses_far_positions_as_often_as_the_length_needs(positions, share):
    got = believed(AdaGroPE(positions, share))
    for m in range(N):
        counts = counted(positions, share, m)
        for n in range(m + 1):
            level, true, effective = 1, 0, 0  # the level that holds m - n, and where it starts
            for k in sorted(set(counts)):
                if m - n >= true:
                    level, start, first = k, true, effective
                true, effective = true + k * counts.count(k), effective + counts.count(k)
            want = m // level - n // level + first - -(-start // level)
            assert got[m, n] == want
            position, left = 0, m - n  # the one that counting from the query on comes to
            while left >= counts[position]:
                position, left = position + 1, left - counts[position]
            assert abs(want - position) <= 1


def test_adagrope_reaches_what_counting_says():
    """P = 16, ρ = 1/4: with every position used at most n times 16, 28, 38, 48, 57 tokens."""
    assert [AdaGroPE(16).end(b) for b in range(5)] == [16, 28, 38, 48, 57]
    assert float(believed(AdaGroPE(16))[CAUSAL].max()) <= 16


@pytest.mark.parametrize(("group", "window"), [(4, 8), (3, 9), (2, 16), (1, 5), (8, 8)])
def test_group_attention_is_what_llama_cpp_does_to_its_cache(group, window):
    """Its loop, token by token: positions are added to, divided and added to again."""
    positions: list[int] = []
    past = squeezed = 0
    expected = torch.full((N, N), torch.nan, dtype=torch.float64)
    for token in range(N):
        while past >= squeezed + window:
            before = group * squeezed // window * (window // group * (group - 1))
            less = window // group * (group - 1)
            move = window // group - before - window
            shifted = [p + before if p >= squeezed else p for p in positions]
            low, high = squeezed + before, squeezed + before + window
            divided = [p // group if low <= p < high else p for p in shifted]
            positions = [
                d + move if s >= high else d for s, d in zip(shifted, divided, strict=True)
            ]
            past, squeezed = past - less, squeezed + window // group
        positions.append(past)
        past += 1
        expected[token, : token + 1] = positions[-1] - torch.tensor(positions)
    torch.testing.assert_close(believed(GroupAttention(group, window)), expected, equal_nan=True)


def test_bands_meet_every_row_once():
    remap = AdaGroPE(16)
    rows = torch.tensor([[3, 61, 29], [3, 15, 16]])
    assert remap.sample(rows) == (3, 15, 16, 29, 61)
    rope = Rope(remap=remap)
    areas = [r.where for r in rope.regions(rope.query_rows(range(N)))]
    assert (sum(a.visible(i, j).int() for a in areas) == 1).all()


@pytest.mark.parametrize(
    "text", ["adagrope(3)", "adagrope(16, share=0.5)", "group_attention(3, 8)"]
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(UserError, match=text.split("(")[0]):
        parse(f"rope(remap={text})")
