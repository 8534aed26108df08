"""What a lab run found, drawn: the numbers are right, and nothing that may be missing is missed."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from rich.cells import cell_len
from rich.console import Console

from longitude.core.validate import UserError
from longitude.eval.records import Score
from longitude.viz import files, lab
from longitude.viz.lab import lab_tables, position_ticks
from longitude.viz.terminal import BEST
from longitude.viz.vega import method_themes

LENGTHS = (256, 512, 1024)
LOSSES = {"rope()": (1.0, 2.0, 4.0), "alibi()": (1.1, 1.05, 1.05)}
WHY = "learned(256) has 256 positions, but was given 512: use a longer table."


def score(label: str, task: str, length: int, value: float | None, seed: int = 0) -> Score:
    curve = ((0, 1, 5.0), (1, 16, 2.0 + seed), (16, length, value or 9.0)) if task == "text" else ()
    return Score(label, label, seed, task, 256, length, value, curve=curve)


RUN = [
    *(
        score(s, "text", n, v + d, seed)
        for s, losses in LOSSES.items()
        for n, v in zip(LENGTHS, losses, strict=True)
        for seed, d in enumerate((-0.01, 0.01))
    ),
    score("learned(256)", "text", 256, 1.2),
    *(replace(score("learned(256)", "text", n, None), refused=WHY, curve=()) for n in LENGTHS[1:]),
    *(score("rope()", "copy", n, 256 / n) for n in LENGTHS),
    *(score("alibi()", "copy", n, 0.9) for n in LENGTHS),
]
HOSTILE = "</script><!--<script>&|`*\x1b[31m\x07\n" + "long " * 30
CASES: dict[str, list[Score]] = {
    "a whole run": RUN,
    "one length": [s for s in RUN if s.length == 256],
    "one scheme": [s for s in RUN if s.label == "rope()"],
    "one score": RUN[:1],
    "all refused": [replace(s, value=None, refused=WHY, curve=()) for s in RUN],
    "no values": [replace(s, value=None, curve=()) for s in RUN],
    "no text": [s for s in RUN if s.task != "text"],
    "no curve": [replace(s, curve=()) for s in RUN],
    "nothing lost": [
        replace(s, value=s.value and 0.0, curve=tuple((a, b, 0.0) for a, b, _ in s.curve))
        for s in RUN
    ],
    "two windows": [*RUN, *(replace(s, trained=512) for s in RUN)],
    "a window that is no test length": [replace(s, trained=100) for s in RUN],
    "thirteen schemes": [replace(s, label=f"{s.label} {n}") for n in range(5) for s in RUN],
    "many lengths": [replace(s, length=s.length + n) for n in range(12) for s in RUN],
    "hostile": [replace(s, label=s.label + HOSTILE, task=HOSTILE, refused=HOSTILE) for s in RUN],
    "wide letters": [replace(s, label="位置" * 20) for s in RUN if s.label == "rope()"],
}


def printed(scores: list[Score], width: int = 80, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)
    lab.show(scores, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_has_means_intervals_and_the_best() -> None:
    text, copy = lab_tables(RUN)
    assert (text.task, text.trained, text.lengths) == ("text", 256, LENGTHS)
    assert text.labels == ("rope()", "alibi()", "learned(256)") and copy.task == "copy"
    assert [text.cell("rope()", n).value for n in LENGTHS] == ["1.000", "2.000", "4.000"]
    assert text.cell("rope()", 512).interval == "±0.010" and copy.cell("rope()", 512).interval == ""
    best = {s: [text.cell(s, n).mark == BEST for n in LENGTHS] for s in text.labels}
    assert best["rope()"] == [True, False, False] and best["alibi()"] == [False, True, True]
    assert best["learned(256)"] == [False] * 3
    assert [bool(copy.cell("rope()", n).mark) for n in LENGTHS] == [True, False, False]  # higher
    assert copy.cell("learned(256)", 256).value == ""
    assert text.cell("learned(256)", 512).value == "–"
    assert text.measure.endswith("mean of up to 2 seeds ± half their range")
    assert copy.measure == "share of exact answers"


def test_what_is_equal_as_printed_is_equally_good() -> None:
    near = [score("a", "copy", 256, 0.901), score("b", "copy", 256, 0.899)]
    (table,) = lab_tables(near)
    assert not table.cell("a", 256).mark and not table.cell("b", 256).mark  # nothing is worse
    (table,) = lab_tables([*near, score("c", "copy", 256, 0.5)])
    assert [table.cell(s, 256).mark for s in "abc"] == [BEST, BEST, ""]


def test_a_reason_stands_once_with_all_it_is_for() -> None:
    assert lab_tables(RUN)[0].reasons() == [f"learned(256) from 512 on: {WHY}"]
    one = [replace(s, value=None, refused="No.") for s in RUN if s.task == "copy"]
    assert lab_tables(one)[0].reasons() == ["rope(), alibi() from 256 on: No."]
    hole = [replace(s, value=None, refused="No.") if s.length == 512 else s for s in RUN[-3:]]
    assert lab_tables(hole)[0].reasons() == ["alibi() at 512: No."]


def test_the_points_of_a_curve_lie_inside_its_bins_and_the_last_ends_it() -> None:
    path = lab_tables(RUN)[0].curves["rope()"]
    assert [round(x, 3) for x, _ in path] == [1, 5.657, 131.939, 1024]
    assert [s.mean for _, s in path] == [5.0, 2.5, 4.0, 4.0]


@pytest.mark.parametrize("trained", [1, 3, 256, 1000, 131072])
def test_an_axis_of_positions_names_the_trained_window_first(trained: int) -> None:
    ticks = position_ticks(trained, 10**6)
    assert ticks[0] == trained and len({*ticks}) == len(ticks)
    assert min(ticks) >= 1 and max(ticks) <= 10**6


def test_tables_have_the_numbers() -> None:
    lines = [" ".join(line.split()) for line in printed(RUN).splitlines()]
    assert "text, trained at 256" in lines and "copy, trained at 256" in lines
    head = lines.index("text, trained at 256")
    assert lines[head + 2 : head + 4] == ["256", "trained 512 1024"]
    assert "rope() 1.000±0.010 2.000±0.010 4.000±0.010" in lines
    assert "learned(256) 1.200 – –" in lines and "alibi() 0.90 0.90 0.90" in lines
    assert f"– learned(256) from 512 on: {WHY}" in " ".join(lines)


def test_the_best_is_bold_and_the_trained_column_green() -> None:
    out = printed(RUN, colour=True)
    assert "\x1b[1m1.000\x1b[0m" in out and "\x1b[1m1.050\x1b[0m" in out
    assert "\x1b[1m1.100" not in out and "\x1b[1m2.000" not in out
    assert re.search(r"\x1b\[32m *trained", out) and "\x1b[90m–\x1b[0m" in out


def test_a_swing_goes_below_its_number_where_there_is_no_room() -> None:
    lines = [line.split() for line in printed(RUN, width=45).splitlines()]
    at = lines.index(["rope()", "1.000", "2.000", "4.000"])
    assert lines[at + 1] == ["±0.010"] * 3


def test_a_table_too_wide_goes_on_below() -> None:
    lines = [line.split() for line in printed(CASES["many lengths"], width=60).splitlines()]
    heads = [n for line in lines for n in line if n in {str(512 + n) for n in range(12)}]
    assert {*heads} == {str(512 + n) for n in range(12)}


def test_curves_are_drawn_with_the_trained_window() -> None:
    out = printed(RUN)
    assert "Loss by position" in out and "exact answers, by test length" in out
    assert out.count("┊  trained at 256") == 2
    assert "Loss by position" not in printed(CASES["no curve"])
    assert "nats per byte, by test length (log)" in printed(CASES["no curve"])
    assert "by test length" not in printed(CASES["one length"])
    assert "┊" not in printed(CASES["a window that is no test length"]).split("exact answers, ")[1]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_printed(case: str, width: int) -> None:
    out = printed(CASES[case], width)
    assert max(cell_len(line) for line in out.splitlines()) <= width
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", out)


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_a_document_that_compiles(case: str) -> None:
    spec = lab.spec(CASES[case], case)
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    assert "NaN" not in svg and "Infinity" not in svg
    assert len(spec["vconcat"]) == len({(s.task, s.trained) for s in CASES[case]})


def layers(spec: dict[str, Any], kind: str) -> list[list[dict[str, Any]]]:
    """The rows behind each mark of a kind: its own, or those of its chart."""
    charts = [c for row in spec["vconcat"] for c in row["hconcat"]]
    found = [(layer, layer.get("data", c["data"])) for c in charts for layer in c["layer"]]
    return [data["values"] for layer, data in found if layer["mark"]["type"] == kind]


def test_the_charts_show_what_the_tables_do() -> None:
    spec = lab.spec(RUN, "title")
    by_position, by_length = layers(spec, "line")
    assert {r["x"] for r in by_length} == {*LENGTHS} and len(by_position) == 4 * 3
    assert [(r["mean"], r["low"], r["high"]) for r in by_position[1:2]] == [(2.5, 2.0, 3.0)]
    (band,) = layers(spec, "area")  # one seed has no band
    assert {r["label"] for r in band if r["low"] < r["high"]} == {*LOSSES}
    shown = {r["text"].strip() for rows in layers(spec, "text") for r in rows if "text" in r}
    cells = [t.cell(s, n) for t in lab_tables(RUN) for s, n in t.cells]
    assert shown == {f"{c.value} {c.interval}".strip() for c in cells}


def test_schemes_differ_by_colour_and_dash() -> None:
    spec = lab.spec(CASES["thirteen schemes"], "title")
    line = next(v for v in spec["vconcat"][0]["hconcat"][0]["layer"] if v["mark"]["type"] == "line")
    colours = method_themes(15, first=1)["light"]["range"]["category"]
    dashes = line["encoding"]["strokeDash"]["scale"]["range"]
    strokes = {(c, *d) for c, d in zip(colours, dashes, strict=True)}
    assert len(strokes) == len(line["encoding"]["color"]["scale"]["domain"]) == 15


class Scripts(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_is_not_broken_by_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lab.html"
    lab.write(CASES["hostile"], path, f"{HOSTILE} title")
    text = path.read_text(encoding="utf-8")
    found = Scripts()
    found.feed(text)
    assert found.tags == [
        *("html", "head", "meta", "meta", "meta", "meta", "title", "style"),
        *("body", "main", "script", "script", "script"),  # the spec, Vega and ours
    ]
    data = re.search(r'id="charts">(.*?)</script>', text)
    assert data and "<" not in data[1]
    spec = json.loads(data[1])["charts"]["figure"]["spec"]
    assert "script><!--" in spec["title"]["text"]
    assert [p.name for p in path.parent.iterdir()] == ["lab.html"]


def test_pictures_are_written(tmp_path: Path) -> None:
    lab.write(RUN[:1], tmp_path / "lab.png", "title")
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lab.write(RUN, tmp_path / "lab.SVG", "A title")
    svg = (tmp_path / "lab.SVG").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and "A title" in svg and "learned(256)" in svg


def test_a_picture_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lab.svg"
    path.write_text("old")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        files.write_spec(lab.spec(RUN[:1], "title"), "title", path)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no kind of file"):
        lab.write(RUN, tmp_path / "lab.pdf", "title")
    with pytest.raises(UserError, match="There are no scores to draw into"):
        lab.write([], tmp_path / "lab.png", "title")
    assert not [*tmp_path.iterdir()]
    assert printed([]) == "" and lab.markdown([]) == ""


def test_markdown() -> None:
    text, copy = lab.markdown(RUN).split("\n\n| copy")
    assert text == (
        "text, trained at 256: loss of the last tokens, nats per byte; mean of up to 2 seeds ± half"
        " their range.\n\n"
        "| text | 256 (trained) | 512 | 1024 |\n"
        "| --- | --: | --: | --: |\n"
        "| `rope()` | **1.000** ±0.010 | 2.000 ±0.010 | 4.000 ±0.010 |\n"
        "| `alibi()` | 1.100 ±0.010 | **1.050** ±0.010 | **1.050** ±0.010 |\n"
        "| `learned(256)` | 1.200 | – | – |\n\n"
        f"- learned(256) from 512 on: {WHY}\n\n"
        "copy, trained at 256: share of exact answers."
    )
    assert "| `alibi()` | 0.90 | **0.90** | **0.90** |" in copy


def test_markdown_is_not_broken_by_what_it_shows() -> None:
    table = [line for line in lab.markdown(CASES["hostile"]).splitlines() if line[:1] == "|"]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {5}
    assert all("`` " in line for line in table[2:])  # a code span that may hold a backtick
    outside = re.sub(r"``.*?``", "", lab.markdown(CASES["hostile"]))
    assert not re.search(r"(?<!\\)<", outside)
