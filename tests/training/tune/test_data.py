"""Text as packed sequences."""

from __future__ import annotations

import pytest
import torch

from longitude.core.validate import UserError
from longitude.hf.tokenizer import byte_tokenizer
from longitude.training.lab.text import gather
from longitude.training.tune.data import policy, stream

ORDER, EVERY = policy("order", 4096, 64), 10**9


def made(folder, length=64, part=ORDER, most=EVERY, seed=0):
    return stream([str(folder)], byte_tokenizer(), part, length, most, seed)


def test_every_document_is_there_once_and_ended(folder):
    found = made(folder)
    texts = bytes(found.tokens.tolist()).split(b"\0")[:-1]
    assert sorted(texts) == sorted(gather([str(folder)]).train)
    owners = found.owner[found.tokens == 0].tolist()
    assert owners == list(range(len(texts)))


def test_packed_documents_stand_apart(folder):
    found = made(folder, 200)
    assert found.apart
    packed = 0
    for step in range(6):
        batch = found.batch(ORDER, 8, 200, 0, step)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert batch.total == batch.weights.sum()
        for row in range(8):
            place = 0
            for t in range(200):  # a document ends with byte 0, and the next begins at position 0
                assert batch.pos[row, t] == place
                ended = bool(batch.tokens[row, t] == 0)
                assert batch.weights[row, t] == (not ended)
                if t < 199:
                    assert bool(batch.segments[row, t + 1] != batch.segments[row, t]) == ended
                place = 0 if ended else place + 1
        packed += batch.packed
    assert packed


def test_documents_too_short_for_a_sequence_are_read_one_after_another(folder):
    found = made(folder, 9000)
    assert not found.apart
    batch = found.batch(ORDER, 2, 9000, 0, 0)
    assert not batch.packed and bool((batch.weights == 1).all())
    assert batch.pos.tolist() == [[*range(9000)]] * 2


def test_drawn_positions_run_over_a_whole_row(folder):
    assert not made(folder, 64, policy("pose", 512, 64)).apart


def test_batches_follow_from_seed_and_step_alone(folder):
    a, b = (made(folder).batch(ORDER, 4, 64, 5, 9) for _ in range(2))
    assert torch.equal(a.tokens, b.tokens)
    assert not torch.equal(a.tokens, made(folder).batch(ORDER, 4, 64, 5, 10).tokens)


def test_no_more_text_is_cut_than_the_steps_can_see(folder):
    few = made(folder, most=3000)
    assert 3000 < len(few.tokens) < len(made(folder).tokens)
    assert few.fingerprint != made(folder).fingerprint


def test_too_little_text_is_told_in_a_sentence(folder):
    with pytest.raises(UserError, match=r"has [\d,]+ tokens, but one sequence takes 1,000,001"):
        made(folder, 1_000_000)
