"""The report of an extension: right numbers, nothing from outside unescaped, no part needed."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
import vl_convert
from rich.cells import cell_len
from rich.console import Console

from longitude.core.validate import UserError
from longitude.eval.records import BASELINE, CONTEXT, COST, KEPT, LOSS, RETRIEVAL, Measurement
from longitude.eval.stats import Interval
from longitude.eval.tasks import families, metrics
from longitude.extension.advice import recommend
from longitude.viz import extend as report
from longitude.viz.extend import markdown, page
from longitude.viz.result_charts import extend_charts as charts
from longitude.viz.result_charts import place_names, standalone
from longitude.viz.section import INSANE, Section, signed
from longitude.viz.section import section as make_section
from longitude.viz.vega import dashes, stroke
from tests.viz import rows


def only(*measures: str) -> list[Measurement]:
    return [one for one in rows.FOUND if one.key.measure in measures]


CASES: dict[str, list[Measurement]] = {
    "a whole run": rows.FOUND,
    "losses alone": only(LOSS),
    "context alone": only(CONTEXT),
    "kept context alone": only(KEPT),
    "questions alone": only(RETRIEVAL),
    "cost alone": only(COST),
    "one row": rows.FOUND[:1],
    "the baseline alone": [one for one in only(KEPT, CONTEXT, RETRIEVAL) if one.is_baseline],
    "one length": [one for one in only(CONTEXT, KEPT, RETRIEVAL, COST) if one.key.length == 512],
    "all refused": [one for one in rows.FOUND if one.refused],
    "one document": [one for one in only(LOSS, CONTEXT) if one.key.text == rows.DOCUMENTS[0]],
}


@cache
def section(case: str = "a whole run") -> Section:
    return make_section(CASES[case], rows.ADVICE, rows.NEXT, rows.MAPS)


@cache
def whole_page() -> str:
    return page([section()], rows.MODEL.name)


def shown(case: str = "a whole run", width: int = 100, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)
    report.show_section(section(case), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


class Read(HTMLParser):
    """The tags of a page, and the text that is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def test_the_table_has_the_means_of_the_documents() -> None:
    one = section()
    for label in ("baseline", "yarn", "leaky_rerope"):
        mean = fmean(rows.loss(label, 2048, n) for n in range(4))
        assert one.shown(label, "context").value == f"{mean:.3f}"
        given = [a for f in rows.HARDNESS for a in rows.exacts(label, 2048, f)]
        assert one.shown(label, "retrieval").value == f"{100 * fmean(given):.0f} %"
        nats = [x for f in rows.HARDNESS for x in rows.losses(label, 2048, f)]
        assert one.shown(label, "answer_loss").value == f"{fmean(nats):.3f}"
        told = rows.gains(label, 2048)
        share = sum(nats for nats, _ in told) / sum(of for _, of in told)
        assert one.shown(label, "kept_context").value == f"{100 * share:.0f} %"
    gap = fmean(rows.loss("yarn", 2048, n) - rows.loss("baseline", 2048, n) for n in range(4))
    assert one.shown("yarn", "over baseline").value == f"{gap:+.3f}"
    gap = fmean(rows.loss("yarn", 256, n) - rows.loss("baseline", 256, n) for n in range(4))
    assert one.shown("yarn", "in-window cost").value == f"{gap:+.3f}"
    assert one.shown("self_extend", "context").reason == rows.REFUSED
    assert one.ranked == ["leaky_rerope", "yarn", "self_extend", "ntk", "linear", "baseline"]


def test_effective_lengths_are_those_of_the_rows() -> None:
    advice, one = recommend(rows.FOUND, 2048).to_json(), section()
    assert {n: advice[n] for n in ("effective_length", "forgets")} == {
        n: rows.ADVICE[n] for n in ("effective_length", "forgets")
    }
    assert [one.shown(s, "effective length").value for s in ("yarn", "ntk")] == ["2,048", "512"]
    assert advice["best"]["label"] == rows.ADVICE["best"]["label"]
    assert one.remarks()[-1] == "baseline, linear: forgets (keeps nothing at 2,048 tokens)"


