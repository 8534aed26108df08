"""Training sequences: packed documents, and position policies against their definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longitude.core.validate import UserError
from longitude.training.data import gather
from longitude.training.to_hf import byte_tokenizer
from longitude.training.tune.data import position_policy, positions, token_stream

ONE = torch.zeros(5, 40, dtype=torch.int64)  # five rows of one document each
ORDER, EVERY = position_policy("order", 4096, 64), 10**9


def made(folder, length=64, part=ORDER, most=EVERY, seed=0):
    return token_stream([str(folder)], byte_tokenizer(), part, length, most, seed)


def test_every_document_is_there_once_and_ended(folder):
    found = made(folder)
    texts = bytes(found.tokens.tolist()).split(b"\0")[:-1]
    assert sorted(texts) == sorted(gather([str(folder)]).train)
    owners = found.document[found.tokens == 0].tolist()
    assert owners == list(range(len(texts)))


def test_packed_documents_stand_apart(folder):
    found = made(folder, 200)
    assert found.packed
    packed = 0
    for step in range(6):
        batch = found.batch(8, 200, 0, step)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.total == batch.weights.sum()
        for row in range(8):
            place = 0
            for t in range(200):  # a document ends with byte 0, and the next begins at position 0
                assert batch.pos[row, t] == place
                ended = bool(batch.tokens[row, t] == 0)
                assert batch.weights[row, t] == (not ended)
                place = 0 if ended else place + 1
        packed += int((batch.weights == 0).sum())
    assert packed


def test_documents_too_short_for_a_sequence_are_read_one_after_another(folder):
    found = made(folder, 9000)
    assert not found.packed
    batch = found.batch(2, 9000, 0, 0)
    assert bool((batch.weights == 1).all())
    assert batch.pos.tolist() == [[*range(9000)]] * 2


def test_drawn_positions_run_over_a_whole_row(folder):
    assert not made(folder, 64, position_policy("pose", 512, 64)).packed


def test_batches_follow_from_seed_and_step_alone(folder):
    a, b = (made(folder).batch(4, 64, 5, 9) for _ in range(2))
    assert torch.equal(a.tokens, b.tokens)
    assert not torch.equal(a.tokens, made(folder).batch(4, 64, 5, 10).tokens)


def test_no_more_text_is_cut_than_the_steps_can_see(folder):
    few = made(folder, most=3000)
    assert 3000 < len(few.tokens) < len(made(folder).tokens)
    assert few.fingerprint != made(folder).fingerprint


def test_too_little_text_is_told_in_a_sentence(folder):
    with pytest.raises(UserError, match=r"has [\d,]+ tokens, but one sequence takes 1,000,001"):
        made(folder, 1_000_000)


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_pose_cuts_a_row_into_chunks_whose_skips_do_not_decrease(chunks):
    part = position_policy(f"pose({chunks})", 320, 40)
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
    part = position_policy("randomized", 320, 40)
    rows = [r for step in range(20) for r in positions(part, ONE, seed=0, step=step).tolist()]
    assert all(len(set(row)) == 40 and row == sorted(row) for row in rows)
    assert {at for row in rows for at in row} >= {0, 319}


def test_draws_follow_from_seed_step_and_row_alone():
    part = position_policy("pose", 320, 40)
    first = positions(part, ONE, seed=3, step=7)
    assert torch.equal(first, positions(part, ONE, seed=3, step=7))
    assert not torch.equal(first, positions(part, ONE, seed=3, step=8))
    assert not torch.equal(first, positions(part, ONE, seed=4, step=7))
    assert len({tuple(row) for row in first.tolist()}) > 1


def test_in_order_begins_at_0_in_every_document():
    segments = torch.tensor([[0, 0, 0, 1, 1, 4], [0, 1, 2, 2, 2, 2]])
    found = positions(position_policy("order", 80, 6), segments, 0, 0)
    assert found.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_e2_llm_draws_within_the_window_in_the_targets_units():
    """Under linear(8) its ids are (m + t) / g, below the trained window of 40."""
    part = position_policy("e2_llm", 320, 40, 40)
    rows = [r for step in range(20) for r in positions(part, ONE, seed=0, step=step).tolist()]
    assert all(row == sorted(row) and row[-1] / 8 < 40 for row in rows)
    assert max(row[-1] for row in rows) > 300 and len({row[1] for row in rows}) > 10


def test_mixed_windows_are_short_and_packed_or_long_and_whole(folder):
    """Each step reads as many tokens; short windows restart positions in every document."""
    found = replace(made(folder, 400), packed=True, short=(0.3, 100))
    short = 0
    for step in range(60):
        batch = found.batch(2, 400, 0, step)
        assert batch.tokens.shape in ((8, 100), (2, 400))
        if batch.tokens.shape == (8, 100):
            short += 1
            assert int(batch.pos.max()) < 100
            assert torch.equal(batch.pos[:, 1:] == 0, batch.weights[:, :-1] == 0)
        else:
            assert batch.pos.tolist() == [[*range(400)]] * 2 and bool((batch.weights == 1).all())
    assert 8 <= short <= 28


@pytest.mark.parametrize("written", ["skips", "order(3)", "pose(two)", "cream(3)", ""])
def test_unknown_policies_are_refused(written):
    with pytest.raises(UserError, match=r"order, randomized, cream, .* pose\(4\)"):
        position_policy(written, 320, 40)


def test_more_tokens_than_positions_are_refused_at_once():
    with pytest.raises(UserError, match="do not fit"):
        position_policy("pose", 32, 40)
