"""The recommendation of an `extend` run: used if it is of this model and target, and helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longitude.core.store import Store
from longitude.eval.records import LOSS, ResultKey, Subject
from longitude.training.tune.run import TuneOptions, with_recommendation

BEST = "rope(remap=leaky_rerope(128, 8))"
OWN = {"label": "as it is", "numbers": {"own": "as it is", "target": 1024}}


def write(folder: Path, best: dict[str, Any], model: str = "tiny-rope") -> None:
    """A run's folder with one row and its advice."""
    folder.mkdir(parents=True, exist_ok=True)
    subject = Subject(model, "0", "rope()", "rope", 256, "float32", "cpu")
    with Store(folder / "results.sqlite") as store:
        store.put(ResultKey(LOSS, subject, "rope()", 1024).to_json(), {"label": "as it is"})
    told = {"best": {**OWN, **best}, "runtimes": []}
    (folder / "recommendation.json").write_text(json.dumps(told))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "tiny-rope-1024"


def test_the_best_is_taken_and_told(here: Path) -> None:
    write(here, {"label": "leaky_rerope(128, 8)", "scheme": BEST})
    options, note = with_recommendation("tiny-rope", "4x", TuneOptions())
    assert options.scheme == BEST and BEST in note and "runs/tiny-rope-1024" in note


@pytest.mark.parametrize("given", [{"scheme": "rope()"}, {"recipe": "pi"}, {}])
def test_what_is_named_comes_first_and_another_target_is_another_run(
    here: Path, given: dict[str, Any]
) -> None:
    write(here, {"label": "leaky_rerope(128, 8)", "scheme": BEST})
    options, to = TuneOptions(**given), "4x" if given else "8x"
    assert with_recommendation("tiny-rope", to, options) == (options, "")


def test_where_nothing_helped_or_nothing_was_run_the_recipe_decides(here: Path) -> None:
    assert with_recommendation("tiny-rope", "4x", TuneOptions()) == (TuneOptions(), "")
    write(here, {"scheme": "rope()"})
    assert with_recommendation("tiny-rope", "4x", TuneOptions()) == (TuneOptions(), "")


def test_a_run_for_streams_is_asked_what_it_advises_for_a_longer_context(here: Path) -> None:
    """The scheme to stream with hides what lies beyond its window: no target for training."""
    numbers = OWN["numbers"]
    context = {"what": "context", "label": "leaky", "scheme": BEST, "numbers": numbers}
    write(here, {"what": "stream", "label": "streaming", "scheme": "rope(remap=streaming(4, 252))"})
    file = here / "recommendation.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "goals": [context]}))
    assert with_recommendation("tiny-rope", "4x", TuneOptions())[0].scheme == BEST


def test_a_run_of_another_model_of_this_name_says_nothing(here: Path) -> None:
    write(here, {"label": "leaky", "scheme": BEST}, model="elsewhere/tiny-rope")
    assert with_recommendation("tiny-rope", "4x", TuneOptions()) == (TuneOptions(), "")
