"""What is written about the package: pins, tables, the README's example, the worked example."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DRAWN = """
import gaussian
from longitude.cli.main import run

def test_it_is_listed_and_drawn(capsys):
    assert run(["show", "gaussian(8)"]) == 0
    assert "Yang et al. 2018, arXiv:1810.10182" in capsys.readouterr().out
    assert run(["schemes", "--site", "bias"]) == 0
    assert "Gaussian bias: -(i - j)² / (2 w²) added to each score" in capsys.readouterr().out
"""


def blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in fenced if named == language]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_everything_required_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split(";")[0].split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0" and pins["transformers"] == "5.22.2"
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["bench"]]
    names = {canonical(m[0]) for r in wanted if (m := re.match(r"[\w.-]+", r))}
    assert not names - pins.keys()


def test_the_wheel_is_typed_and_licensed() -> None:
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["longitude"]
    assert (ROOT / "longitude" / "py.typed").exists()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_readme_fits_its_budget() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("example", blocks("README.md")[1:], ids=["checkpoints", "attention"])
def test_the_readmes_example_runs(example, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example, {})


def test_the_readmes_tree_is_the_tree() -> None:
    tree = next(b for b in blocks("README.md", "") if b.startswith("longitude/"))
    inside = [line for line in tree.splitlines() if line.startswith("  ")]
    named = {
        name.rstrip("/") for line in inside for name in re.findall(r"[a-z_]+(?:/|\.py)", line[:15])
    }
    here = {p.name for p in (ROOT / "longitude").iterdir() if p.name[0] != "_"} - {"py.typed"}
    assert here == named


def test_the_worked_example_runs(tmp_path: Path) -> None:
    part, test, *_ = blocks("CONTRIBUTING.md")
    (tmp_path / "gaussian.py").write_text(part, encoding="utf-8")
    (tmp_path / "test_gaussian.py").write_text(f"import gaussian\n{test}", encoding="utf-8")
    (tmp_path / "test_drawn.py").write_text(DRAWN, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    ran = python("-m", "pytest", "-q", str(tmp_path), PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize("target", ["demo", "test", "lint", "check", "docs-table"])
def test_the_makefile_has_what_is_promised(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE)


def test_ci_runs_the_checks() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and "make lint\nmake test\n" in text
