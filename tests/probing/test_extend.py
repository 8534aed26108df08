"""`extend` of a server: the rows and the report of a checkpoint, for its one scheme."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import longitude
from longitude.cli.main import run
from longitude.core.validate import UserError
from longitude.extension.api import estimate

from .servers import Server, behaving, oracle

TO = 1024


@pytest.fixture
def options(tmp_path: Path) -> longitude.ExtendOptions:
    return longitude.ExtendOptions(tasks=("passkey", "keys"), questions=1, out=tmp_path / "run")


def test_a_server_has_rows_and_a_report(options: longitude.ExtendOptions, tmp_path: Path) -> None:
    with Server() as server:
        result = longitude.extend(server.url, to=TO, options=options)
    assert result.best.effective_length == TO and result.best.label == "baseline"
    assert {row.key.measure for row in result.rows} == {"retrieval", "cost"}
    assert {row.key.length for row in result.rows} == {128, 256, 512, TO}
    assert "No fault found." in result.table() and "100 %" in result.table()
    folder = options.out or tmp_path
    assert (folder / "report.html").is_file() and (folder / "summary.md").is_file()
    again = longitude.report(folder)  # as any run of extend
    assert len(again.models[0].rows) == len(result.rows)
    json.dumps(again.to_json())


def test_a_cut_server_says_so(options: longitude.ExtendOptions) -> None:
    with Server(behaving(limit=500, cut="front"), oracle(3)) as server:
        result = longitude.extend(server.url, to=TO, options=options)
    assert "drops the front of a long prompt" in result.best.sentence
    assert max(row.key.length for row in result.rows) <= 500


def test_what_needs_weights_is_refused(options: longitude.ExtendOptions) -> None:
    with Server() as server:
        for wrong in ({"methods": "yarn"}, {"search": True}, {"lengths": (64,)}):
            with pytest.raises(UserError, match="needs a checkpoint"):
                longitude.extend(server.url, to=TO, options=replace(options, **wrong))
        with pytest.raises(UserError, match="no task is called 'foo'"):
            longitude.extend(server.url, to=TO, options=replace(options, tasks=("foo",)))
        assert server.requests == []
        plan = estimate(server.url, to=TO, options=options).to_json()
        assert server.requests == [] and plan["requests"] > 40 and plan["to"] == TO


def test_the_command_probes_saves_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "key"
    key.write_text("sk-secret-of-ours\n")
    common = ["--to", str(TO), "--tasks", "passkey", "--questions", "1"]
    with Server() as server, Server(behaving(limit=500, cut="back", owner="library")) as cut:
        assert run(["probe", server.url, *common, "--dry-run"]) == 0
        assert server.requests == [] and "at most" in capsys.readouterr().out
        (tmp_path / "file").touch()
        for wrong, why in (("file/a.json", "can't be written"), (str(tmp_path), "is a folder")):
            assert run(["probe", server.url, *common, "--save", wrong]) == 2
            assert why in capsys.readouterr().err
        assert run(["probe", server.url, "--tasks", "foo"]) == 2
        assert "no family is called 'foo'" in capsys.readouterr().err
        assert server.requests == []  # refused at once
        saved = ["--save", "today.json", "--key-file", str(key)]
        assert run(["probe", server.url, *common, *saved, "--json", "--quiet"]) == 0
        out = capsys.readouterr()
        assert json.loads(out.out)["faults"] == 0 and out.err == ""
        assert "sk-secret" not in (tmp_path / "today.json").read_text() + out.out
        assert server.headers[0]["authorization"] == "Bearer sk-secret-of-ours"
        assert run(["probe", cut.url, "--against", "today.json"]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "drops the end of a long prompt" in shown and "num_ctx" in shown
        assert "The end of the input changed: complete before, back at" in shown
        assert (tmp_path / "runs/probe/report.html").is_file()
        assert run(["probe", server.url, cut.url, server.url]) == 2
        assert run(["probe", server.url, "--key-file", "absent"]) == 2
    assert run(["probe", "http://127.0.0.1:9/v1", "--to", "64"]) == 2
