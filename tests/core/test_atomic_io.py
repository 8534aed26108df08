"""Files and folders that appear whole or not at all."""

import pytest

from longitude.core.store import atomic_checkpoint, atomic_file, locked


def test_a_file_takes_its_place(tmp_path):
    target = tmp_path / "new" / "a.txt"
    with atomic_file(target) as part:
        part.write_text("one")
        assert not target.exists()
    assert target.read_text() == "one"
    assert [*target.parent.iterdir()] == [target]


def test_an_error_leaves_the_old_file(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(OSError), atomic_file(target) as part:
        part.write_text("half")
        raise OSError("no space left")
    assert target.read_text() == "old"
    assert [*tmp_path.iterdir()] == [target]


def test_leftovers_of_a_killed_write_go(tmp_path):
    killed, living, other = (tmp_path / f".{n}.part" for n in ("[a].txt.1", "[a].txt.2", "a.txt.1"))
    for part in (killed, living, other):
        part.write_text("half")
    with locked(living), atomic_file(tmp_path / "[a].txt") as part:
        part.write_text("all")
        with locked(part) as alone:
            assert not alone
    assert {*tmp_path.iterdir()} == {tmp_path / "[a].txt", living, other}


def test_a_checkpoint_takes_the_place_of_one_with_other_weights(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (folder / name).write_text("old")
    with atomic_checkpoint(folder) as part:
        for name in ("config.json", "model-00001-of-00002.safetensors"):
            (part / name).write_text("new")
    assert {f.name: f.read_text() for f in folder.iterdir()} == {
        "config.json": "new",
        "model-00001-of-00002.safetensors": "new",
        "notes.txt": "old",
    }
    assert [*tmp_path.iterdir()] == [folder]


def test_an_error_leaves_the_old_checkpoint_and_a_leftover_goes(tmp_path):
    folder, left = tmp_path / "model", tmp_path / ".model.part"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    left.mkdir()
    (left / "model.safetensors").write_text("of a call that was killed")
    with pytest.raises(OSError), atomic_checkpoint(folder) as part:
        assert not [*part.iterdir()]
        (part / "config.json").write_text("new")
        raise OSError("no space left")
    assert (folder / "config.json").read_text() == "old"
    assert [*tmp_path.iterdir()] == [folder]


def test_config_comes_last(tmp_path, monkeypatch):
    from pathlib import Path

    moved = []
    own = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (moved.append(to.name), own(self, to)))
    with atomic_checkpoint(tmp_path / "model") as part:
        for name in ("a.json", "config.json", "z.safetensors"):
            (part / name).write_text("")
    assert moved[-1] == "config.json" and len(moved) == 3
