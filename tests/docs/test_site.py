"""The documentation: each method has its page, each link leads somewhere, each command exists."""

from __future__ import annotations

import importlib
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from html import unescape
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
from tests.cli.conftest import ROOT, python
from tests.viz.browser import chromium

SITE = ROOT / "docs" / "site"
GUIDES = sorted((SITE / "guides").glob("*.md"))
SEARCHED = {
    "leaky rerope": "methods/leaky_rerope.html",
    "errata": "errata.html",
    "write a new part": "guides/new-part.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, without their pictures."""
    out = tmp_path_factory.mktemp("docs") / "site"
    ran = python("docs/site/build.py", "--still", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.fixture
def of_site(monkeypatch: pytest.MonkeyPatch):
    """A module of the site's own code."""
    monkeypatch.syspath_prepend(SITE)
    return lambda name: importlib.import_module(name)


def words(page: str) -> str:
    """A page as it is read: no tags, no line breaks; − is the sign of formulas."""
    bare = unescape(re.sub(r"</?su[bp]>", "", page)).replace("\u00a0", " ").replace("−", "-")
    return " ".join(re.sub(r"<[^>]+>", " ", bare).split())


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_page(site: Path, name: str) -> None:
    page = (site / "methods" / f"{name}.html").read_text(encoding="utf-8")
    cls: Any = PARTS[name]
    for id in ("when", "costs", "cannot", "use"):
        assert f'<h2 id="{id}">' in page
    year = re.search(r"\d{4}", cls.paper)
    assert (year[0] if year else cls.paper) in words(page)
    number = re.search(r"arXiv:(\d{4}\.\d{5})", cls.paper)
    assert number is None or f'href="https://arxiv.org/abs/{number[1]}"' in page


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_page(site: Path, name: str) -> None:
    page = (site / "presets" / f"{name}.html").read_text(encoding="utf-8")
    assert f"<code>{name}(" in page and 'href="../methods/' in page
    for number in re.findall(r"arXiv:(\d{4}\.\d{5})", PAPERS[name]):
        assert f'href="https://arxiv.org/abs/{number}"' in page


def test_formulas_errata_results_and_help_are_there(site: Path) -> None:
    alibi = words((site / "methods" / "alibi.html").read_text(encoding="utf-8"))
    assert "-mh · |i - j| added to each score" in alibi  # subscripts are letters here
    assert "Slopes are a geometric sequence fixed before training" in alibi
    assert "It is subtracted: far keys score less." in alibi
    yarn = (site / "methods" / "yarn.html").read_text(encoding="utf-8")
    assert "transformers, vLLM, SGLang, llama.cpp" in yarn and "../results/smollm2.html" in yarn
    assert "Longitude alone" in (site / "methods" / "rerope.html").read_text(encoding="utf-8")
    commands = words((site / "commands.html").read_text(encoding="utf-8"))
    for name in commands_known():
        assert f"Usage: longitude {name}" in commands or f"Usage: root {name}" in commands, name


@pytest.mark.parametrize("folder", ["methods", "presets"])
def test_the_code_on_a_methods_page_runs(site: Path, folder: str) -> None:
    n = 24
    for path in sorted((site / folder).glob("*.html")):
        _, use, rest = path.read_text(encoding="utf-8").partition('<h2 id="use">')
        if not use:
            continue
        codes = re.findall(r"<pre><code>(.*?)</code></pre>", rest, re.DOTALL)
        code = unescape(re.sub(r"<[^>]+>", "", codes[1]))
        d = 16 if "longrope" in path.name else 64
        given = {"n": n, "x": torch.randn(1, n, 512)}
        exec(code, given | dict(zip("qkv", torch.randn(3, 1, 8, n, d), strict=True)))


def test_the_table_of_properties_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITE.parent)
    importlib.import_module("properties").main(["--check", "alibi_lm", "su_rerope"])


def test_no_link_is_broken(site: Path, of_site) -> None:
    assert of_site("links").broken(site) == []
    assert len(list(site.rglob("*.html"))) > len(PARTS) + len(PRESETS) + len(GUIDES)


def test_broken_links_are_found(of_site, tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<h1 id="top">b</h1><h2 id="top">b</h2>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#top">fine</a><a href="c.html">1</a><a href="b.html#end">2</a>'
        '<a href="../out.html">3</a><a href="http://x.org">4</a><a href="https://x.org">fine</a>'
        '<script src="https://x.org/s.js"></script><a href="#none">6</a>'
    )
    told = " ".join(of_site("links").broken(tmp_path))
    assert "b.html: the id 'top' is there twice" in told
    for address in ("c.html", "b.html#end", "../out.html", "http://x.org", "#none"):
        assert f"a.html: {address} " in told
    assert "https://x.org/s.js is loaded from elsewhere" in told and told.count("a.html: ") == 6


def test_prose_that_does_not_fit_the_code_is_refused(of_site, tmp_path: Path) -> None:
    prose: ModuleType = of_site("prose")
    (tmp_path / "x.toml").write_text('[rope]\nwhen = "now"\n')
    with pytest.raises(UserError, match="rope has no costs, cannot, example"):
        prose.methods(["rope"], [], tmp_path)
    (tmp_path / "x.toml").write_text('[rop]\nwhen = "now"\n')
    with pytest.raises(UserError, match="rop is no part and no preset"):
        prose.methods(["rope"], [], tmp_path)
    (tmp_path / "x.toml").write_text('[rope]\nwhy = "now"\n')
    with pytest.raises(UserError, match="names why, which there isn't"):
        prose.methods(["rope"], [], tmp_path)
    (tmp_path / "e.toml").write_text(
        '[[entry]]\ntopic = "t"\noften = "o"\ninstead = "i"\nmethods = []\ntest = "test_none"\n'
    )
    with pytest.raises(UserError, match="names test_none, which there isn't"):
        prose.errata(["rope"], tmp_path / "e.toml")


def test_a_folder_of_someone_else_is_left_alone(of_site, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(SystemExit, match="was not built by this: give --out another folder"):
        of_site("build").main(["--still", "--out", str(tmp_path)])
    assert (tmp_path / "letter.txt").read_text() == "mine"


def test_a_picture_follows_the_readers_light(of_site, tmp_path: Path) -> None:
    pictures = of_site("pictures")
    gallery = pictures.Gallery(tmp_path / "pictures", tmp_path / "old")
    (drawn,), rows = gallery.draw(parse("rope(remap=rerope(64)) + logn(256)"))
    titles = [p.alt.split(" (")[0] for p in drawn.pictures]
    assert titles == ["Distance map", "Wavelengths", "Decay", "Query scale", "Visible pairs"]
    assert rows.trained == 256
    for picture in drawn.pictures:
        text = (tmp_path / picture.file).read_text(encoding="utf-8")
        box = ElementTree.fromstring(text).attrib["viewBox"].split()
        assert [round(float(n)) for n in box[2:]] == [picture.width, picture.height]
        assert "prefers-color-scheme: dark" in text and 'fill="white"' not in text


def test_vectors_of_positions_are_compared(of_site) -> None:
    """A tiled table repeats itself after its rows; sinusoids are alike by distance alone."""
    likeness = of_site("vectors").likeness
    at, cosines = likeness(parse("learned_tiled(512)"))
    assert at[16] == 512 and float(cosines[3, 19]) == pytest.approx(1, abs=1e-5)
    assert abs(float(cosines[3, 18])) < 0.3
    at, cosines = likeness(parse("sinusoidal()"))
    away = at[5] - at[2]
    waves = [math.cos(away * 10000 ** (-t / 256)) for t in range(256)]
    assert float(cosines[2, 5]) == pytest.approx(sum(waves) / 256, abs=1e-4)
    assert float(cosines[12, 9]) == pytest.approx(sum(waves) / 256, abs=1e-4)


def test_models_are_told_by_their_encodings(of_site) -> None:
    found = of_site("models").models(lambda kind: f"methods/{kind}.html", types=3)
    kinds = {row.name: row.encodings[0].kind for row in found["named"]}
    assert kinds["RoBERTa"] == "learned" and kinds["BLOOM"] == kinds["Falcon-RW"] == "alibi"
    assert kinds["Falcon 7B, 40B, 180B"] == "rope" and len(found["types"]) == 3
    pages = of_site("pages")
    body = pages.Site().render("models.html", "models.html", **found)
    assert 'href="methods/transformer_xl.html">transformer-xl</a>' in body
    assert "<code>learned(512, offset=2) + bidirectional()</code>" in body


def commands_known() -> dict[str, set[str]]:
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


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guides_commands_exist(guide: Path) -> None:
    known = commands_known()
    for line in lines(guide, "sh"):
        if not line.startswith("longitude "):
            continue
        _, name, *rest = shlex.split(line, comments=True)
        assert name in known, line
        given = {word.split("=")[0] for word in rest if word.startswith("--")}
        assert given <= known[name], line


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guides_schemes_can_be_read(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    before = r"(?:show|check|--scheme|parse\(|patched\(model,|apply\(model,)"
    for scheme in re.findall(before + r' "([^"]+)"', text):
        parse(scheme)
    for call in re.findall(r"`([a-z_0-9]+\([^`…]+\))`", text):
        if call.split("(")[0] in {*PARTS, *PRESETS}:
            parse(call)


def test_the_first_guides_example_runs() -> None:
    exec("\n".join(lines(SITE / "guides" / "start.md", "python")), {})


@pytest.mark.slow
def test_the_guides_examples_run(tmp_path: Path) -> None:
    code = "\n".join(line for guide in GUIDES for line in lines(guide, "python"))
    ran = python("-W", "error", "-c", code, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_pages_open_cleanly_and_are_found(site: Path) -> None:
    """No error, nothing from another host, nothing wider than a phone; the search box finds."""
    asked: list[str] = []
    errors: list[str] = []
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 390, "height": 800})
        page = context.new_page()
        page.on("request", lambda r: asked.append(r.url))
        page.on("console", lambda m: errors.append(m.text))
        page.on("pageerror", lambda e: errors.append(str(e)))
        for file in ("index.html", "methods/yarn.html", "results/smollm2.html", "errata.html"):
            page.goto((site / file).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, file
        for typed, found in SEARCHED.items():
            page.goto((site / "methods" / "index.html").as_uri())
            page.keyboard.press("/")
            page.keyboard.type(typed)
            page.keyboard.press("Enter")
            page.wait_for_url((site / found).as_uri())
    assert not errors and all(url.startswith("file://") for url in asked)


def test_the_makefile_builds_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^docs:.*## .*\n\t\$\(BIN\)/python docs/site/build\.py", makefile, re.M)


@pytest.mark.slow
def test_the_whole_table_of_properties_is_fresh() -> None:
    ran = python("docs/properties.py", "--check")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_everything_is_drawn(tmp_path: Path) -> None:
    """The build as `make docs` makes it, twice: the second takes the first one's pictures over."""
    out, drawn = tmp_path / "site", {}
    for _ in range(2):
        ran = python("docs/site/build.py", "--out", str(out))
        assert ran.returncode == 0, ran.stderr
        drawn = {p.name: p.stat().st_size for p in (out / "pictures").iterdir()}
        for name in PARTS:
            page = (out / "methods" / f"{name}.html").read_text(encoding="utf-8")
            assert '<img src="../pictures/' in page, name
    assert len(drawn) > len(PARTS) and all(drawn.values())
