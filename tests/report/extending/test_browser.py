"""The page in a browser: it opens without a network or an error, and has the rows' numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from longitude.report.extending import report
from tests.report.extending import rows

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
DATA = "([name, data]) => window.longitude.views[name].data(data)"


class Seen:
    """A page that was opened, and what came of it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("dialog", self._dialog)
        page.route("**", self._route)
        page.goto(address)
        page.evaluate("window.longitude.ready")

    def _route(self, route: Any) -> None:
        mine = route.request.url == self.address
        if not mine:
            self.asked.append(route.request.url)
        route.continue_() if mine else route.abort()

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def data(self, name: str) -> list[dict[str, Any]]:
        return self.page.evaluate(DATA, [name, "rows"])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write_page([report.section(rows.FOUND, rows.ADVICE, rows.NEXT, rows.MAPS)], path)
    return Path(path).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def light(browser: Any, address: str) -> Seen:
    return opened(browser, address)


def opened(browser: Any, address: str, width: int = 1100, scheme: str = "light") -> Seen:
    size = {"width": width, "height": 900}
    return Seen(browser.new_context(viewport=size, color_scheme=scheme).new_page(), address)


def test_it_opens_without_an_error_and_asks_for_nothing(
    light: Seen, browser: Any, address: str
) -> None:
    for seen in (light, opened(browser, address, scheme="dark")):
        assert (seen.errors, seen.asked, seen.dialogs) == ([], [], [])
        drawn = seen.page.locator(".chart svg").count()
        assert drawn == seen.page.locator(".chart").count() == len(rows.METHODS) + 6
        assert seen.page.locator("h1").inner_text() == rows.MODEL.name
        assert rows.HOSTILE in seen.page.locator(".about").inner_text()
        assert seen.page.locator("img").count() == 0


def test_the_charts_have_the_numbers_of_the_rows(light: Seen) -> None:
    seen = light
    found = seen.data("context")
    assert len(found) == 4 * len(rows.METHODS) - 1
    for r in found:
        mean = fmean(rows.loss(r["label"], r["length"], n) for n in range(4))
        assert r["mean"] == pytest.approx(mean, abs=1e-12)
    for r in seen.data("loss"):
        bins = [
            one.value["bins"]
            for one in rows.FOUND
            if one.asked.measure == "loss" and one.label == r["label"]
        ]
        losses = [v for each in bins for a, b, v in each if (a, b) == (r["first"], r["past"])]
        assert len(losses) == 4 and r["mean"] == pytest.approx(fmean(losses), abs=1e-12)
    for index, label in enumerate(rows.METHODS):
        for r in seen.data(f"grid-{index}"):
            right = rows.right(label, r["length"], r["depth"])
            assert (r["label"], r["mean"], r["n"]) == (label, fmean(right), len(right))


def test_the_tables_have_the_numbers_of_the_charts(light: Seen) -> None:
    seen = light
    box = seen.page.locator("#figure-context details")
    box.locator("summary").click()
    lines = [line.split("\t") for line in box.locator("tbody").inner_text().splitlines()]
    text = " ".join(" ".join(line) for line in lines)
    for r in seen.data("context"):
        assert f"{r['mean']:.3f}" in text


def test_a_phone_needs_no_sideways_scrolling(browser: Any, address: str) -> None:
    seen = opened(browser, address, width=390)
    for box in seen.page.locator("summary").all():
        box.click()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = seen.page.eval_on_selector_all(".chart svg", "all => all.map(s => s.clientWidth)")
    assert max(widths) <= 390 - 2 * 16 and min(widths) > 100


def test_a_method_is_picked_and_a_command_copied(light: Seen) -> None:
    seen = light
    seen.page.locator('.pick[data-label="yarn"]').click()
    chosen = "Object.values(window.longitude.views).map(v => v.signal('chosen'))"
    assert {*seen.page.evaluate(chosen)} == {"yarn"}
    seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    seen.page.locator(".copy").first.click()
    seen.page.wait_for_function("document.querySelector('.copy').textContent === 'Copied'")
    assert seen.page.evaluate("navigator.clipboard.readText()") == rows.NEXT[0][1]


def test_the_colours_follow_the_theme(light: Seen) -> None:
    seen = light
    ink = "getComputedStyle(document.body).color"
    stroke = "document.querySelector('#chart-context .mark-line path').getAttribute('stroke')"
    before = seen.page.evaluate(ink), seen.page.evaluate(stroke)
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_function(f"{stroke} !== {before[1]!r}")
    seen.page.evaluate("window.longitude.ready")
    assert seen.page.evaluate(ink) != before[0] and seen.errors == []
