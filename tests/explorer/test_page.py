"""The page in a headless Chromium: a control moves, and what it shows is what the library says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from longitude.explorer.api import ExploreResult
from longitude.explorer.data import draw
from longitude.explorer.state import Column, PageState, read_link
from longitude.viz.vega import DARK, LIGHT, SCHEMES
from tests.viz.browser import chromium

from .served import served

STATE = "window=256&length=1024&dim=32&heads=4"
NAMELESS = """[...document.querySelectorAll("input, select, textarea, button")]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim()))
  .map((e) => e.outerHTML)"""
TWICE = """[...document.querySelectorAll("[id]")].map((e) => e.id)
  .filter((id, at, all) => all.indexOf(id) !== at)"""


class Reader:
    """A page that was opened, and everything that went wrong with it."""

    def __init__(self, browser: Any, address: str, width: int = 1100, theme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.page = browser.new_context(viewport=size, color_scheme=theme).new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.wrong.append(m.text))
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(address)
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked is drawn."""
        self.page.evaluate("window.longitude.settled()")

    def state(self) -> PageState:
        """The state that the link in the address bar carries."""
        return read_link(parse_qsl(urlsplit(self.page.url).query))

    def expected(self) -> list[dict[str, Any]]:
        """What the library says to this state."""
        return json.loads(draw(self.state()))["columns"]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows that a picture shows."""
        return self.page.evaluate(f'window.longitude.views["{name}"].data("rows")')

    def fact(self, name: str) -> list[str]:
        """A line of the table of facts."""
        line = self.page.locator("#facts tr", has_text=name)
        return line.locator("td").all_inner_texts()

    def same_as_library(self) -> None:
        """Pictures, facts and texts say what the library says to the link's own state."""
        columns = self.expected()
        waves = self.rows("wavelengths")
        for n, column in enumerate(columns):
            mine = [r for r in waves if r["column"] == "ABC"[n]]
            assert [r["scaled"] for r in mine] == column.get("wavelengths", {}).get("scaled", [])
            assert self.page.input_value(f"#text{n + 1}") == column["scheme"]
        means = [r["mean"] for r in self.rows("decay")]
        assert means == [m for c in columns for m in c["decay"].get("mean", [])]
        kept = [f"{c['kept']:,} of {c['length']:,} tokens" for c in columns]
        assert self.fact("A cache keeps") == kept

    def fits(self, theme: str) -> None:
        """Nothing is wider than the page, every picture is there, every control has a name, and the
        badges have the colours of the curves."""
        page = self.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        charts = page.locator(".chart:visible").all()
        assert len(charts) > 6 and all(c.locator("svg, canvas").count() == 1 for c in charts)
        assert page.evaluate(NAMELESS) == [] and page.evaluate(TWICE) == []
        page.locator("#figure-map summary").click()
        page.locator("#figure-map tbody tr").first.wait_for()  # filled once it is open
        assert page.locator("#figure-map tbody tr").count() > 10
        said = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--s1')")
        assert said.strip() == (DARK if theme == "dark" else LIGHT)[SCHEMES[0]]

    def clean(self) -> None:
        """Nothing was said on the console, and nothing was asked of another host."""
        assert self.wrong == []
        hosts = {urlsplit(url).netloc for url in self.requests if not url.startswith("data:")}
        assert hosts <= {urlsplit(self.page.url).netloc}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as port:
        yield f"http://127.0.0.1:{port}/"


def test_controls_move_the_numbers(browser: Any, address: str) -> None:
    reader = Reader(browser, f"{address}?{STATE}&method1=linear&method2=yarn")
    page = reader.page
    reader.same_as_library()
    reader.fits("light")
    before = reader.rows("wavelengths")

    page.locator("#base1-slide").focus()  # by the keyboard
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    reader.settle()
    base = float(page.input_value("#base1"))
    assert base > 10000 and reader.state().columns[0].base == base
    assert reader.rows("wavelengths") != before
    reader.same_as_library()

    page.fill("#factor2", "8")
    reader.settle()
    assert "yarn(8, original=256)" in page.input_value("#text2")
    reader.same_as_library()

    page.select_option("#method1", "streaming")
    page.fill("#window", "128")
    reader.settle()
    assert reader.state().window == 128
    assert reader.fact("A cache keeps")[0] == "128 of 1,024 tokens"
    reader.same_as_library()
    reader.clean()


def test_schemes_come_and_go_and_a_link_brings_them_back(browser: Any, address: str) -> None:
    link = f"{address}?{STATE}&method1=own&method2=yarn"
    reader = Reader(browser, link, width=390, theme="dark")  # on a phone
    page = reader.page
    reader.fits("dark")
    page.click("#add")
    reader.settle()
    page.fill("#text3", "rope(remap=rerope(64)) + window(100)")
    reader.settle()
    assert page.input_value("#method3") == "written"
    assert reader.fact("A cache keeps")[2] == "100 of 1,024 tokens"
    page.click("#card1 .remove")
    reader.settle()
    assert [c.method for c in reader.state().columns] == ["yarn", "written"]
    reader.same_as_library()
    again = Reader(browser, page.url)
    assert again.state() == reader.state()
    again.same_as_library()
    page.fill("#text2", "rope(bass=3)")
    reader.settle()
    assert "base" in page.inner_text("#mistake2")
    assert reader.rows("wavelengths")[0]["column"] == "A"  # the other stays
    reader.clean()


def test_a_model_is_picked(browser: Any, address: str, tmp_path: Path) -> None:
    reader = Reader(browser, f"{address}?{STATE}&method1=own")
    page = reader.page
    page.fill("#model", "tiny-rope")
    page.click("#load")
    reader.settle()
    assert reader.state().model == "tiny-rope"
    assert [c.method for c in reader.state().columns] == ["own", "yarn", "leaky_rerope"]
    config = {"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    page.set_input_files("#file", str(file))
    reader.settle()
    assert reader.state().own == "alibi()"
    heads = {r["head"] for r in reader.rows("bias1")}
    assert heads == {0, 1, 2, 3} and reader.state().heads == 4
    page.locator("#snippets .block", has_text="alibi()").first.wait_for()
    reader.clean()


def test_a_still_page_needs_nobody(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "still.html"
    asked = PageState(window=256, length=1024, columns=(Column("own"), Column("yarn")))
    ExploreResult(asked).report(file)
    reader = Reader(browser, file.as_uri())
    assert [url for url in reader.requests if not url.startswith("data:")] == [file.as_uri()]
    columns = json.loads(draw(asked))["columns"]
    assert [r["mean"] for r in reader.rows("decay")] == [
        m for c in columns for m in c["decay"]["mean"]
    ]
    reader.page.locator("#snippets .block").nth(3).wait_for()
    assert "yarn(4, original=256)" in reader.page.input_value("#text2")
    assert not reader.page.locator("#load").is_visible() and reader.wrong == []