def test_what_can_not_be_told_apart_is_marked() -> None:
    some = make_section([one for one in only(RETRIEVAL) if one.key.at["family"] == "passkey"])
    assert some.shown("leaky_rerope", "retrieval").mark == "best"
    assert some.shown("yarn", "retrieval").mark == "tied"  # eight questions tell little
    assert some.shown("baseline", "retrieval").mark == ""
    assert '<td class="tied">' in page([some], "") and "≈88 %" in report.table(some)


def test_charts_hold_the_numbers_of_the_rows() -> None:
    drawn = {c.name: c for c in charts(section())}
    means = {(r["label"], r["length"]): r["mean"] for r in drawn["context"].rows}
    for (label, length), mean in means.items():
        assert mean == pytest.approx(fmean(rows.loss(label, length, n) for n in range(4)))
    assert len(means) == 6 * 4 - 1  # one was refused
    titles = {families()[name].title: name for name in rows.HARDNESS}
    heat = next(c for c in drawn.values() if c.label == "linear")
    for r in heat.rows:
        assert r["mean"] == fmean(rows.exacts("linear", r["length"], titles[r["family"]]))
    assert {c.label for c in drawn.values() if c.label} == {*rows.METHODS}
    assert {r["label"]: r["x"] for r in drawn["cost"].rows}["yarn"] == pytest.approx(60_000)
    assert len(drawn["distance"].rows) == sum(map(len, rows.MAPS.values()))
    trained = [n for n, c in drawn.items() if '"trained window 256"' in json.dumps(c.spec)]
    assert trained == ["kept_context", "answer_loss", "loss", "context", "distance"]


def test_kept_context_is_the_first_chart() -> None:
    one = section()
    first, *others = charts(one)
    assert first.name == KEPT and first.title == "Kept context"
    assert KEPT not in {chart.name for chart in others}
    drawn = {(r["label"], r["length"]): r["mean"] for r in first.rows}
    every = {(s, n) for s in rows.METHODS for n in rows.LENGTHS}
    insane = {("baseline", 512), ("baseline", 1024), ("baseline", 2048)}
    insane |= {("linear", 1024), ("linear", 2048)}
    assert one.insane == insane and {*drawn} == every - insane - {("self_extend", 2048)}
    for (label, length), share in drawn.items():
        told = rows.gains(label, length)
        assert share == pytest.approx(sum(g for g, _ in told) / sum(w for _, w in told))
    svg = vl_convert.vegalite_to_svg(json.dumps(standalone(one, [first])))
    assert "trained window 256" in svg
    rules = [x for x in first.spec["layer"] if "mean" in str(x.get("data", {}).get("values"))]
    assert [x["data"]["values"] for x in rules] == [[{"mean": drawn["baseline", 256]}]]


def test_a_heat_map_holds_families_by_lengths() -> None:
    one = section()
    maps = [chart for chart in charts(one) if chart.label]
    assert [chart.name for chart in maps] == [f"answers-{n}" for n in range(len(rows.METHODS))]
    titles = {families()[name].title for name in rows.HARDNESS}
    for chart in maps:
        lengths = rows.LENGTHS if chart.label != "self_extend" else rows.LENGTHS[:-1]
        places = [(r["family"], r["length"]) for r in chart.rows]
        assert len(places) == len({*places}) == len(titles) * len(lengths)
        assert {*places} == {(family, n) for family in titles for n in lengths}
    svg = vl_convert.vegalite_to_svg(json.dumps(standalone(one, maps)))
    assert all(f">{title}</text>" in svg for title in titles) and "NaN" not in svg
    shown = "".join(Read(whole_page()).shown)
    assert "Exact answers by length" in shown and "50% of 8" in shown


