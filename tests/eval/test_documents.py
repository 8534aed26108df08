"""Documents: as long as asked for, the same for a seed, from what was named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longitude.core.validate import UserError
from longitude.eval.documents import documents


class Bytes:
    """A byte tokenizer that begins every text with 1 and ends it with 2."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [b + 3 for b in text.encode()]
        return SimpleNamespace(input_ids=[1, *ids, 2] if add_special_tokens else ids)


@pytest.fixture
def folder(tmp_path):
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text(
            " ".join(f"word{n}{k}" for k in range(90 if n < 3 else 8))
        )
    return str(tmp_path)


def test_each_has_its_length_and_begins_as_the_tokenizer_does(folder):
    found = documents((folder,), Bytes(), 200, 4, seed=0)
    assert len(found) == 4
    assert all(len(d.ids) == 201 and d.special == 1 and d.ids[0] == 1 for d in found)
    assert len({d.text.digest for d in found}) == 4
    assert len({d.text.name for d in found}) == 4


def test_parts_of_a_document(folder):
    one = documents((folder,), Bytes(), 200, 1, seed=0)[0]
    assert torch.equal(one.first(50), one.ids[:51])
    ended = one.last(50)
    assert len(ended) == 51 and ended[0] == 1 and torch.equal(ended[1:], one.ids[-50:])
    assert torch.equal(one.last(200), one.ids)


def test_a_seed_decides(folder):
    first, again, other = (documents((folder,), Bytes(), 100, 3, seed) for seed in (0, 0, 1))
    assert [d.text for d in first] == [d.text for d in again]
    assert [d.text for d in first] != [d.text for d in other]


def test_short_texts_are_joined(folder):
    found = documents((folder,), Bytes(), 100, 99, seed=0)
    assert any(d.text.name.endswith("more") for d in found)


def test_too_little_text_is_told(folder):
    with pytest.raises(UserError, match=r"about .* tokens, but one document takes 10,001"):
        documents((folder,), Bytes(), 10_000, 1, seed=0)


def test_own_checkpoints_read_what_they_never_saw():
    from longitude.training.data import for_test

    unseen, every = (documents((), Bytes(), 5000, 400, 0, unseen) for unseen in (True, False))
    plain = [d.text.name.split("#")[0] for d in unseen if not d.text.name.endswith(" more")]
    assert plain and all(for_test(name) for name in plain)
    assert len(every) > len(unseen)
