"""Advice in as few sentences as say it."""

from __future__ import annotations

from typing import Any

from longitude.viz.section import Section, section
from tests.viz import rows


def advised(**changed: Any) -> Section:
    return section(rows.FOUND[:1], {**rows.ADVICE, **changed})


def runtime(what: str, sentence: str, label: str = "yarn") -> dict[str, Any]:
    numbers = {"label": label, "own": "baseline"}
    return {"what": what, "label": label, "scheme": "", "sentence": sentence, "numbers": numbers}


def test_runtimes_that_are_told_the_same_share_a_sentence() -> None:
    given = [
        runtime("transformers", "transformers can serve ntk unchanged. The loss is 1.5."),
        runtime("vllm", "vLLM can serve yarn unchanged. The loss is 1.6."),
        runtime("sglang", "SGLang can serve yarn unchanged. The loss is 1.6."),
        runtime("llama.cpp", "llama.cpp can serve yarn unchanged. The loss is 1.6."),
    ]
    assert [*advised(runtimes=given, factor=None).advice()][1:] == [
        ("transformers", "transformers can serve ntk unchanged. The loss is 1.5."),
        ("runtimes", "vLLM, SGLang and llama.cpp can serve yarn unchanged. The loss is 1.6."),
    ]


def test_other_goals_are_told_where_a_method_serves_them() -> None:
    goals = [
        {"what": "stream", "label": None, "sentence": "No method that was measured streams."},
        {"what": "short", "label": "ntk", "sentence": "Use ntk inside the window. It keeps 24 %."},
    ]
    told = [*advised(goals=goals, runtimes=[], factor=None).advice()]
    assert told[1:] == [("short", "Use ntk inside the window. It keeps 24 %.")]
    same = [{"what": "short", "label": "baseline", "sentence": "Change nothing."}]
    assert len([*advised(goals=same, runtimes=[], factor=None).advice()]) == 1


def test_what_helps_no_runtime_is_said_once_and_without_numbers() -> None:
    nothing = "Nothing that {} can serve unchanged helps at 2,048 tokens. The loss is 4.6."
    given = [runtime(n.lower(), nothing.format(n), "baseline") for n in ("vLLM", "SGLang")]
    (told,) = [*advised(runtimes=given, factor=None).advice()][1:]
    said = "Nothing that vLLM or SGLang can serve unchanged helps at 2,048 tokens."
    assert told == ("runtimes", said)
    best = {**rows.ADVICE["best"], "sentence": "Nothing helps at 2,048 tokens. The loss is 4.6."}
    whole = advised(best=best, runtimes=given, factor=None, helps=False)
    assert [sentence for _, sentence in whole.advice()] == [best["sentence"]]
    assert whole.headline == ("Nothing helps at 2,048 tokens", "The loss is 4.6.")


def test_a_search_tells_its_scheme_where_it_is_better() -> None:
    ((sentence, scheme),) = advised().searches
    assert sentence.startswith("leaky_rerope(96, 16) in place") and scheme.startswith("rope(remap=")
    kept = {**rows.ADVICE["search"][0], "better": False, "sentence": "no better was found."}
    assert advised(search=[kept]).searches == [("No better was found.", "")]
    assert advised(search=None).searches == [] and advised(notes=[]).notes == []


def test_scores_are_a_table_of_tasks_by_methods() -> None:
    assert advised().lm_eval == (
        ["task", "baseline", "leaky_rerope"],
        [["lambada, acc,none", "0.1235", "0.5"], ["lambada, perplexity,none", "81.25", ""]],
    )
    assert advised(lm_eval={}).lm_eval is None
