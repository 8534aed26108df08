"""A report's page in a headless Chromium: nothing leaves it, and its charts have the rows' numbers.

The numbers are worked out from the rows once more here, by plain loops.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from longitude.eval.records import (
    ANSWER_LOSS,
    BASELINE,
    CONTEXT,
    COST,
    KEPT,
    LOSS,
    RETRIEVAL,
    Measurement,
    of,
)
from longitude.eval.tasks import families

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
ROWS = """Object.fromEntries(
  Object.entries(window.longitude.views).map(([name, view]) => [name, view.data("rows")]))"""
Charts = Mapping[str, Sequence[Mapping[str, Any]]]
Numbers = dict[tuple[Any, ...], float]


class Seen:
    """A page that was opened, and what came of it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.errors: list[str] = []
        self.key: list[str] = []
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
            self.key.append(route.request.url)
        route.continue_() if mine else route.abort()

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def charts(self) -> Charts:
        """The rows that each chart has drawn, by its name."""
        return self.page.evaluate(ROWS)

    def check(self) -> None:
        """No error, no request, no dialog, and a picture in every box."""
        assert (self.errors, self.key, self.dialogs) == ([], [], [])
        boxes = self.page.locator(".chart").count()
        assert self.page.locator(".chart svg").count() == boxes > 0


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; where there is none, the test is skipped."""
    play = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with play.sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, path: Path, width: int = 1100, scheme: str = "light") -> Seen:
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    return Seen(context.new_page(), path.resolve().as_uri())


def opens_cleanly(path: Path) -> None:
    """The page opens without an error, in light and dark, and asks for nothing."""
    with chromium() as browser:
        for scheme in ("light", "dark"):
            opened(browser, path, scheme=scheme).check()


def read_charts(path: Path) -> Charts:
    """The rows behind each chart of a page that opens cleanly, read back from the browser."""
    with chromium() as browser:
        seen = opened(browser, path)
        seen.check()
        return seen.charts()


def same_as_rows(charts: Charts, found: Sequence[Measurement]) -> None:
    """The charts of one model have the numbers of its rows: all of them, and no other."""
    rows = [one for one in found if not one.refused]
    told: dict[str, Numbers] = {
        LOSS: _of(charts.get("loss", ()), "first", "past"),
        **{m: _of(charts.get(m, ()), "length") for m in (KEPT, ANSWER_LOSS, CONTEXT)},
        "answers": {},
        COST: {(r["label"],): r["x"] for r in charts.get("cost", ())},
    }
    for name, drawn in charts.items():
        told["answers"] |= _of(drawn, "length", "family") if name.startswith("answers") else {}
    expected = {
        LOSS: _bins(rows),
        KEPT: {p: share for p, share in _shares(rows).items() if _sane(rows, p)},
        ANSWER_LOSS: _means(rows, RETRIEVAL, "losses"),
        CONTEXT: _means(rows, CONTEXT, "loss"),
        "answers": _means(rows, RETRIEVAL, "exacts", by_family=True),
        COST: _speeds(rows),
    }
    for name in expected:
        assert told[name].keys() == expected[name].keys(), name
        assert told[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


def _of(drawn: Sequence[Mapping[str, Any]], *names: str) -> Numbers:
    return {(r["label"], *(r[name] for name in names)): r["mean"] for r in drawn}


def _means(
    rows: Sequence[Measurement], measure: str, field: str, by_family: bool = False
) -> Numbers:
    """A mean over documents, or over all questions that were asked."""
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for one in of(rows, measure):
        family = [families()[one.key.at["family"]].title] if by_family else []
        value = one.value[field]
        values[one.label, one.key.length, *family] += value if isinstance(value, list) else [value]
    return {place: fmean(found) for place, found in values.items()}


def _shares(rows: Sequence[Measurement]) -> Numbers:
    """What is kept of the baseline's gain without filler, over all documents."""
    sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in of(rows, KEPT):
        for nats, whole in one.value["gains"]:
            sums[one.label, one.key.length][0] += nats
            sums[one.label, one.key.length][1] += whole
    return {place: nats / whole for place, (nats, whole) in sums.items()}


def _sane(rows: Sequence[Measurement], place: tuple[Any, ...]) -> bool:
    """Whether a loss is at most half a nat over the baseline's in its window."""
    losses, subject = _means(rows, CONTEXT, "loss"), rows[0].key.subject
    own = losses.get((BASELINE, subject.trained))
    return own is None or place not in losses or losses[place] <= own + 0.5


def _bins(rows: Sequence[Measurement]) -> Numbers:
    """Mean loss of each bin of positions, from the longest reading of each method."""
    losses: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    longest: dict[str, int] = {}
    for one in of(rows, LOSS):
        longest[one.label] = max(one.key.length, longest.get(one.label, 0))
    for one in of(rows, LOSS):
        if one.key.length == longest[one.label]:
            for first, past, loss in one.value["bins"]:
                losses[one.label, first, past].append(loss)
    return {place: fmean(found) for place, found in losses.items()}


def _speeds(rows: Sequence[Measurement]) -> Numbers:
    """Prefill at the greatest length, of the methods whose kept share (or, without any, whose loss)
    is known there too, and means something."""
    costs, board = of(rows, COST), of(rows, KEPT) or of(rows, CONTEXT)
    at = max({one.key.length for one in costs} & {one.key.length for one in board}, default=0)
    known = {one.label for one in board if one.key.length == at}
    if of(rows, KEPT):
        known = {label for label in known if _sane(rows, (label, at))}
    return {
        (one.label,): one.value["prefill"]
        for one in costs
        if one.key.length == at and one.label in known
    }
