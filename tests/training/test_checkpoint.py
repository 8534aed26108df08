"""A run's folder: who may write where, and what a failure leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from errno import EACCES, ENOSPC
from pathlib import Path

import pytest
import torch

from longitude.core.store import locked
from longitude.core.validate import UserError
from longitude.training.checkpoint import write_file, write_json
from longitude.training.distributed import World
from longitude.training.lab.run import lab_folder, train_run
from tests.training.conftest import CPU, small


def test_another_run_is_never_overwritten(corpus, tmp_path):
    run, folder = small(corpus, steps=1), lab_folder(tmp_path / "run")
    train_run(run, corpus, folder, CPU)
    with pytest.raises(UserError, match="its seed is 0, not 7"):
        folder.claim(replace(run, seed=7).to_json(), resume=True)
    with pytest.raises(UserError, match="this very run, which is done"):
        folder.claim(run.to_json(), resume=False)
    folder.claim(run.to_json(), resume=True)


def test_a_question_of_an_older_version_is_the_same_question(corpus, tmp_path):
    """Fields that it lacks have their defaults."""
    run, folder = small(corpus, steps=1), lab_folder(tmp_path)
    older = run.to_json()
    del older["dtype"], older["shape"]["embed_norm"]
    write_json(tmp_path / "config.json", {"run": older})
    folder.claim(run.to_json(), resume=True)


def test_other_files_are_left_alone(corpus, tmp_path):
    question = small(corpus).to_json()
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        lab_folder(tmp_path).claim(question, resume=True)
    with pytest.raises(UserError, match="is a file"):
        lab_folder(tmp_path / "thesis.txt").claim(question, resume=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="describes no run"):
        lab_folder(tmp_path).claim(question, resume=True)


def test_a_write_that_fails_leaves_the_previous_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})

    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        write_file(tmp_path / "x.json", half)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_lost_process_is_explained_with_how_to_resume(tmp_path):
    world = World(torch.device("cpu"), 0, 2)
    with (
        pytest.raises(UserError, match=r"lost at step 7 .*no state was saved before; run the same"),
        lab_folder(tmp_path).explain_failures(7, world),
    ):
        raise RuntimeError("Connection closed by peer")


def test_a_folder_that_cannot_be_written_is_not_a_full_disk(tmp_path):
    for error, how in (
        (OSError(ENOSPC, "No space left on device"), "free some space, then run"),
        (PermissionError(EACCES, "Permission denied"), "make it writable, then run"),
    ):
        with pytest.raises(UserError, match=how), lab_folder(tmp_path).explain_failures(7):
            raise error


def test_errors_of_one_process_are_its_own(tmp_path):
    with pytest.raises(RuntimeError, match="a fault"), lab_folder(tmp_path).explain_failures(7):
        raise RuntimeError("a fault")


def test_what_a_kill_left_half_written_neither_blocks_nor_stays(corpus, tmp_path):
    """A kill -9 inside a write leaves the temporary file, even the first one's."""
    run, folder = small(corpus, steps=1), lab_folder(tmp_path)
    for name in (".config.json.1.part", ".checkpoint.safetensors.1.part"):
        (tmp_path / name).write_text("half")
    folder.claim(run.to_json(), resume=False)
    train_run(run, corpus, folder, CPU)
    assert not [*tmp_path.glob(".*")]


def test_two_processes_do_not_train_in_one_folder(corpus, tmp_path):
    run, folder = small(corpus, steps=1), lab_folder(tmp_path)
    with locked(tmp_path) as alone, pytest.raises(UserError, match="in use by another process"):
        assert alone
        train_run(run, corpus, folder, CPU)
    train_run(run, corpus, folder, CPU)
    assert folder.done
