"""Training text: what is read, how it is split, its windows and excerpts, and bad sources."""

import hashlib
import os
import shutil
import sys
import sysconfig
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import UserError
from longitude.training.data import (
    Corpus,
    Document,
    excerpts,
    gather,
    join,
    read_documents,
    standard_library,
    windows,
)
from longitude.training.distributed import generator

# run-time type checks of tuples look at a random item, which hypothesis notices
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def for_test(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 10 == 0


def written(root: Path, names: Sequence[str]) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"this is {name}\n" * 3)
    return root


NAMES = [f"{place}{n}.txt" for place in ("", "b/", "a/deep/") for n in range(20)]


@pytest.fixture(scope="module")
def library() -> Corpus:
    return gather()


def test_the_default_is_the_standard_library(library: Corpus) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    everything = {*library.train, *library.test}
    for own in ("argparse.py", "json/decoder.py", "email/message.py"):
        assert (root / own).read_bytes() in everything
    from pydoc_data.topics import topics

    assert topics["lambda"].encode() in everything
    assert sum(map(len, library.test)) > 300_000
    assert sum(map(len, library.train)) > 5 * sum(map(len, library.test))
    assert "Python 3." in library.name
    assert len(repr(library)) < 300, "the text stays out of a traceback"


def test_the_default_leaves_out_what_is_not_the_librarys_own() -> None:
    names = [document.name for document in standard_library()]
    assert "pydoc_data/topics.py" not in names and "pydoc_data/topics/lambda" in names
    assert len(names) == len(set(names))
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert not [name for name in names if "_sysconfigdata" in name], "they hold a machine's paths"


def test_the_default_is_split_by_name(library: Corpus) -> None:
    documents = sorted(standard_library())
    assert library.test == tuple(d.text for d in documents if for_test(d.name))
    assert library.train == tuple(d.text for d in documents if not for_test(d.name))


def test_a_folder_is_split_by_relative_names_wherever_it_stands(tmp_path: Path) -> None:
    here = written(tmp_path / "here", NAMES)
    there = written(tmp_path / "some" / "where else", NAMES[::-1])
    one, other = gather([str(here)]), gather([str(there)])
    assert (one.train, one.test) == (other.train, other.test)
    assert one.fingerprint == other.fingerprint
    assert (one.name, other.name) == ("here", "where else")
    expected = [f"this is {name}\n".encode() * 3 for name in sorted(NAMES) if for_test(name)]
    assert list(one.test) == expected and len(one.train) == len(NAMES) - len(expected)


def test_the_order_of_sources_changes_nothing(tmp_path: Path) -> None:
    paths = [str(written(tmp_path / name, NAMES[n : n + 20])) for n, name in enumerate("xyz")]
    one, other = gather(paths), gather(paths[::-1])
    assert (one.train, one.test) == (other.train, other.test)
    assert one.fingerprint == other.fingerprint


def test_what_is_met_twice_counts_once(tmp_path: Path) -> None:
    """Else the same text could stand on both sides of the split."""
    root = written(tmp_path / "all", NAMES)
    inside = [str(root / "a"), str(root / "a" / "deep" / "3.txt"), str(root)]
    twice = gather([*inside, *inside])
    assert len(twice.train) + len(twice.test) == len(NAMES)
    assert not {*twice.train} & {*twice.test}
    assert twice == replace(gather(inside[::-1]), name=twice.name), "in whatever order it is met"


def test_the_fingerprint_tells_names_and_contents_apart(tmp_path: Path) -> None:
    def of(name: str, content: str) -> str:
        shutil.rmtree(tmp_path / "f", ignore_errors=True)
        root = written(tmp_path / "f", NAMES)
        (root / name).write_text(content)
        return gather([str(root)]).fingerprint

    prints = [of("new", "ab"), of("new", "abc"), of("newa", "b"), of("ne", "wab")]
    assert len(set(prints)) == 4 and prints[0] == of("new", "ab")
    assert all(len(p) == 64 for p in prints)


def test_only_plain_visible_text_is_read(tmp_path: Path) -> None:
    root = written(tmp_path / "root", NAMES)
    outside = written(tmp_path / "outside", ["secret.txt"])
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "links").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / ".hidden").write_text("hidden")
    written(root / ".git", ["config"])
    (root / "nul").write_bytes(b"a\0b")
    (root / "latin").write_bytes("é".encode("latin-1"))
    (root / "empty").write_bytes(b"")
    os.mkfifo(root / "pipe")
    assert (
        gather([str(root)]).fingerprint == gather([str(written(tmp_path / "r", NAMES))]).fingerprint
    )


