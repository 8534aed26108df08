"""`longitude show`: it draws every preset, as text and as files, and its data is data."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from longitude import parse
from longitude.cli.main import run
from longitude.inspection.curves import page
from longitude.presets import PRESETS
from longitude.viz import terminal

from .conftest import Ran

ISSUE = (
    "rope(base=100000, frequencies=yarn(4, original=8192), remap=leaky_rerope(4096, 8)) "
    "+ logn(8192)"
)
CALLS = {
    "longrope_phi3": f"longrope_phi3({(1.0,) * 48}, {(2.0,) * 48})",
    "hwfa": "hwfa(layers=3)",
}
PICTURES = {
    "Distance map": "distances",
    "Decay": "decay",
    "Wavelengths": "wavelengths",
    "Query scale": "scale",
    "Bias": "bias",
}


class Tags(HTMLParser):
    """The elements of a page with the names of their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, [name for name, _ in attrs]))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_drawn_in_80_columns(name: str) -> None:
    rows = page(parse(CALLS.get(name, name)))
    terminal.show(rows, console := Console(file=io.StringIO(), width=80))
    out = console.file.getvalue()  # type: ignore[attr-defined]
    wide = [n for n in out.splitlines() if cell_len(n) > 80]
    assert all(line.startswith(("layers", "rope")) for line in wide)  # a scheme is not broken
    for title, field in PICTURES.items():
        drawn = re.search(rf"(^|\s\s){title}\s", out, re.MULTILINE) is not None
        assert drawn == any(getattr(sheet, field) for sheet in rows.sheets)
    assert "Visible pairs" in out


def test_parts_stand_with_their_papers(longitude: Callable[..., Ran]) -> None:
    _, out, _ = longitude("show", ISSUE)
    assert out.startswith(ISSUE + "\n")
    for text in ("rope(base=100000) ", "yarn(4, original=8192) ", "leaky_rerope(4096, 8) "):
        assert text in out
    assert "arXiv:2104.09864" in out and "arXiv:2309.00071" in out and "archives/9708" in out


def test_data_is_all_there_is_on_stdout(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    drawn = tmp_path / "new" / "page.svg"
    code, out, err = longitude("show", "gemma3()", "--json", "--out", str(drawn))
    data = json.loads(out)
    assert code == 0 and err == f"wrote {drawn}\n"
    assert drawn.read_text(encoding="utf-8").startswith("<svg")
    assert [s["layers"] for s in data["sheets"]] == [[0, 1, 2, 3, 4], [5]]
    assert (data["length"], data["dim"], data["heads"], data["trained"]) == (2048, 64, 8, None)


def test_layers_are_shown_once_each(longitude: Callable[..., Ran]) -> None:
    _, out, _ = longitude("show", "layers(rope(), alibi(), rope(), rope())")
    assert out.count("\nlayers 0, 2–3  rope()\n") == 1 and out.count("\nlayer 1  alibi()\n") == 1


def test_learned_weights_and_content_are_admitted(longitude: Callable[..., Ran]) -> None:
    assert "t5 is learned: shown at fresh weights (seed 0)." in longitude("show", "t5")[1]
    assert "depends on content" in longitude("show", "shaw(4)")[1]
    assert "fresh" not in longitude("show", "alibi")[1]


@pytest.mark.parametrize("scheme", ["stepped_yarn", ISSUE, "transformer_xl", "t5_encoder", "hwfa"])
def test_ten_million_tokens_are_sampled(longitude: Callable[..., Ran], scheme: str) -> None:
    code, out, _ = longitude("show", scheme, "--length", "10000000", "--json")
    sheets = json.loads(out)["sheets"]
    assert code == 0 and max(len(s[rows]) for s in sheets for rows in PICTURES.values()) < 3000
    assert len(sheets[0]["visible"]["tokens"]) < 100


def test_colours_only_where_they_are_wanted(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in longitude("show", "alibi")[1]  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[36m" in longitude("show", "alibi")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", longitude("show", "alibi")[1])


def test_a_terminal_without_braille_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert run(["show", "alibi"]) == 0
    assert b"Bias" in out.getvalue() and b"?" in out.getvalue()


def test_html_loads_nothing_from_anywhere(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    drawn = tmp_path / "page.html"
    assert longitude("show", ISSUE, "--out", str(drawn))[0] == 0
    text = drawn.read_text(encoding="utf-8")
    assert f"<title>{ISSUE}</title>" in text and "vegaEmbed(" in text
    found = Tags()
    found.feed(text)
    tags = "html head meta meta meta meta title style body main script script script"
    assert [tag for tag, _ in found.tags] == tags.split()
    assert not [a for _, names in found.tags for a in names if a in ("src", "href", "srcset")]
    assert not re.search(r"\bimport\s*[({\"'][^;]{0,80}https?:|cdn\.|unpkg\.", text)


def test_png(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    png = tmp_path / "page.png"
    assert longitude("show", "streaming_llm(4, 60) + alibi()", "--out", str(png))[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
