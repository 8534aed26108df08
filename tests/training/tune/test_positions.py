"""The policies against their definitions."""

from __future__ import annotations

import pytest
import torch

from longitude.core.validate import UserError
from longitude.training.tune.data import drawn, in_order, policy, positions

ONE = torch.zeros(5, 40, dtype=torch.int64)  # five rows of one document each


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_pose_cuts_a_row_into_chunks_whose_skips_do_not_decrease(chunks):
    part = policy(f"pose({chunks})", 320, 40)
    reached = set()
    for step in range(60):
        for row in positions(part, ONE, seed=1, step=step).tolist():
            skips = [at - index for index, at in enumerate(row)]
            assert row[0] == 0 and row[-1] < 320
            assert skips == sorted(skips)  # inside a chunk a skip stays the same
            assert len(set(skips)) <= chunks
            reached.add(row[-1])
    assert max(reached) > 300 and len(reached) > 100


def test_randomized_are_sorted_draws_without_repetition():
    part = policy("randomized", 320, 40)
    rows = [r for step in range(20) for r in positions(part, ONE, seed=0, step=step).tolist()]
    assert all(len(set(row)) == 40 and row == sorted(row) for row in rows)
    assert {at for row in rows for at in row} >= {0, 319}


def test_draws_follow_from_seed_step_and_row_alone():
    part = policy("pose", 320, 40)
    first = positions(part, ONE, seed=3, step=7)
    assert torch.equal(first, positions(part, ONE, seed=3, step=7))
    assert not torch.equal(first, positions(part, ONE, seed=3, step=8))
    assert not torch.equal(first, positions(part, ONE, seed=4, step=7))
    assert len({tuple(row) for row in first.tolist()}) > 1


def test_in_order_begins_at_0_in_every_document():
    segments = torch.tensor([[0, 0, 0, 1, 1, 4], [0, 1, 2, 2, 2, 2]])
    assert in_order(segments).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert torch.equal(positions(policy("order", 80, 6), segments, 0, 0), in_order(segments))
    assert not drawn(policy("order", 80, 6)) and drawn(policy("randomized", 80, 6))


@pytest.mark.parametrize("written", ["skips", "order(3)", "pose(two)", ""])
def test_unknown_policies_are_refused(written):
    with pytest.raises(UserError, match=r"order, pose, pose\(4\)"):
        policy(written, 320, 40)


def test_more_tokens_than_positions_are_refused_at_once():
    with pytest.raises(UserError, match="do not fit"):
        policy("pose", 32, 40)