def test_nothing_is_normalised(tmp_path: Path) -> None:
    text = "\ufeffone\r\n two\ttabs \u00e9 e\u0301\n\n".encode() * 10
    (tmp_path / "f").write_bytes(text)
    made = gather([str(tmp_path / "f")])
    assert made.train + made.test == (text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :])


def test_too_few_documents_are_split_inside(tmp_path: Path) -> None:
    only = [name for name in NAMES if not for_test(name)][:3]
    made = gather([str(written(tmp_path / "f", only))])
    joined = b"\0".join(f"this is {name}\n".encode() * 3 for name in sorted(only))
    assert b"\0".join(made.train) + b"\0".join(made.test) == joined
    assert len(made.test) == 1 and abs(len(made.test[0]) - len(joined) / 10) <= 1
    assert not [d for d in made.train + made.test if b"\0" in d or not d]


def test_windows_are_pieces_of_the_stream() -> None:
    documents = [bytes([97 + n]) * (5 + n) for n in range(20)]
    row = join(documents)
    joined = b"".join(d + b"\0" for d in documents)
    assert bytes(row.tolist()) == joined
    batch = windows(row, 9, 500, seed=0, step=0)
    assert batch.shape == (500, 10) and batch.dtype == torch.int64
    found = {bytes(row.tolist()) for row in batch}
    every = {joined[n : n + 10] for n in range(len(joined) - 9)}
    assert found <= every and len(found) > 0.8 * len(every)


def test_the_order_of_the_data_is_a_function_of_seed_and_step(library: Corpus) -> None:
    row = join(library.train)
    torch.manual_seed(1)
    one = windows(row, 64, 8, seed=3, step=17)
    torch.manual_seed(2)
    windows(row, 64, 8, seed=3, step=16)
    assert torch.equal(one, windows(row, 64, 8, seed=3, step=17))
    for seed, step in ((3, 18), (4, 17), (17, 3)):
        assert not torch.equal(one, windows(row, 64, 8, seed=seed, step=step))


