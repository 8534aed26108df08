"""Remaps by the query's own position: AdaGroPE by counting, llama.cpp's groups by its cache."""

import math

import pytest
import torch

from longitude import UserError, parse
from longitude.inspection.score_variance import remapped_distance
from longitude.parts import AdaGroPE, GroupAttention, Lampe, Rope

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


@pytest.mark.parametrize(("head", "tail", "step"), [(5, 2, 10), (8, 0, 25), (30, 4, 7), (4, 3, 70)])
def test_lampe_maps_three_ranges_of_distance(head, tail, step):
    reach, rate, offset = 40, 0.05, -2.0
    got = believed(Lampe(reach, rate, offset, head, tail, step))
    for query in range(N):
        length = step * math.ceil((query + 1) / step)
        mapped = math.floor(reach / (1 + math.exp(-(rate * length + offset))))
        mapped = max(mapped, head + tail + 1)
        squeezed = length >= 2 * head and mapped < length
        for key in range(query + 1):
            r = query - key
            want = r
            if squeezed and r >= length - tail:
                want = mapped - length + r
            elif squeezed and r > head:
                share = (mapped - head - tail) / (length - head - tail)
                want = share * (r - head) + head
            assert float(got[query, key]) == pytest.approx(want, abs=1e-9)


def test_lampes_published_fits():
    """m at 8k, 16k, 32k and 64k of Llama-3-8B's fit."""
    fit = parse("lampe_llama3()").rotary.remap
    mapped = [fit.mapped(n * 1024) for n in (8, 16, 32, 64)]
    assert mapped == pytest.approx([1036, 1993, 4501, 6129], abs=1)


def test_bands_meet_every_row_once():
    remap = AdaGroPE(16)
    rows = torch.tensor([[3, 61, 29], [3, 15, 16]])
    assert remap.sample(rows) == (3, 15, 16, 29, 61)
    for one in (remap, Lampe(40, 0.05, -2, 4, 3, 10)):
        rope = Rope(remap=one)
        areas = [r.where for r in rope.regions(rope.query_rows(range(N)))]
        assert (sum(a.visible(i, j).int() for a in areas) == 1).all()


@pytest.mark.parametrize(
    "text", ["adagrope(3)", "adagrope(16, share=0.5)", "group_attention(3, 8)"]
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(UserError, match=text.split("(")[0]):
        parse(f"rope(remap={text})")
