"""`longitude extend` on tiny-rope, from the command line to the charts of its page.

What the whole default run says is asked of it in the slow test; here a few of its methods, with as
many passkeys as make the share certain.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longitude.cli.main import run
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.records import PASSKEY, of, recorded
from longitude.eval.tables import result_tables
from longitude.extension.api import ExtendOptions, extend, report
from tests.viz.browser import opens_cleanly, read_charts, same_as_rows

WINDOW = 256
SOME = ("--methods", "leaky_rerope", "--lengths", "1024", "--questions", "4")


def extended(folder: Path, *more: str) -> tuple[list, dict]:
    """The rows and the advice of a run of the command."""
    assert run(["extend", "--out", str(folder), *more]) == 0
    with Store(folder / "results.sqlite") as store:
        found = [*recorded(store)]
    return found, json.loads((folder / "recommendation.json").read_text())


def holds(found: list, advice: dict) -> None:
    """What the project promises of the default run."""
    context, passkey = (result_tables(found)[name] for name in ("context", "passkey"))
    best, own = advice["best"]["label"], context.labels[0]

    def loss(label: str, times: int) -> float:
        return context.cells[label, times * WINDOW].value.mean

    assert loss(own, 4) >= loss(own, 1) + 2
    assert loss(best, 4) <= 1.02 * loss(own, 1)
    assert loss(best, 8) <= 1.25 * loss(own, 1)
    assert passkey.cells[best, 4 * WINDOW].value.mean >= 0.95


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The best of the default run beside the model as it is, at three of its lengths."""
    folder = tmp_path_factory.mktemp("runs") / "some"
    return folder, *extended(folder, *SOME)


def test_the_best_method_reads_eight_windows(some):
    _, found, advice = some
    holds(found, advice)
    assert advice["best"]["label"] == "leaky_rerope(128, 32)" and advice["helps"]
    served = {a["what"]: a["label"] for a in advice["runtimes"]}
    assert set(served) == {"transformers", "vllm", "sglang", "llama.cpp"}


def test_its_report_opens_in_a_browser_with_the_numbers_of_the_rows(some):
    folder, found, _ = some
    opens_cleanly(folder / "report.html")
    same_as_rows(read_charts(folder / "report.html"), found)


def test_everything_is_left_behind(some):
    folder, found, _ = some
    names = {p.name for p in folder.iterdir()}
    left = {"results.sqlite", "rows.jsonl", "report.html", "summary.md", "recommendation.json"}
    assert left | {"charts"} == names
    assert len((folder / "rows.jsonl").read_text().splitlines()) == len(found)
    assert [*(folder / "charts").glob("*.png")]


def test_the_same_command_again_computes_nothing(some, monkeypatch, capsys):
    folder, found, advice = some
    monkeypatch.setattr("longitude.extension.measure.Evaluator.run", None)
    again = extended(folder, *SOME)
    assert again == (found, advice)
    said = capsys.readouterr()
    assert "tasks are recorded" in said.err and "leaky_rerope(128, 32)" in said.out


def test_a_loaded_model_and_no_command_line(target, tmp_path):
    events = []
    options = ExtendOptions(
        methods="rerope; streaming", docs=2, tasks=(), cost=False, tokenizer=target.tokenizer,
        out=tmp_path / "run", progress=events.append,
    )  # fmt: skip
    result = extend(target.model, to="2x", options=options)
    assert str(result.best.scheme) == "rope(remap=rerope(128))"
    assert result.best.label == "rerope(128)" and abs(result.best.in_window_cost) < 0.1
    assert result.to_json()["forgets"] == ["streaming(4, 252)"]
    assert result.best.sentence in " ".join(result.table(width=200).split())
    assert "forgets" in result.table() and "forgets" in result.report(tmp_path / "a.md").read_text()
    assert "forgets" in result.report(tmp_path / "a.html").read_text()
    assert {event.job for event in events} == {"plan", "measure"}
    (again,) = report(tmp_path / "run").models
    assert again.best.sentence == result.best.sentence
    with pytest.raises(UserError, match="has no tokenizer"):
        extend(target.model, to="2x")


@pytest.mark.slow
def test_the_default_run(tmp_path):
    found, advice = extended(tmp_path / "run")
    best = advice["best"]["scheme"]  # asked again with as many questions as make 95 % a number
    more, _ = extended(tmp_path / "best", "--methods", best, "--docs", "1", "--questions", "4")
    holds([m for m in found if m.key.measure != PASSKEY] + of(more, PASSKEY), advice)
    opens_cleanly(tmp_path / "run" / "report.html")
    same_as_rows(read_charts(tmp_path / "run" / "report.html"), found)


@pytest.mark.slow
def test_a_real_checkpoint(smollm2_file, tmp_path):
    """SmolLM2: on a GPU the whole of docs/results/smollm2.md, on a CPU one document at twice its
    window, which takes a quarter of an hour."""
    small = ["--to", "2x", "--docs", "1", "--tasks", "none", "--methods", "leaky_rerope"]
    more = ["--to", "32768"] if torch.cuda.is_available() else small
    found, advice = extended(tmp_path / "run", str(smollm2_file), *more)
    context = result_tables(found)["context"]
    target = context.lengths[-1]
    own, best = (context.cells[label, target] for label in ("baseline", advice["best"]["label"]))
    assert advice["helps"] and "rerope" in advice["best"]["label"]
    assert own.value.mean > best.value.mean + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-alibi", "tiny-learned"])
def test_models_without_rotation(name, tmp_path):
    found, advice = extended(tmp_path / "run", name, "--docs", "2")
    assert result_tables(found)["context"].labels[0] == "baseline"
    assert advice["best"]["sentence"]
    if name == "tiny-learned":
        beyond = [m for m in found if m.is_baseline and m.key.length > WINDOW]
        assert beyond and all("no position beyond" in m.refused for m in beyond)
