"""The model through lm-eval: what it is handed, what is kept, and what it can't do, in a sentence.

A stand-in plays the library, so that this is fast; the slow test asks the library itself.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longitude.core.store import Store
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.eval.records import recorded
from longitude.extension.lm_eval import judge
from longitude.extension.measure import Evaluator
from longitude.extension.plan import ExtendOptions, Method, TargetModel, prepare
from longitude.hf.patch import scheme_of

SMALL = ExtendOptions(
    methods="rope(frequencies=yarn(8, original=256))", text=(argparse.__file__,), docs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def evaluator(target: TargetModel) -> Evaluator:
    prepared = prepare(target, 2048, SMALL)
    return Evaluator(prepared.plan, target, prepared.documents)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


class Played:
    """lm-eval, played: it remembers what it was given."""

    def __init__(self, results: dict[str, Any], error: Exception | None = None) -> None:
        self.results, self.error = results, error
        self.calls: list[dict[str, Any]] = []
        self.all_tasks = ["niah_single_1", "ruler", "other"]

    def simple_evaluate(self, **given: Any) -> dict[str, Any]:
        place = Path(given["metadata"]["tokenizer"])
        files = sorted(path.name for path in place.iterdir())
        given["scheme"] = dump(scheme_of(given["model"]["pretrained"]))
        self.calls.append({**given, "files": files})
        print("something that is no data")
        if self.error:
            raise self.error
        return {"results": self.results}


def play(monkeypatch: pytest.MonkeyPatch, played: Played) -> Played:
    whole, tasks, models = (ModuleType(f"lm_eval{n}") for n in ("", ".tasks", ".models"))
    hugging = ModuleType("lm_eval.models.huggingface")
    vars(whole).update(simple_evaluate=played.simple_evaluate, __version__="0.0.1")
    vars(tasks).update(TaskManager=lambda metadata: played)
    vars(hugging).update(HFLM=dict)
    for module in (whole, tasks, models, hugging):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return played


def methods(evaluator: Evaluator) -> tuple[Method, Method]:
    plain, stretched = evaluator.plan.methods
    return plain, stretched


def test_the_live_model_is_judged_once(
    evaluator: Evaluator,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = {
        "alias": "niah", "sample_len": 2, "2048,none": 0.5, "4096,none": -1, "exact": True,
        "2048_stderr,none": "N/A", "odd": math.nan,
    }  # fmt: skip
    played = play(monkeypatch, Played({"niah_single_1": scores}))
    for method in methods(evaluator) * 2:
        found = judge(evaluator, method, ("niah_single_1",), store, limit=2)
        assert found == {"niah_single_1": {"2048,none": 0.5}}
    assert [call["scheme"] for call in played.calls] == [m.scheme for m in methods(evaluator)]
    for call in played.calls:
        assert call["model"]["pretrained"] is evaluator.target.model
        assert call["model"]["max_length"] == 2048 == call["metadata"]["max_seq_lengths"][0]
        assert call["tasks"] == ["niah_single_1"] and call["limit"] == 2
        assert "tokenizer.json" in call["files"] or "tokenizer_config.json" in call["files"]
        assert not Path(call["metadata"]["tokenizer"]).exists()
    assert capsys.readouterr().out == ""
    assert len(list(store.rows(kind="lm-eval"))) == 2 and not list(recorded(store))


def test_other_tasks_and_limits_are_other_rows(
    evaluator: Evaluator, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = play(monkeypatch, Played({"other": {"acc,none": 0.25}}))
    plain, _ = methods(evaluator)
    for tasks, limit in ((("other",), 1), (("other",), 2), (("other", "ruler"), 2)):
        judge(evaluator, plain, tasks, store, limit=limit)
    assert len(played.calls) == 3


@pytest.mark.parametrize(
    ("tasks", "error", "told"),
    [
        (("nonsense",), None, r"no task called 'nonsense'"),
        (
            ("other",),
            ImportError("Please install wonderwords"),
            r"other can.t be run \(Please",
        ),
        (("other",), ConnectionError("Couldn't reach x on the Hub"), r"Couldn't reach x"),
    ],
)
def test_what_can_not_be_run_gets_a_sentence(
    evaluator: Evaluator,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    tasks: tuple[str, ...],
    error: Exception | None,
    told: str,
) -> None:
    play(monkeypatch, Played({}, error))
    with pytest.raises(UserError, match=told):
        judge(evaluator, methods(evaluator)[0], tasks, store)
    assert not list(store.rows())


def test_tasks_that_need_more_length_are_refused(
    target: TargetModel, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = prepare(target, 512, SMALL)
    near = Evaluator(short.plan, target, short.documents)
    played = play(monkeypatch, Played({"other": {"acc,none": 0.25}}))
    with pytest.raises(
        UserError, match="niah_single_1 needs at least 2,048 tokens, but --to is 512"
    ):
        judge(near, near.plan.methods[0], ("other", "niah_single_1"), store)
    assert not played.calls
    assert judge(near, near.plan.methods[0], ("other",), store)


def test_without_the_library_there_is_a_sentence(
    evaluator: Evaluator, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pip install 'longitude\[lm-eval\]'"):
        judge(evaluator, methods(evaluator)[0], ("other",), store)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the library and its own
def test_the_library_itself(evaluator: Evaluator, store: Store) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("wonderwords")
    for method in methods(evaluator):
        found = judge(evaluator, method, ("niah_single_1",), store, limit=2)
        assert 0 <= found["niah_single_1"]["2048,none"] <= 1
