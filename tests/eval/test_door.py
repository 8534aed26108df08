"""A metric is one file: dropped into a folder, every place that shows metrics knows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from longitude.cli.main import run
from longitude.core.store import Store
from longitude.eval import tasks
from longitude.eval.records import of, recorded
from longitude.eval.tables import result_tables

METRIC = '''
"""Tokens of the vocabulary, times the length: a metric of a test."""

from longitude.eval.tasks import Metric

def measure(session, keys):
    return [{"value": session.model.config.vocab_size * key.length} for key in keys]

METRIC = Metric(
    name="dummy", title="Dummy numbers", unit="dummies", better="higher", paper="none",
    measure=measure, help="A number that a test made up.", heading="dummies",
    format=lambda value: f"{value:.0f} d",
)
'''


@pytest.fixture
def dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "dummy_metric.py").write_text(METRIC)
    monkeypatch.setattr("longitude.eval.tasks.cost.ROUNDS", 1)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path / "more")])
    yield


def test_a_metric_in_a_folder_is_measured_stored_and_shown(
    dummy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "dummy" in tasks.task_names()
    out = tmp_path / "run"
    small = ["--methods", "leaky_rerope", "--to", "2x", "--docs", "1", "--tasks", "dummy"]
    assert run(["extend", *small, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 2 * (1 + 2 + 2)  # document, dummy, cost
    assert run(["extend", *small, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    with Store(out / "results.sqlite") as store:
        rows = [*recorded(store)]
    found = of(rows, "dummy")
    assert {row.key.length: row.value["value"] for row in found} == {256: 256**2, 512: 256 * 512}
    assert result_tables(rows)["dummy"].cells["leaky_rerope(128, 8)", 512].value is not None
    assert "dummies" in printed and f"{256 * 512} d" in printed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Dummy numbers" in page and f"{256 * 512} d" in page
    assert 'id="chart-dummy"' in page


def test_an_unknown_metric_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["extend", "--tasks", "dummy", "--dry-run"]) == 2
    assert (
        "kept_context, association, frequent_words, keys, many_shot, passkey"
        in capsys.readouterr().err
    )
