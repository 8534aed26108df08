"""A run's folder: everything is there and whole, and several are joined into one report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longitude.cli.main import run
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.records import CONTEXT, COST, LOSS, Measurement, Text
from longitude.eval.tables import result_tables
from longitude.extension import result as results
from longitude.extension.api import report
from longitude.extension.result import ExtendResult
from tests.viz import rows

FEW = ("baseline", "yarn", "leaky_rerope")
SMALL = [one for one in rows.FOUND if one.key.measure == CONTEXT and one.label in FEW]


def kept(folder: Path, found: list[Measurement], advice: bool = True) -> Path:
    """A folder with these rows in its store."""
    with Store(folder / results.STORE) as store:
        for one in found:
            store.put(one.key.to_json(), one.value)
    if advice:
        told = {**rows.ADVICE, "next": [{"title": t, "command": c} for t, c in rows.NEXT]}
        (folder / results.ADVICE).write_text(json.dumps(told), encoding="utf-8")
    return folder


def of_model(name: str) -> list[Measurement]:
    subject = replace(rows.MODEL, name=name, weights=name)
    return [replace(one, key=replace(one.key, subject=subject)) for one in SMALL]


def test_a_run_leaves_everything(tmp_path: Path) -> None:
    with Store(tmp_path / results.STORE) as store:
        for one in SMALL:
            store.put(one.key.to_json(), one.value)
        ExtendResult(SMALL, rows.ADVICE, rows.NEXT).write(tmp_path, store)
    left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    wanted = {results.STORE, results.ROWS, results.ADVICE, results.PAGE, results.SUMMARY}
    assert left == wanted | {"charts/context.png", "charts/distance.png"}
    assert len((tmp_path / results.ROWS).read_text().splitlines()) == len(SMALL)
    told = json.loads((tmp_path / results.ADVICE).read_text())
    assert told["best"] == rows.ADVICE["best"]
    assert [(n["title"], n["command"]) for n in told["next"]] == rows.NEXT
    (model,) = report(tmp_path).models
    assert model.recommendation["best"] == rows.ADVICE["best"]
    assert [*model.next_steps] == rows.NEXT and len(model.rows) == len(SMALL)


def test_a_folder_with_two_runs_shows_the_one_that_its_advice_is_about(tmp_path: Path) -> None:
    """Other texts and other methods in one folder shared a table, or ended in a KeyError."""
    other = Text("other", "0123")
    older = [replace(one, key=replace(one.key, text=other)) for one in SMALL]
    folder = kept(tmp_path, [*SMALL, *older, *(r for r in rows.FOUND if r.key.measure == COST)])
    texts = list(dict.fromkeys(one.key.text.digest for one in SMALL if one.key.text))
    schemes = [one.key.scheme for one in SMALL if one.label != "yarn"]
    plan = {"texts": texts, "schemes": schemes, "lengths": [*{one.key.length for one in SMALL}]}
    told = {**json.loads((folder / results.ADVICE).read_text()), "plan": plan}
    (folder / results.ADVICE).write_text(json.dumps(told), encoding="utf-8")
    (model,) = report(folder).models
    assert {*model.section.labels} == {"baseline", "leaky_rerope"}
    assert other not in {row.key.text for row in model.rows}
    model.report(tmp_path / "page.html")


def test_each_model_has_a_section(tmp_path: Path) -> None:
    paths = [kept(tmp_path / name, of_model(name)) for name in ("one", "two")]
    assert [s.section.title for s in report(*paths).models] == ["one", "two"]


def test_runs_alike_share_a_table(tmp_path: Path) -> None:
    a = kept(tmp_path / "a", [one for one in SMALL if one.label in ("baseline", "yarn")])
    b = kept(tmp_path / "b", [one for one in SMALL if one.label in ("baseline", "leaky_rerope")])
    (model,) = report(a, b, a).models
    assert {*model.section.labels} == {"baseline", "yarn", "leaky_rerope"} and model.run == ""
    best = model.recommendation["best"]  # made anew, from the rows of both
    assert best["label"] == "leaky_rerope" and "1.443" in best["sentence"]


def test_runs_of_other_documents_are_told_apart(tmp_path: Path) -> None:
    other = [replace(one, key=replace(one.key, text=Text("b", "b" * 64))) for one in SMALL]
    paths = [kept(tmp_path / "a", SMALL), kept(tmp_path / "b", other)]
    name = rows.MODEL.name
    assert [s.section.title for s in report(*paths).models] == [f"{name} (a)", f"{name} (b)"]


def test_of_two_protocols_the_younger_is_shown(tmp_path: Path) -> None:
    changed = [replace(o, key=replace(o.key, protocol={"last": 64})) for o in SMALL[:4]]
    kept(tmp_path, SMALL)
    (model,) = report(kept(tmp_path, changed, advice=False)).models
    assert {tuple(one.key.protocol.items()) for one in model.rows} == {(("last", 64),)}


def test_a_reading_a_length_stands_beside_one_reading_for_all(tmp_path: Path) -> None:
    once = [one for one in rows.FOUND if one.key.measure == LOSS and one.label in FEW[:2]]
    again = [
        replace(one, key=replace(one.key, length=n, protocol={**one.key.protocol, **read}))
        for one in once
        for n, read in (
            [(2048, {"lengths": [*rows.LENGTHS]})]
            if one.is_baseline
            else [(n, {"lengths": [n]}) for n in rows.LENGTHS]
        )
    ]
    (model,) = report(kept(tmp_path, again, advice=False)).models
    assert len(model.rows) == len(again) == 4 + 4 * 4
    assert {*result_tables(model.rows)["loss"].labels} == {*FEW[:2]}
    half = [one for one in again if one.is_baseline]
    a, b = (
        kept(tmp_path / "a", half),
        kept(tmp_path / "b", [one for one in again if one not in half]),
    )
    assert len(report(a, b).models) == 1


@pytest.mark.parametrize("what", ["no folder", "no store", "no rows"])
def test_what_is_no_run_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if what != "no folder":
        folder.mkdir()
    if what == "no rows":
        kept(folder, [])
    with pytest.raises(UserError) as told:
        report(folder)
    assert str(folder) in str(told.value) and "\n" not in str(told.value)
    assert not (folder / results.STORE).exists() or what == "no rows"


def test_the_command_joins_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(kept(tmp_path / name, of_model(name))) for name in ("one", "two")]
    out = tmp_path / "both.html"
    assert run(["report", *paths, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in told["models"]] == ["one", "two"]
    cells = {(c["label"], c["length"]): c["value"] for c in told["models"][0]["boards"]["context"]}
    expected = sum(rows.loss("yarn", 1024, n) for n in range(4)) / 4
    assert cells["yarn", 1024]["mean"] == pytest.approx(expected)
    assert 'id="chart-2-context"' in out.read_text(encoding="utf-8")
    assert run(["report", *paths, "--out", str(tmp_path / "both.pdf")]) == 2
    assert run(["report", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 2 and "There is no folder" in err[1]
