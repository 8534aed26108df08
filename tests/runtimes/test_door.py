"""A runtime is one file: put into the folder of runtimes, every command knows it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import longitude.runtimes
from longitude.cli.main import run
from longitude.core.text import parse
from longitude.explorer.methods import snippets
from longitude.explorer.state import Column, PageState
from longitude.hf.source import ASSETS
from longitude.runtimes import names, recommended, runtimes
from longitude.runtimes.target import supporting

DUMMY = '''
"""Dummy: a server that reads config.json as transformers does, but no attention_factor."""

from longitude.runtimes import Issue, Runtime, Settings
from longitude.runtimes.rope_dictionaries import both_spellings, named_or_listed
from longitude.runtimes.transformers import version5


def emulate(config, version=None):
    rope = version5(config)
    issues = ["dummy ignores it"] * (rope.optional("attention_factor") is not None)
    return rope.updated(attention_factor=None).computed(rope.max_length, issues=issues)


def write(target, model, version):
    for parameters in named_or_listed(target):
        yield Settings(both_spellings(model, parameters, target.length))


RUNTIME = Runtime(
    name="dummy-server",
    title="Dummy",
    versions=("1.0", "2.0"),
    emulate=emulate,
    write=write,
    start="dummy serve {folder} --length {target}\\n",
    file="dummy.sh",
    lints=("config.json",),
    issues=(Issue("dummy ignores it", "attention", "It is ignored.", "Leave it out."),),
)
'''
YARN = "rope(frequencies=yarn(4, original=256))"


@pytest.fixture
def dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "dummy.py").write_text(DUMMY)
    path = [*longitude.runtimes.__path__, str(tmp_path)]
    monkeypatch.setattr(longitude.runtimes, "__path__", path)
    yield "dummy-server"
    sys.modules.pop("longitude.runtimes.dummy", None)


def test_it_is_found_by_its_file(dummy: str) -> None:
    assert list(runtimes())[-1] == dummy and dummy in names()
    assert runtimes()[dummy].newest == "2.0"


def test_export(dummy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "tiny-rope", "--scheme", YARN, "--for", dummy]) == 0
    assert capsys.readouterr().out == f"dummy serve {ASSETS / 'tiny-rope'} --length 1024\n"
    refused = "rope(frequencies=yarn(4, original=256, attention_factor=1.5))"
    assert run(["export", "tiny-rope", "--scheme", refused, "--for", dummy]) == 2
    said = capsys.readouterr().err
    assert "Dummy 2.0 can't serve" in said and f"nearest it can serve is {YARN}" in said


def test_lint(dummy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    rope |= {"rope_theta": 1e4, "attention_factor": 1.5}
    config = {"model_type": "llama", "head_dim": 16, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert run(["lint", str(tmp_path / "config.json"), "--json"]) == 1  # by default
    rows = {row["runtime"]: row for row in json.loads(capsys.readouterr().out)["runtimes"]}
    assert [issue["name"] for issue in rows[dummy]["traps"]] == ["dummy ignores it"]
    assert run(["lint", str(tmp_path / "config.json"), "--for", f"{dummy}==1.0"]) == 1
    assert "dummy ignores it: dummy-server" in capsys.readouterr().out


def test_recommendation(dummy: str) -> None:
    assert [runtime.name for runtime in recommended()][-1] == dummy
    assert dummy in supporting(parse(YARN), parse("rope()"))
    assert dummy not in supporting(parse("rope(remap=rerope(64))"), parse("rope()"))


def test_snippets(dummy: str) -> None:
    shown = snippets(PageState(columns=(Column("yarn"),)), 0)["exports"]
    text = next(one["text"] for one in shown if one["runtime"] == "Dummy")
    assert text.startswith("dummy serve MODEL --length 16384")
