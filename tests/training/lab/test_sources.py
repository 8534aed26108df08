"""Where the lab's text is read from: bad paths and datasets, each told in a sentence."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from longitude import UserError
from longitude.training.lab.text import gather


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
        ("binary", "is not UTF-8 or has a NUL in it"),
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
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
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
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> FakeRows:
        asked.append((args, kwargs))
        if isinstance(rows, Exception):
            raise rows
        return rows

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_a_dataset_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"story {n}" for n in range(40)]
    rows = FakeRows(id=[*range(43)], title=["t"] * 43, text=[*texts, "", "nul \0", None])
    asked = with_datasets(monkeypatch, rows)
    made = gather(["owner/stories"])
    assert {*made.train, *made.test} == {text.encode() for text in texts}
    assert made.name == "owner/stories"
    assert gather(["owner/stories:plain:train[:1%]"]).fingerprint == made.fingerprint
    assert asked == [
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


def test_datasets_is_asked_for_only_after_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_datasets(monkeypatch, FakeRows(text=["a"]))
    with pytest.raises(UserError, match="there is no file or folder 'absent'"):
        gather(["a/b", "absent"])
    assert not asked
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        gather(["a/b"])
