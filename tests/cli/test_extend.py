"""`longitude extend`: mistakes in one sentence, plans without a run, a budget, and a search."""

from __future__ import annotations

import errno
import json

import pytest

from longitude.cli.main import run

QUICK = ["--methods", "rerope", "--to", "2x", "--docs", "1", "--tasks", "none"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["no/such-model"], "no/such-model"),
        (["--to", "200"], "trained to 256"),
        (["--to", "far"], "write 32768, 32k or 4x"),
        (["--methods", "yran"], "yarn"),
        (["--methods", "rope("], "never closed"),
        (["--methods", "alibi()"], "trained with rope()"),
        (["--methods", "rope(remap=rerope(512))"], "512"),
        (["--tasks", "fish"], "use kept_context, "),
        (["--docs", "0"], "--docs"),
        (["--questions", "-1"], "--questions"),
        (["--questions", "0"], "--questions"),
        (["--lengths", "1,2,x"], "--lengths"),
        (["--lengths", "99999"], "--lengths"),
        (["--engine", "cloud"], "local or ray"),
        (["--budget", "soon"], "10m"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--out", "/proc/nowhere"], "name another"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(args, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["extend", *args]) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("longitude: ")]
    assert len(lines) == 1 and told in lines[0] and "Traceback" not in said.err
    assert said.out == "" and not [*tmp_path.rglob("*.sqlite")]


def test_text_shorter_than_the_target_is_told(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a few words")
    assert run(["extend", "--text", str(tmp_path / "short.txt"), *QUICK]) == 2
    assert "tokens, but one document takes 513" in capsys.readouterr().err


def test_a_plan_is_told_and_nothing_runs(tmp_path, capsys):
    out = tmp_path / "run"
    assert run(["extend", "--dry-run", "--json", "--out", str(out)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["lengths"] == [256, 512, 1024, 2048] and plan["methods"][0] == "baseline"
    assert len(plan["methods"]) == 13 and len(plan["documents"]) == 4 and plan["seconds"] > 0
    assert not out.exists()


@pytest.mark.parametrize("where", ["store", "report"])
def test_a_full_disk_is_one_sentence(where, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "results.sqlite")

    place = {
        "store": "longitude.core.store.Store.put",
        "report": "longitude.core.store.Store.export",
    }
    monkeypatch.setattr(place[where], full)
    assert run(["extend", *QUICK, "--out", str(tmp_path / "run")]) != 0
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said


def test_data_alone_on_standard_output_and_html_in_names_shown_as_text(tmp_path, capsys):
    text = tmp_path / "<b>bold & brave.txt"
    text.write_text("".join(f"word{n} and {n * 7919 % 1000}; " for n in range(400)))
    out = tmp_path / "run"
    assert run(["extend", *QUICK, "--text", str(text), "--json", "--out", str(out), "--quiet"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert printed.err == ""
    assert said["folder"] == str(out) and said["best"]["sentence"]
    page = (out / "report.html").read_text()
    assert "&lt;b&gt;bold &amp; brave.txt" in page and "<b>bold" not in page


@pytest.mark.slow
def test_a_search_goes_on_from_the_best(tmp_path, capsys):
    asked = ["--methods", "rerope; yarn", "--to", "2x", "--docs", "3", "--tasks", "none"]
    out = tmp_path / "run"
    assert run(["extend", *asked, "--search", "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert len(found) == 3  # two ways that lead, and factors for each dimension
    assert all(one["sentence"] and one["tried"] > 1 for one in found)
