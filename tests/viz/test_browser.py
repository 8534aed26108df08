"""The page in a browser: it opens without a network or an error, and has the rows' numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longitude.viz import extend as report
from longitude.viz.result_charts import extend_charts as charts
from longitude.viz.section import section
from tests.viz import rows
from tests.viz.browser import Seen, chromium, opened, same_as_rows

SECTION = section(rows.FOUND, rows.ADVICE, rows.NEXT, rows.MAPS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write_page([SECTION], path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def light(browser: Any, path: Path) -> Seen:
    return opened(browser, path)


def test_it_opens_without_an_error_and_asks_for_nothing(
    light: Seen, browser: Any, path: Path
) -> None:
    for seen in (light, opened(browser, path, scheme="dark")):
        seen.check()
        assert seen.page.locator(".chart").count() == len(rows.METHODS) + 6
        assert seen.page.locator("h1").inner_text() == rows.MODEL.name
        assert rows.HOSTILE in seen.page.locator(".about").inner_text()
        assert seen.page.locator("img").count() == 0


def test_the_charts_have_the_numbers_of_the_rows(light: Seen) -> None:
    same_as_rows(light.charts(), rows.FOUND)


def test_other_numbers_are_told_from_the_rows() -> None:
    drawn = {chart.name: chart.rows for chart in charts(SECTION)}
    same_as_rows(drawn, rows.FOUND)
    for name in ("kept_context", "answers-1", "answer_loss", "loss", "context"):
        off = [{**drawn[name][0], "mean": drawn[name][0]["mean"] + 1e-6}, *drawn[name][1:]]
        for changed in (off, drawn[name][1:]):
            with pytest.raises(AssertionError, match=name.partition("-")[0]):
                same_as_rows({**drawn, name: changed}, rows.FOUND)
    other = replace(rows.FOUND[0], value={**rows.FOUND[0].value, "bins": [[0, 16, 9.0]]})
    with pytest.raises(AssertionError, match="loss"):
        same_as_rows(drawn, [other, *rows.FOUND[1:]])


def test_the_tables_have_the_numbers_of_the_charts(light: Seen) -> None:
    seen = light
    box = seen.page.locator("#figure-context details")
    box.locator("summary").click()
    lines = [line.split("\t") for line in box.locator("tbody").inner_text().splitlines()]
    text = " ".join(" ".join(line) for line in lines)
    for r in seen.charts()["context"]:
        assert f"{r['mean']:.3f}" in text


def test_a_phone_needs_no_sideways_scrolling(browser: Any, path: Path) -> None:
    seen = opened(browser, path, width=390)
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
    seen.page.wait_for_function("() => document.querySelector('.copy').textContent === 'Copied'")
    assert seen.page.evaluate("navigator.clipboard.readText()") == rows.NEXT[0][1]


def test_the_colours_follow_the_theme(light: Seen) -> None:
    seen = light
    ink = "getComputedStyle(document.body).color"
    stroke = "document.querySelector('#chart-context .mark-line path').getAttribute('stroke')"
    before = seen.page.evaluate(ink), seen.page.evaluate(stroke)
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_function(f"() => {stroke} !== {before[1]!r}")
    seen.page.evaluate("window.longitude.ready")
    assert seen.page.evaluate(ink) != before[0] and seen.errors == []
