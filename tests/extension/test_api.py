"""`longitude extend` on tiny-rope, from the command line to the charts of its page.

What the whole default run says is asked of it in the slow test; here a few methods at four windows.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch

from longitude.cli.main import run
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.records import recorded
from longitude.eval.tables import by_family, result_tables
from longitude.extension.api import ExtendOptions, extend, report
from tests.viz.browser import opens_cleanly, read_charts, same_as_rows

WINDOW = 256
SOME = (
    "--to", "4x", "--methods", "rope(remap=rerope(64)); streaming", "--lengths", "256",
    "--tasks", "kept_context,passkey", "--docs", "2",
)  # fmt: skip


def extended(folder: Path, *more: str) -> tuple[list, dict]:
    """The rows and the advice of a run of the command."""
    assert run(["extend", "--out", str(folder), *more]) == 0
    with Store(folder / "results.sqlite") as store:
        found = [*recorded(store)]
    return found, json.loads((folder / "recommendation.json").read_text())


def holds(found: list, advice: dict) -> None:
    """What the project promises of the default run."""
    context, kept = (result_tables(found)[name] for name in ("context", "kept_context"))
    best, own, target = advice["best"]["label"], context.labels[0], context.lengths[-1]

    def loss(label: str, length: int) -> float:
        return context.cells[label, length].value.mean

    assert loss(own, target) >= loss(own, WINDOW) + 2
    assert loss(best, target) <= loss(own, WINDOW) + 0.5
    assert kept.cells[best, target].value.low > 0
    assert by_family(found)[best]["passkey", WINDOW].mean >= 0.9


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The best of the default run beside the model as it is, at three of its lengths."""
    folder = tmp_path_factory.mktemp("runs") / "some"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longitude.eval.tasks.cost.ROUNDS", 1)  # no test here compares times
        return folder, *extended(folder, *SOME)


def test_the_best_method_uses_four_windows(some):
    _, found, advice = some
    holds(found, advice)
    assert advice["best"]["label"] == "rerope(64)" and advice["helps"]
    assert advice["effective_length"]["rerope(64)"] >= 2 * WINDOW
    assert advice["forgets"][-1] == "streaming(4, 252)"
    others = {a["what"]: a["label"] for a in advice["goals"]}
    assert others["stream"] == "streaming(4, 252)"
    served = {a["what"]: a["label"] for a in advice["runtimes"]}
    assert set(served) == {"transformers", "vllm", "sglang", "llama.cpp"}
    assert advice["notes"][-1].startswith("Ended ")


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
    assert "tasks are recorded" in said.err and "rerope(64)" in said.out


def test_next_steps_repeat_the_options_of_the_run(some):
    """The search that was offered went into another folder, on other texts."""
    folder, _, advice = some
    steps = {one["title"]: one["command"] for one in advice["next"]}
    words = shlex.split(steps["Search its parameters"])
    assert words[:5] == ["longitude", "extend", "tiny-rope", "--to", "1024"]
    given = dict(zip(SOME[2::2], SOME[3::2], strict=True)) | {"--out": str(folder)}
    assert dict(zip(words[5:-1:2], words[6:-1:2], strict=True)) == given
    assert words[-1] == "--search"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--budget", "soon"], "--budget takes a time, but got 'soon'"),
        (["--search", "--docs", "1"], "--search needs 4 documents beside those"),
        (["--search", "--goal", "stream"], "--search looks for schemes that use more"),
        (["--methods", "alibi()"], "leave it out, or in Python say force=True."),
    ],
)
def test_what_a_run_would_refuse_is_told_before_it(given, sentence, capsys):
    assert run(["extend", "--to", "2x", "--methods", "yarn", "--dry-run", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_text_that_the_model_does_not_know_is_told(target, tmp_path):
    """No method is to be judged by text whose every token surprises more than a blind guess."""
    (tmp_path / "text").write_text("".join(chr(0x4E00 + 37 * n % 2000) for n in range(2000)))
    options = ExtendOptions(
        methods="baseline", docs=2, tasks=(), cost=False, tokenizer=target.tokenizer,
        out=tmp_path / "run", text=(str(tmp_path / "text"),),
    )  # fmt: skip
    result = extend(target.model, to="2x", options=options)
    assert "the model does not know this text" in result.table(width=1000)


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
    assert events[0].stage == "loading the model"
    assert {event.job for event in events[1:]} == {"plan", "measure"}
    (again,) = report(tmp_path / "run").models
    assert again.best.sentence == result.best.sentence
    with pytest.raises(UserError, match="has no tokenizer"):
        extend(target.model, to="2x")


@pytest.mark.slow
def test_the_default_run(tmp_path):
    found, advice = extended(tmp_path / "run")
    holds(found, advice)
    opens_cleanly(tmp_path / "run" / "report.html")
    same_as_rows(read_charts(tmp_path / "run" / "report.html"), found)


@pytest.mark.slow
def test_a_real_checkpoint(smollm2_file, tmp_path):
    """SmolLM2: on a GPU the whole of docs/results/smollm2.md, on a CPU one document at twice its
    window, which takes a quarter of an hour."""
    small = ["--to", "2x", "--docs", "1", "--tasks", "none", "--methods", "leaky_rerope"]
    more = ["--to", "32768"] if torch.cuda.is_available() else small
    found, advice = extended(tmp_path / "run", str(smollm2_file), *more)
    tables, chosen = result_tables(found), advice["best"]["label"]
    context = tables["context"]
    target = context.lengths[-1]
    own, best = (context.cells[label, target] for label in ("baseline", chosen))
    assert advice["helps"] and own.value.mean > best.value.mean + 2
    if torch.cuda.is_available():
        assert tables["kept_context"].cells[chosen, target].value.low > 0.05
        assert "streaming(4, 8188)" in advice["forgets"]


@pytest.mark.slow
def test_ten_seeds_recommend_the_same_kind_of_scheme(target, tmp_path):
    """Other documents and other questions: the family of the best stays, and it keeps at four
    windows what the baseline keeps at the end of its own. With four documents each the shares of
    two seeds were too noisy to tell. Half an hour on two cores."""
    families, shares = Counter(), []
    for seed in range(10):
        options = ExtendOptions(
            seed=seed, docs=8, cost=False, tokenizer=target.tokenizer, out=tmp_path / str(seed)
        )
        found = extend(target.model, to="4x", options=options)
        families[re.sub(r"leaky_|\(.*", "", found.best.label)] += 1
        kept = result_tables(found.rows)["kept_context"].cells
        far, near = kept[found.best.label, 4 * WINDOW], kept["baseline", WINDOW]
        shares.append((far.value.mean, near.value.mean))
    assert sum(far for far, _ in shares) >= sum(near for _, near in shares)
    assert sum(far >= near for far, near in shares) >= 9, shares
    assert families.most_common(1)[0][1] >= 9, families


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-alibi", "tiny-learned"])
def test_models_without_rotation(name, tmp_path):
    found, advice = extended(tmp_path / "run", name, "--docs", "2")
    assert result_tables(found)["context"].labels[0] == "baseline"
    assert advice["best"]["sentence"]
    if name == "tiny-learned":
        beyond = [m for m in found if m.is_baseline and m.key.length > WINDOW]
        assert beyond and all("no position beyond" in m.refused for m in beyond)
