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


def test_texts_are_joined_within_one_source_and_named_so(tmp_path):
    for source in ("a", "b", "c"):
        (tmp_path / source).mkdir()
        for n in range(4):
            (tmp_path / source / f"{n}.txt").write_text(f"{source}{n} " * 25)  # 75 tokens
    found = documents((str(tmp_path),), Bytes(), 100, 99, seed=0)
    assert len(found) == 6  # two of every two texts of a source
    for document in found:
        text = "".join(chr(b - 3) for b in document.ids[1:].tolist())
        source, _, rest = document.text.name.partition("/")
        assert rest.endswith(".txt and 1 more") and text.startswith(source + rest[0])
        assert {word[0] for word in text.split()} == {source}
        assert len({word[:2] for word in text.split() if len(word) == 2}) == 2


def test_a_text_without_a_partner_in_its_source_is_left_out(tmp_path):
    for source, count in (("a", 2), ("b", 1)):
        (tmp_path / source).mkdir()
        for n in range(count):
            (tmp_path / source / f"{n}.txt").write_text(f"{source}{n} " * 25)
    (only,) = documents((str(tmp_path),), Bytes(), 100, 99, seed=0)
    assert only.text.name.startswith("a/")


def test_too_little_text_is_told(folder):
    with pytest.raises(UserError, match=r"about .* tokens, but one document takes 10,001"):
        documents((folder,), Bytes(), 10_000, 1, seed=0)


def test_own_checkpoints_read_what_they_never_saw():
    from longitude.training.data import for_test

    unseen, every = (documents((), Bytes(), 5000, 400, 0, unseen) for unseen in (True, False))
    plain = [d.text.name.split("#")[0] for d in unseen if not d.text.name.endswith(" more")]
    assert plain and all(for_test(name) for name in plain)
    assert len(every) > len(unseen)