def test_every_view_tells_what_is_kept_and_how_far(tmp_path: Path) -> None:
    told = recommend(rows.FOUND, 2048).to_json()
    one = make_section(rows.FOUND, told)
    report.write_summary([one], tmp_path / "summary.md")
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    tiles = " ".join(Read(page([one], "").split("<h2>All methods")[0]).shown)
    for text in (report.table(one, width=120), summary, tiles):
        words = " ".join(text.replace("\\", "").split())
        assert "it keeps 28 % (95 % CI 28–28) of far context" in words
        assert "Effective length 2,048 tokens" in words
    assert "*28 % 2,048 *100 %" in " ".join(report.table(one, width=120).split())
    assert "| `leaky_rerope` | **28 %** (28 – 28 %) | 2,048 | **100 %**" in summary
    assert "Kept context, share:" in summary
    assert "kept 28 % share, at 2,048 baseline -61 %†" in " ".join(tiles.split())
    assert "effective length 2,048 tokens baseline 256" in " ".join(tiles.split())
    numbers = json.loads(json.dumps(told))["best"]["numbers"]
    assert numbers["kept"]["mean"] == pytest.approx(0.28, abs=0.001)
    assert numbers["effective_length"] == told["effective_length"]["leaky_rerope"] == 2048


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_drawn(case: str) -> None:
    one = section(case)
    for chart in (c for c in charts(one) if c.label in (None, BASELINE)):
        svg = vl_convert.vegalite_to_svg(json.dumps(standalone(one, [chart]), allow_nan=False))
        assert "NaN" not in svg and "Infinity" not in svg
        named = {r["label"] for r in chart.rows}  # a picture that stands alone has a key
        assert not [label for label in named if f">{label}</text>" not in svg]
    read = Read(page([one], case))
    assert [tag for tag, _ in read.tags].count("h1") == 1
    text = "".join(read.shown)
    assert all(label in text for label in one.labels)


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_printed(case: str, width: int) -> None:
    out = shown(case, width).split("Use it in Python")[0]  # commands are never broken
    assert max(cell_len(line) for line in out.splitlines()) <= width
    assert "\x1b" not in out and "tiny <img" in out


def test_the_terminal_has_colours_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "\x1b[1m1.443\x1b[0m" in shown(colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(colour=True))
    assert "*1.443" in shown()


def test_nothing_from_outside_is_obeyed() -> None:
    text = whole_page()
    read = Read(text)
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert not [attrs for _, attrs in read.tags if any(a.startswith("on") for a in attrs)]
    assert sum(tag == "script" for tag, _ in read.tags) == 3  # the numbers, Vega and ours
    assert rows.HOSTILE not in text and rows.SCRIPT not in text
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert data and "<" not in data[1]
    assert not [a for _, attrs in read.tags for n, a in attrs.items() if n in ("src", "href") and a]


def test_markdown_shows_html_as_text(tmp_path: Path) -> None:
    report.write_summary([section()], tmp_path / "summary.md", [tmp_path / "charts" / "loss.png"])
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert rows.HOSTILE not in text and r"\<img src=x onerror=alert(1)\>" in text
    assert "![loss](charts/loss.png)" in text
    assert "| **1.443** (1.357 – 1.529) |" in text and rows.REFUSED in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table[:8]}) == 1
    assert not list(tmp_path.glob(".*"))
    assert "`rope(remap=leaky_rerope(96, 16))`" in text and "| 0.1235 | 0.5 |" in text
    assert r"- left out to fit into 10m: \<img" in text


def test_the_first_words_of_the_page_are_which_why_and_what_to_type() -> None:
    text = " ".join("".join(Read(whole_page().split("<h2>All methods")[0]).shown).split())
    wanted = (
        "Use leaky_rerope",
        "28 %",
        "100 %",
        "1.443",
        "import longitude.hf as lh",
        "At 2,048 tokens it keeps",
    )
    places = [text.index(one) for one in (rows.MODEL.name, *wanted)]
    assert places == sorted(places)
    for shown_too in (
        "gains +0.0210 nats",
        "A factor of 8 is enough",
        "transformers, vllm, sglang",
    ):
        assert shown_too in text
    below = "".join(Read(whole_page()).shown)
    assert "lambada, perplexity,none" in below and "left out to fit into 10m" in below


