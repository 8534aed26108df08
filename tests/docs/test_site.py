"""The documentation: every method has its page, every link resolves, every command exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from longitude import parse
from longitude.cli.main import app
from longitude.core.part import PARTS
from longitude.core.validate import UserError
from longitude.presets import PAPERS, PRESETS
from tests.hf.tiny import DECODERS, MULTIMODAL, REFUSED

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


def script(name: str, path: Path = ROOT / "docs" / "scripts") -> ModuleType:
    """One of the documentation's scripts as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of docs/ with its generated pages, without charts and models."""
    root = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copy(ROOT / "mkdocs.yml", root)
    generate = script("generate", root / "docs" / "scripts")
    generate.TESTS = ROOT / "tests"
    generate.main(["--no-charts"])
    return root / "docs"


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_page(docs: Path, name: str) -> None:
    page = (docs / "methods" / f"{name}.md").read_text(encoding="utf-8")
    paper: str = getattr(PARTS[name], "paper")  # noqa: B009
    for heading in ("When to use it", "What it costs", "What it can't do", "Use it"):
        assert f"## {heading}\n" in page
    year = re.search(r"\d{4}", paper)
    assert (year[0] if year else paper) in page
    number = re.search(r"arXiv:(\d{4}\.\d{5})", paper)
    assert number is None or f"(https://arxiv.org/abs/{number[1]})" in page


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_page(docs: Path, name: str) -> None:
    page = (docs / "presets" / f"{name}.md").read_text(encoding="utf-8")
    assert f"```\n{name}(" in page and "](../methods/" in page
    for number in re.findall(r"arXiv:(\d{4}\.\d{5})", PAPERS[name]):
        assert f"(https://arxiv.org/abs/{number})" in page


def test_formulas_errata_results_and_help_are_there(docs: Path) -> None:
    alibi = (docs / "methods" / "alibi.md").read_text(encoding="utf-8")
    assert r"-m\_h · \|i - j\| added to each score" in alibi
    assert "It is subtracted: far keys score less." in alibi
    yarn = (docs / "methods" / "yarn.md").read_text(encoding="utf-8")
    assert "vllm" in yarn and "../results/smollm2.md" in yarn
    assert "Longitude alone" in (docs / "methods" / "rerope.md").read_text(encoding="utf-8")
    commands = (docs / "commands.md").read_text(encoding="utf-8")
    for name in known_commands():
        assert re.search(rf"^Usage: \w+ {name}\b", commands, re.MULTILINE), name


def test_every_architecture_of_the_grid_has_its_row(docs: Path) -> None:
    page = (docs / "models.md").read_text(encoding="utf-8")
    patched, refused = page.split("## Which encoding")[0].split("Refused")
    patched, images = patched.split("Multimodal models")
    assert re.findall(r"^\| `(\S+)` \|", images, re.MULTILINE) == list(MULTIMODAL)
    assert re.findall(r"^\| `(\S+)` \|", patched, re.MULTILINE) == sorted(DECODERS)
    assert re.findall(r"^\| `(\S+)` \|", refused, re.MULTILINE) == sorted(REFUSED)
    assert "| `qwen3_5_text` | RoPE on part of a head | linear attention or state space |" in page


@pytest.mark.parametrize("folder", ["methods", "presets"])
def test_the_code_on_a_methods_page_runs(docs: Path, folder: str) -> None:
    n = 24
    for path in sorted((docs / folder).glob("*.md")):
        _, use, rest = path.read_text(encoding="utf-8").partition("## Use it\n")
        if not use:
            continue
        code = re.findall(r"^```python\n(.*?)^```", rest, re.DOTALL | re.MULTILINE)[0]
        d = 16 if "longrope" in path.name else 64
        given = {"n": n, "x": torch.randn(1, n, 512)}
        exec(code, given | dict(zip("qkv", torch.randn(3, 1, 8, n, d), strict=True)))


def test_zensical_builds_every_page_and_every_link_resolves(docs: Path) -> None:
    zensical = Path(sys.executable).with_name("zensical")
    ran = subprocess.run(
        [zensical, "build", "--strict"], cwd=docs.parent, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = list((docs.parent / "build" / "docs").rglob("*.html"))
    assert len(pages) > len(PARTS) + len(PRESETS) + len(GUIDES)
    for page in pages:  # nothing is loaded from elsewhere
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert not loaded, page


def test_prose_that_does_not_fit_the_code_is_refused(tmp_path: Path) -> None:
    generate = script("generate")
    (tmp_path / "x.toml").write_text('[rop]\nwhen = "now"\n')
    with pytest.raises(UserError, match="names rop, which does not exist"):
        generate.load_prose(["rope"], tmp_path)
    (tmp_path / "x.toml").write_text('[rope]\nwhy = "now"\n')
    with pytest.raises(UserError, match="names why, which does not exist"):
        generate.load_prose(["rope"], tmp_path)
    entry = '[[entry]]\ntopic = "t"\noften = "o"\ninstead = "i"\nmethods = []\ntest = "test_none"\n'
    (tmp_path / "e.toml").write_text(entry)
    with pytest.raises(UserError, match="names test_none, which does not exist"):
        generate.load_errata(["rope"], tmp_path / "e.toml")


def known_commands() -> dict[str, set[str]]:
    """The options that each command takes."""
    group: Any = typer.main.get_command(app)
    return {
        name: {o for p in command.params for o in [*p.opts, *p.secondary_opts]}
        for name, command in group.commands.items()
    }


def lines(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=lambda path: path.stem)
def test_a_guides_commands_and_schemes_exist(page: Path) -> None:
    known = known_commands()
    for line in lines(page, "sh"):
        if not line.startswith("longitude "):
            continue
        _, name, *rest = shlex.split(line, comments=True)
        assert name in known, line
        given = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert given <= known[name], line
    text = page.read_text(encoding="utf-8")
    before = r"(?:show|check|--scheme|parse\(|patched\(model,|apply\(model,)"
    for scheme in re.findall(before + r' "([^"]+)"', text):
        parse(scheme)
    for call in re.findall(r"`([a-z_0-9]+\([^`…]+\))`", text):
        if call.split("(")[0] in {*PARTS, *PRESETS}:
            parse(call)


def test_the_first_guides_example_runs() -> None:
    exec("\n".join(lines(ROOT / "docs" / "guides" / "start.md", "python")), {})


@pytest.mark.slow
def test_the_guides_examples_run(tmp_path: Path) -> None:
    for guide in GUIDES:
        code = "\n".join(lines(guide, "python"))
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", ["train_short_test_long", "smollm2", "speed", "read"])
def test_a_results_page_has_the_tables_of_its_rows(page: str) -> None:
    script(page).main(["--check"])


def test_the_table_of_properties_is_fresh() -> None:
    script("properties").main(["--check", "alibi_lm", "su_rerope", "transformer_xl_lm"])


@pytest.mark.slow
def test_the_whole_table_of_properties_is_fresh() -> None:
    script("properties").main(["--check"])
