"""Runs of consecutive tokens, and what padding and packing leave of a batch."""

from __future__ import annotations

import torch

from longitude.hf.layer import as_range, token_runs


def test_a_range_is_seen():
    assert as_range(torch.arange(5, 9).expand(3, -1)) == range(5, 9)
    assert as_range(torch.tensor([[0, 1, 3]])) is None
    assert as_range(torch.tensor([[0, 1], [1, 2]])) is None


def told(found):
    plain = [p.tokens if isinstance(p.tokens, slice) else p.tokens.tolist() for p in found]
    places = [p.pos if isinstance(p.pos, range) else p.pos.tolist() for p in found]
    return list(zip([p.rows for p in found], plain, places, strict=True))


def test_left_padding_leaves_ranges_and_alike_rows_run_together():
    hidden = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
    pos = (~hidden).cumsum(1) - 1
    assert told(token_runs(pos.clamp(min=0), hidden)) == [
        ([0, 2], slice(2, 4), range(0, 2)),
        ([1], slice(0, 4), range(0, 4)),
    ]


def test_a_position_that_does_not_grow_begins_another_document():
    found = token_runs(torch.tensor([[0, 1, 2, 0, 1, 0]]), None)
    assert told(found) == [
        ([0], slice(0, 3), range(0, 3)),
        ([0], slice(3, 5), range(0, 2)),
        ([0], slice(5, 6), range(0, 1)),
    ]


def test_gaps_are_no_boundaries():
    assert told(token_runs(torch.tensor([[3, 7, 20]]), None)) == [([0], slice(0, 3), [3, 7, 20])]


def test_holes_in_the_mask_are_skipped():
    hidden = torch.tensor([[0, 1, 0]]).bool()
    assert told(token_runs(torch.tensor([[0, 1, 2]]), hidden)) == [([0], [0, 2], [0, 2])]


def test_a_row_of_padding_has_no_piece():
    assert token_runs(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3).bool()) == []