def test_a_share_that_means_nothing_has_a_dagger_everywhere() -> None:
    card, written = markdown(section()), whole_page().split("<script")[0]
    assert "| -61 %† (-61 – -61 %)" in card and "-61 %†</span>" in written
    assert INSANE in card and INSANE in " ".join("".join(Read(written).shown).split())
    assert "28 %†" not in card + written
    sane = make_section([one for one in rows.FOUND if one.label not in (BASELINE, "linear")])
    assert not sane.any_insane and "†" not in markdown(sane)
    assert "†" not in page([sane], "").split("<script")[0]


def test_a_wide_interval_leaves_the_lines_in_view() -> None:
    found = only(CONTEXT)
    wild = [rows.row(CONTEXT, "yarn", 512, {"loss": 90.0}, text=rows.DOCUMENTS[0])]
    (chart,) = [c for c in charts(make_section([*found, *wild])) if c.name == "context"]
    means = [r["mean"] for r in chart.rows]
    (low, high) = next(
        scale["domain"]
        for layer in chart.spec["layer"]
        if "domain" in (scale := layer["encoding"].get("y", {}).get("scale", {}))
    )
    assert min(r["low"] for r in chart.rows) < 0 < low < min(means) < max(means) < high
    assert high < 2 * max(means) < max(r["high"] for r in chart.rows)


def test_names_beside_dots_do_not_cover_each_other() -> None:
    dots = [{"label": f"method {n}", "x": 100.0, "mean": 1.0 + n / 1000} for n in range(4)]
    placed = place_names([*dots, {"label": "far", "x": 900.0, "mean": 9.0}])
    assert sum(map(len, placed.values())) == 5
    assert {len(named) for (side, _), named in placed.items() if side == "left"} == {1}


def test_no_change_has_no_minus() -> None:
    tiny = Interval(-1e-5, -2e-5, 1e-5, 4)
    assert signed(tiny).value == "+0.000"


def test_control_characters_are_left_out() -> None:
    bad = rows.row(CONTEXT, "yarn", 256, {"loss": 1.0, "label": "ya\x1b[31mrn\x07"})
    console = Console(file=io.StringIO(), width=80)
    report.show_section(make_section([bad], rows.ADVICE), console)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in out and "ya [31mrn" in out


def test_pictures_are_written(tmp_path: Path) -> None:
    found = [one for one in rows.FOUND if one.label in (BASELINE, "yarn")]
    drawn = report.write_charts(make_section(found, maps=rows.MAPS), tmp_path)
    named = ["kept_context", "answers", "answer_loss", "loss", "context", "distance", "cost"]
    assert [p.stem for p in drawn] == named
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)


def test_models_stand_beside_each_other_under_names_of_their_own() -> None:
    text = page([section("context alone"), section("context alone")], "Two")
    ids = [attrs["id"] for _, attrs in Read(text).tags if attrs.get("id")]
    assert len(ids) == len({*ids}) and {"chart-context", "chart-2-context"} <= {*ids}


def test_twenty_methods_have_strokes_of_their_own() -> None:
    assert len({stroke(n) for n in range(20)}) == 20 and stroke(0) == (0, 0)
    assert len(dashes(range(20))) == 20


def test_numbers_are_printed_in_their_metrics_format() -> None:
    printed = {name: metric.format for name, metric in metrics().items()}
    assert printed["retrieval"](0.755) == "76 %" and printed["memory"](3 * 2**29) == "1.50 GiB"
    assert printed["prefill"](37_200.4) == "37,200" and printed["decode"](2.4193) == "2.42"
    assert printed["kept_context"](-0.001) == "0 %"
    assert printed["loss"](1.2345) in ("1.234", "1.235")


def test_a_section_is_of_rows_of_one_model() -> None:
    with pytest.raises(UserError, match="no measurements"):
        make_section([])
