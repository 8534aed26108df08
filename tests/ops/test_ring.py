"""Attention over four ranks equals one process: every scheme, outputs and gradients, however the
ranks hold the tokens. The processes are begun once (`ring_cells.py`) and run all cells."""

from __future__ import annotations

from typing import Any

import pytest

from longitude.core.region import Area, Chunks
from longitude.ops.shards import Run, runs
from tests.ops.ring_cells import RANKS, TRAFFIC, WAYS
from tests.processes import run

TOLERANCE = 1e-10
AXES = ("rope_axial", "rope_mixed")  # of images


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes found."""
    return run("tests.ops.ring_cells", tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.parametrize("way", WAYS)
def test_every_scheme_over_four_ranks_equals_one_process(
    ranks: list[dict[str, Any]], way: str, record_property: Any
) -> None:
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    for cell in zip(*(found["cells"] for found in ranks), strict=True):
        (name, of, _), values = cell[0], [value for _, _, value in cell]
        if of == way and any(isinstance(value, str) for value in values):
            assert len(set(values)) == 1, f"the ranks differ: {values}"
            refused[name] = values[0]
        elif of == way:
            errors[name] = max(values)
    record_property("cells ran", len(errors))
    record_property("cells refused", len(refused))
    assert errors and all(error <= TOLERANCE for error in errors.values()), errors
    by_head, axes = "parameters per head", "several positions per token"
    assert all(axes in why or (by_head in why and way == "heads") for why in refused.values())
    assert all(name in AXES for name, why in refused.items() if axes in why)


SENTENCES = {
    "schemes": "rank 0 and rank 2 call attention with different schemes",
    "dtypes": "rank 0 and rank 2 call attention with different dtypes",
    "heads": "rank 0 and rank 2 call attention with different batches, heads or head sizes",
    "gradients": "rank 0 and rank 2 call attention with different needs of gradients",
    "ranges overlap": "ranks 0 and 1 both hold a key at position 6",
    "positions overlap": "ranks 0 and 1 both hold a key at position 0",
    "segments overlap": "ranks 0 and 1 both hold a key at position 0",
    "one rank": "rank 2 rejected its inputs: see the error on that rank",
    "heads don't divide": "2 query heads and 2 key heads can't be split over 4 ranks",
    "heads have terms": "alibi() has parameters per head",
    "flex": "flex can't run over a group",
    "dropout": "dropout can't be merged across ranks",
    "split": "split is tokens, heads or keys, but got 'rows'",
    "keys with gradients": "split='keys' serves decoding",
}


@pytest.mark.parametrize("mistake", SENTENCES)
def test_a_mistake_is_a_sentence_on_every_rank(ranks: list[dict[str, Any]], mistake: str) -> None:
    for rank, found in enumerate(ranks):
        said = dict(found["mistakes"])[mistake]
        if (mistake, rank) == ("one rank", 2):  # whose own positions don't fit its tokens
            assert said.startswith("q_pos must hold positions")
        else:
            assert said.startswith(SENTENCES[mistake])
        assert said.endswith(".") and "\n" not in said
    assert {name for name, _ in ranks[0]["mistakes"]} == set(SENTENCES)


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_bytes_sent_are_those_of_the_formula(ranks: list[dict[str, Any]], name: str) -> None:
    """docs/guides/parallel.md: b n hkv (d + dv) e for each block passed on, and in the backward 4
    bytes per number for each other rank's block worked on."""
    counts = [len(tokens) for tokens in TRAFFIC[name][1]]
    block = [2 * n * 2 * (8 + 8) * 4 for n in counts]
    # how many ranks on from its own a block goes
    hops = {
        # rank 1 has no tokens; the last rank's keys are seen by no one else
        "causal": [3, 0, 1, 0], "bidirectional": [3, 0, 2, 3], "zigzag": [3, 3, 3, 3],
        "window": [1, 1, 1, 0],
    }[name]  # fmt: skip
    for rank in range(RANKS):
        away = {owner: (rank - owner) % RANKS for owner in range(RANKS)}
        on = sum(block[owner] for owner in range(RANKS) if away[owner] < hops[owner])
        worked = sum(block[owner] for owner in range(RANKS) if 0 < away[owner] <= hops[owner])
        assert ranks[rank]["traffic"][name] == [on, on + worked]


def test_what_is_cut_is_put_together_again(ranks: list[dict[str, Any]]) -> None:
    assert all(found["helpers"] for found in ranks)


def test_an_area_reaches_where_it_shows_a_pair() -> None:
    window = Area(lo=0, hi=4)
    assert window.reaches((10, 19), (0, 9)) and not window.reaches((20, 29), (0, 9))
    assert not window.reaches((0, 9), (10, 19))  # ahead
    assert not Area(top=30).reaches((0, 9), (0, 9)) and not Area(last=5).reaches((0, 9), (5, 9))
    own = Area(chunks=(Chunks(8, 0, 1),))
    assert own.reaches((8, 15), (15, 20)) and not own.reaches((8, 15), (16, 20))


def test_positions_are_runs_where_they_are_few() -> None:
    import torch

    assert runs(range(3, 7)) == [Run(slice(0, 4), range(3, 7))]
    zigzag = torch.tensor([[0, 1, 6, 7]])
    assert runs(zigzag) == [Run(slice(0, 2), range(2)), Run(slice(2, 4), range(6, 8))]
    padding, ids = torch.arange(5)[None] == 1, torch.tensor([[4, 4, 4, 4, 9]])
    pieces = [(slice(0, 1), range(1)), (slice(2, 4), range(2, 4)), (slice(4, 5), range(4, 5))]
    found = runs(range(5), padding, ids)
    assert found == [Run(*piece, n) for piece, n in zip(pieces, (4, 4, 9), strict=True)]
    assert runs(range(5), torch.cat([padding, ~padding])) is None  # rows differ
    assert runs(torch.arange(0, 100, 2)[None]) is None
    assert runs(torch.rand(1, 4)) is None and runs(zigzag.expand(2, -1)) is None