def test_a_text_as_short_as_one_window_is_enough_and_shorter_is_told() -> None:
    row = join([b"abc", b"def"])
    assert bytes(windows(row, 7, 1, 0, 0)[0].tolist()) == b"abc\0def\0"
    with pytest.raises(UserError, match=r"has 8 tokens, but a window of 8 takes 9"):
        windows(row, 8, 1, 0, 0)
    with pytest.raises(UserError, match=r"has 0 tokens, but a window of 8 takes 9"):
        windows(join([]), 8, 1, 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_excerpts_lie_within_documents_and_apart(
    sizes: list[int], length: int, count: int, seed: int
) -> None:
    # the same places twice: in the one corpus a byte says its document, in the other its place
    marked = Corpus((), tuple(bytes([d + 1]) * s for d, s in enumerate(sizes)), "", "")
    placed = Corpus((), tuple(bytes(range(1, s + 1)) for s in sizes), "", "")
    if sum(sizes) + len(sizes) < length:
        with pytest.raises(UserError, match=f"excerpt takes {length}"):
            excerpts(marked, length, count, seed)
        return
    of, at = (excerpts(corpus, length, count, seed) for corpus in (marked, placed))
    assert of.shape == (count, length) and of.dtype == torch.int64
    room = {d + 1: s // length for d, s in enumerate(sizes) if s >= length}
    if sum(room.values()) < count:
        return
    assert (of == of[:, :1]).all(), "each within one document"
    taken = [(d, p) for d, p in zip(of.flatten().tolist(), at.flatten().tolist(), strict=True)]
    assert len(set(taken)) == len(taken), "no byte twice"
    shares = [of[:, 0].tolist().count(d) for d in room]
    full = [s == r for s, r in zip(shares, room.values(), strict=True)]
    open_ = [s for s, f in zip(shares, full, strict=True) if not f]
    assert not open_ or min(open_) >= max(shares) - 1, "in turns"


def test_excerpts_are_a_function_of_the_seed(library: Corpus) -> None:
    one = excerpts(library, 2048, 20, 5)
    assert torch.equal(one, excerpts(library, 2048, 20, 5))
    assert not torch.equal(one, excerpts(library, 2048, 20, 6))
    assert (one > 0).all()


def test_short_documents_give_excerpts_of_the_joined_text() -> None:
    documents = tuple(b"%03d" % n for n in range(100))
    whole = b"".join(d + b"\0" for d in documents)
    found = [bytes(row.tolist()) for row in excerpts(Corpus((), documents, "", ""), 40, 10, 0)]
    starts = [whole.index(piece) for piece in found]
    assert starts == sorted(starts)
    assert [start * 10 // 361 for start in starts] == [*range(10)], "one from each tenth"


def test_generators_differ_by_seed_step_and_purpose() -> None:
    def first(*what: Any) -> int:
        return int(torch.randint(2**62, (), generator=generator(*what)))

    cases = [(s, t, p) for s in range(4) for t in range(50) for p in ("", "windows")]
    assert len({first(*case) for case in cases}) == len(cases)
    assert first(1, 2, "x") == first(1, 2, "x")
    assert first(-1, 2**40, "") != first(-1, 2**40 + 1, "")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_texts_that_name_their_encoding_are_read(tmp_path: Path, encoding: str) -> None:
    text = "Gulls slept on the pier of Ærø.\n"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    for source in (tmp_path, tmp_path / "a.txt"):
        assert read_documents([str(source)]) == [Document("a.txt", text.encode())]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("absent.txt", "there is no file or folder"),
        ("/absent/text", "there is no file or folder"),
        ("./a/b", "there is no file or folder"),
        ("", "there is no file or folder"),
        ("a\0b", "can't be read"),
        ("x" * 5000, "can't be read"),
        ("empty", "holds no text"),
        ("blank.txt", "it is empty"),
        ("binary", "is neither UTF-8 nor marked as UTF-16, or has a NUL in it"),
        ("blank.txt/below", "datasets library"),  # what looks like a dataset's name
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_bad_paths_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    (tmp_path / "blank.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "good").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=sentence) as caught:
        gather(["good", source])
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", ")."))


def test_what_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def closed(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", closed)
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(UserError, match=r"can't be read \(Permission denied\)"):
            gather([str(source)])


class FakeRows(dict[str, list[Any]]):
    """A dataset's rows by column, as far as the lab looks at them."""

    @property
    def features(self) -> dict[str, Any]:
        kinds = {str: "string", int: "int64"}
        return {c: types.SimpleNamespace(dtype=kinds[type(v[0])]) for c, v in self.items()}


def with_datasets(monkeypatch: pytest.MonkeyPatch, rows: FakeRows | Exception) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> FakeRows:
        calls.append((args, kwargs))
        if isinstance(rows, Exception):
            raise rows
        return rows

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


def test_a_dataset_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"story {n}" for n in range(40)]
    rows = FakeRows(id=[*range(43)], title=["t"] * 43, text=[*texts, "", "nul \0", None])
    calls = with_datasets(monkeypatch, rows)
    made = gather(["owner/stories"])
    assert {*made.train, *made.test} == {text.encode() for text in texts}
    assert made.name == "owner/stories"
    assert gather(["owner/stories:plain:train[:1%]"]).fingerprint == made.fingerprint
    assert calls == [
        (("owner/stories", None), {"split": "train"}),
        (("owner/stories", "plain"), {"split": "train[:1%]"}),
    ]


def test_a_datasets_only_column_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    with_datasets(monkeypatch, FakeRows(id=[1] * 40, body=[f"body {n}" for n in range(40)]))
    assert b"body 7" in {*gather(["a/b"]).train, *gather(["a/b"]).test}
    with_datasets(monkeypatch, FakeRows(q=["1"], a=["2"]))
    with pytest.raises(UserError, match=r"no column called text, but \['q', 'a'\]"):
        gather(["a/b"])


def test_a_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_datasets(monkeypatch, FileNotFoundError("Dataset 'a/b' doesn't exist.\nsecond line"))
    with pytest.raises(UserError, match=r"could be loaded \(Dataset 'a/b' doesn't exist\): write"):
        gather(["a/b"])
    with_datasets(monkeypatch, FakeRows(text=[""]))
    with pytest.raises(UserError, match="holds no text"):
        gather(["a/b"])


def test_datasets_is_calls_for_only_after_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_datasets(monkeypatch, FakeRows(text=["a"]))
    with pytest.raises(UserError, match="there is no file or folder 'absent'"):
        gather(["a/b", "absent"])
    assert not calls
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        gather(["a/b"])
