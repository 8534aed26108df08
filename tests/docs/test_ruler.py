"""The page of RULER's tasks: batches answer as single prompts do, and orders are compared."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude.core.store import Store
from longitude.eval.prefill import greedy
from longitude.eval.records import RETRIEVAL, ResultKey
from longitude.eval.retrieval import Tokens, answers
from longitude.extension.plan import ExtendOptions, TargetModel, prepare
from longitude.hf.patch import patched
from tests.viz import rows

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "ruler.py"
METHODS = "rope(remap=streaming(4, 100)); rope(remap=rerope(64)); dynamic_ntk"


@pytest.fixture(scope="module")
def ruler() -> Any:
    spec = spec_from_file_location("ruler_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def prompt(task: str, text: str, answers: list[str], new: int) -> dict[str, Any]:
    return {"task": task, "length": 512, "prompt": text, "answers": answers, "new": new}


PROMPTS = (
    prompt("niah_single_1", "The pass key is 12345. " * 16 + "The pass key is", ["12345"], 8),
    prompt("ruler_vt", "def f(a, b):\n    return a + b\n" * 13 + "def", ["f(a", "x(y"], 20),
)


def test_a_batch_answers_as_each_prompt_alone(ruler: Any) -> None:
    """Greedy decoding and the loss of the answers, after line breaks before the shorter prompt."""
    options = ExtendOptions(methods=METHODS, docs=1)
    prepared = prepare(TargetModel.load("tiny-rope", options), 512, options)
    target = prepared.target
    from longitude.extension.measure import Evaluator

    evaluator = Evaluator(prepared.plan, target, prepared.documents)
    encoded = [target.tokenizer(p["prompt"]).input_ids for p in PROMPTS]
    assert len(encoded[0]) != len(encoded[1])
    rows = ruler.padded(encoded, target.tokenizer)
    assert len(prepared.plan.methods) == 4
    for method in prepared.plan.methods:
        batch = ruler.run_batch(evaluator, method, PROMPTS)
        if method.patch is None:
            alone = [single(ruler, target, p, ids) for p, ids in zip(PROMPTS, rows, strict=True)]
        else:
            total = len(rows[0]) + 20 if method.by_length else None
            with patched(target.model, method.patch, length=total, check=False):
                alone = [
                    single(ruler, target, p, ids) for p, ids in zip(PROMPTS, rows, strict=True)
                ]
        for one, (said, loss) in zip(batch, alone, strict=True):
            assert said.startswith(one["said"]) and len(one["said"]) >= 4
            assert one["losses"] == pytest.approx(loss, abs=1e-3)


def single(ruler: Any, target: TargetModel, p: dict[str, Any], ids: list[int]) -> tuple[str, float]:
    answer = target.tokenizer(ruler.answer_text(p), add_special_tokens=False).input_ids
    at = range(len(ids), len(ids) + len(answer))
    ((_, _, loss),) = answers(target.model, [Tokens(torch.tensor(ids + answer), (("", at),))])
    return target.tokenizer.decode(greedy(target.model, torch.tensor(ids), p["new"])), loss


def test_scores_are_rulers(ruler: Any) -> None:
    assert ruler.score("It is FOO, bar", ["foo", "baz"]) == 0.5
    assert ruler.answer_text(prompt("ruler_cwe", "", ["a", "b"], 1)) == " 1. a 2. b"
    assert ruler.answer_text(PROMPTS[1]) == " f(a x(y"
    assert ruler.ranks([3.0, 1.0, 3.0, 2.0]) == [1.5, 4, 1.5, 3]


def test_the_table_tells_how_far_two_orders_agree(ruler: Any, tmp_path: Path) -> None:
    page = tmp_path / "ruler.md"
    page.write_text("# A page\n\n<!-- rows -->\nold\n<!-- /rows -->\n")
    subject = rows.FOUND[0].key.subject
    methods = {"alibi()": 0.9, "fire()": 0.6, "kerple()": 0.3, "nope()": 0.0}
    with Store(":memory:") as store:
        for scheme, good in methods.items():
            value = {"label": scheme, "refused": None, "said": ["", ""]}
            for task, kind, numbers in (
                ("ruler_vt", ruler.RULER, {"scores": [good, good + 0.1]}),
                ("keys", RETRIEVAL, {"exacts": [good > 0.5, good > 0.2]}),
            ):
                at = {"task": task} if kind == ruler.RULER else {"family": task, "round": 0}
                key = ResultKey(kind, subject, scheme, 2048, at=at)
                store.put(key.to_json(), value | numbers | {"losses": [1 - good, 1.1 - good]})
        store.export(tmp_path / "ruler.jsonl")
    with pytest.raises(SystemExit, match="not those of its rows"):
        ruler.main(["--check"], page)
    ruler.main([], page)
    ruler.main(["--check"], page)
    written = page.read_text(encoding="utf-8")
    assert "| `alibi()` | 95 % (1) | 0.15 (1) | 100 % (1.5) | 0.15 (1) |" in written
    assert (
        "| 2,048 | means | 0.95 (95 % CI" in written and "| 1.00 (95 % CI 1.00 – 1.00) |" in written
    )
    assert written.index("`alibi()`") < written.index("`fire()`") < written.index("`nope()`")
