"""What is recommended, in made-up cases whose answer is plain."""

import json
import random
from collections.abc import Iterable, Mapping

import pytest

from longitude import parse
from longitude.core.validate import UserError
from longitude.eval.records import BASELINE, Measurement
from longitude.extension.advice import Recommendation, recommend
from longitude.extension.rank import Ranking, hidden_beyond, windowed
from longitude.runtimes import recommended
from longitude.runtimes.target import supporting
from tests.measured import OWN, answered, context, cost, document, kept, reading, row

RUNTIMES = tuple(runtime.name for runtime in recommended())
YARN = {k: f"rope(frequencies=yarn({k}, original=256))" for k in (2, 4, 8, 16)}
LEAKY = "rope(remap=leaky_rerope(64, 16))"
REROPE = "rope(remap=rerope(64))"
STREAMING = "rope(remap=streaming(4, 252))"
WINDOW, TARGET = 256, 1024
DOCUMENTS = 8


def noisy(mean: float, spread: float, seed: str, count: int = DOCUMENTS) -> list[float]:
    rng = random.Random(seed)
    return [mean + rng.gauss(0, spread) for _ in range(count)]


def measured(
    kept_at_target: Mapping[str, float],
    losses: Mapping[str, float],
    answers: Mapping[str, float] | None = None,
    window: float = 0.2,
    in_window: Mapping[str, float] | None = None,
) -> list[Measurement]:
    """Kept context, loss and answers at the target, and the baseline's at its window."""
    rows = []
    for s, share in kept_at_target.items():
        rows.append(kept(s, TARGET, noisy(share, 0.02, f"kept {share}")))
    rows.append(kept(OWN, WINDOW, noisy(window, 0.02, "window")))
    for s, loss in losses.items():
        rows += context(s, TARGET, noisy(loss, 0.01, f"loss {loss}"))
        means = {WINDOW: 2.0 + (in_window or {}).get(s, 0.0), TARGET: loss}
        rows += reading(s, TARGET, [means] * DOCUMENTS)
    rows += context(OWN, WINDOW, noisy(2.0, 0.01, "own"))
    for s, loss in (answers or {}).items():
        rows.append(answered(s, TARGET, noisy(loss, 0.02, f"answer {loss}", 20)))
    return rows


def advised(
    rows: Iterable[Measurement],
    target: int = TARGET,
    goal: str = "context",
    by_plugin: tuple[str, ...] = (),
) -> Recommendation:
    found = [*rows]
    schemes = {one.label: one.key.scheme for one in found}
    served = {label: supporting(parse(s), parse(OWN)) for label, s in schemes.items()}
    made = recommend(found, target, served, goal, by_plugin)
    assert json.loads(json.dumps(made.to_json())) == made.to_json()
    for advice in (made.best, *made.runtimes, *made.goals, *([made.factor] if made.factor else [])):
        assert advice.sentence.endswith(".") and "None" not in advice.sentence
        assert "nan" not in advice.sentence and len(advice.sentence) < 900
        assert ". ;" not in advice.sentence and " -0 " not in advice.sentence
    return made


def runtimes(made: Recommendation) -> dict[str, str | None]:
    assert tuple(one.what for one in made.runtimes) == RUNTIMES
    return {one.what: one.label for one in made.runtimes}


# planted truths


def test_what_forgets_is_never_recommended_though_its_loss_is_lowest() -> None:
    rows = measured({OWN: 0.0, STREAMING: 0.0, LEAKY: 0.15}, {OWN: 9.0, STREAMING: 1.5, LEAKY: 2.0})
    made = advised(rows)
    assert made.best.label == LEAKY and made.helps
    assert STREAMING in made.forgets and LEAKY not in made.forgets
    assert STREAMING not in made.best.sentence
    alone = advised(row for row in rows if row.key.scheme != LEAKY)
    assert not alone.helps and alone.best.label is None
    assert "tune" in alone.best.sentence and "nbce" in alone.best.sentence


def test_a_copy_under_another_name_is_tied_with_it() -> None:
    copy = "rope(remap=rerope(64)) + logn(256)"
    losses = {OWN: 9.0, REROPE: 2.0, copy: 2.0, LEAKY: 2.3}
    rows = measured({OWN: 0.0, REROPE: 0.2, copy: 0.2, LEAKY: 0.1}, losses)
    ranking = Ranking(rows, TARGET)
    ranks = ranking.mean_ranks((REROPE, copy, LEAKY), TARGET, ranking.groups(TARGET))
    assert ranks[REROPE] == ranks[copy] < ranks[LEAKY]
    made = advised(rows)
    assert made.best.label == REROPE  # the shorter scheme
    assert made.best.numbers["alike"] == [copy]
    assert "Not significantly different: " + copy in made.best.sentence


def test_what_is_not_significant_does_not_outweigh_what_is() -> None:
    kept_shares, losses = {OWN: 0.0, LEAKY: 0.15, REROPE: 0.25}, {LEAKY: 2.0, REROPE: 2.0}
    rows = measured(kept_shares, losses, {LEAKY: 1.0, REROPE: 1.008})
    ranking = Ranking(rows, TARGET)
    by_means = ranking.mean_ranks((LEAKY, REROPE), TARGET, ranking.groups(TARGET), clear=False)
    assert by_means[LEAKY] == by_means[REROPE]  # one keeps more, the other answers better by chance
    assert ranking.ordered("context") == [REROPE, LEAKY]


def test_what_keeps_more_wins_at_equal_loss() -> None:
    made = advised(
        measured({OWN: 0.0, LEAKY: 0.1, REROPE: 0.25}, dict.fromkeys((LEAKY, REROPE), 2.0))
    )
    assert made.best.label == REROPE
    assert made.best.numbers["alike"] == []


def test_an_insane_loss_never_wins() -> None:
    rows = measured({OWN: 0.0, LEAKY: 0.1, YARN[4]: 0.9}, {OWN: 9.0, LEAKY: 2.1, YARN[4]: 2.7})
    made = advised(rows)
    assert made.best.label == LEAKY
    assert Ranking(rows, TARGET).sane(LEAKY, TARGET) and not Ranking(rows, TARGET).sane(
        YARN[4], TARGET
    )
    assert made.effective_length[YARN[4]] == 0
    assert all(label in (None, BASELINE) for label in runtimes(made).values())


# the rule


def test_some_methods_keep_the_order_that_they_have_among_all() -> None:
    """Alone, two methods that are each ahead in one group would tie."""
    rows = measured(
        {REROPE: 0.30, LEAKY: 0.25, YARN[8]: 0.22, YARN[4]: 0.03},
        {REROPE: 2.1, LEAKY: 2.15, YARN[8]: 2.3, YARN[4]: 2.2},
        {REROPE: 0.8, LEAKY: 0.9, YARN[8]: 1.1, YARN[4]: 1.1},
    )
    ranking = Ranking(rows, TARGET)
    every = ranking.ordered("context")
    for names in ([YARN[4], YARN[8]], [YARN[8], LEAKY], [YARN[4]]):
        assert ranking.ordered("context", names) == [label for label in every if label in names]


def test_each_runtime_gets_the_best_that_it_can_serve_and_what_is_lost() -> None:
    shares = {OWN: 0.0, REROPE: 0.3, YARN[4]: 0.1, YARN[8]: 0.15}
    losses = {OWN: 9.0, REROPE: 2.0, YARN[4]: 2.2, YARN[8]: 2.2}
    rows = measured(shares, losses, window=0.05)
    made = advised(rows, by_plugin=(REROPE,))
    assert made.best.label == REROPE
    assert set(runtimes(made).values()) == {YARN[8]}
    sentence = made.runtimes[0].sentence
    assert "keeps 16 % (95 % CI " in sentence and "30 % of far context kept" in sentence
    assert "effective length 1,024" in sentence
    told = {one.what: one.sentence for one in made.runtimes}
    plugin = f"With Longitude's plugin vLLM serves {REROPE}."
    assert told["vllm"].endswith(plugin) and "plugin" not in told["sglang"]
    assert not any("plugin" in one.sentence for one in advised(rows).runtimes)  # it refuses
    few = measured({OWN: 0.0, REROPE: 0.3}, {OWN: 9.0, REROPE: 2.0})
    nothing = advised(few, by_plugin=(REROPE,))
    told = {one.what: one.sentence for one in nothing.runtimes}
    assert told["vllm"].endswith(f"; with Longitude's plugin it serves {REROPE}.")
    assert (
        told["sglang"] == "Nothing that SGLang can serve unchanged qualifies for a longer context."
    )


def test_a_method_that_reaches_the_target_comes_before_one_that_does_not() -> None:
    shares, losses = {REROPE: 0.22, LEAKY: 0.15}, {REROPE: 2.3, LEAKY: 2.1}
    rows = measured(shares, losses, {REROPE: 0.9, LEAKY: 0.8})  # the baseline's window: 20 %
    assert advised(rows).best.label == REROPE
    shares[REROPE] = 0.19
    assert advised(measured(shares, losses, {REROPE: 0.9, LEAKY: 0.8})).best.label == LEAKY


def test_answers_and_loss_count_as_much_as_what_is_kept() -> None:
    shares = {OWN: 0.0, LEAKY: 0.20, REROPE: 0.25}
    losses, answers = {LEAKY: 2.0, REROPE: 2.1}, {LEAKY: 0.5, REROPE: 1.5}
    assert advised(measured(shares, losses, answers)).best.label == LEAKY


def test_ties_go_to_the_lower_in_window_cost_then_to_the_faster() -> None:
    shares, losses = {OWN: 0.0, LEAKY: 0.2, REROPE: 0.2}, {OWN: 9.0, LEAKY: 2.0, REROPE: 2.0}
    dear = measured(shares, losses, in_window={LEAKY: 0.1, REROPE: 0.0})
    assert advised(dear).best.label == REROPE
    level = measured(shares, losses)
    speeds = [cost(OWN, TARGET, 100.0), cost(LEAKY, TARGET, 90.0), cost(REROPE, TARGET, 50.0)]
    assert advised([*level, *speeds]).best.label == LEAKY


def test_nothing_is_needed_where_the_baseline_uses_the_length() -> None:
    made = advised(measured({OWN: 0.3, LEAKY: 0.1}, {OWN: 2.0, LEAKY: 2.1}))
    assert made.best.label == BASELINE and not made.helps
    assert made.best.sentence.startswith("Change nothing")


def test_a_change_that_nothing_shows_to_help_is_not_advised() -> None:
    """A lower mean alone, by a thousandth, was advice to change a model that needs no change."""
    losses = {OWN: 2.001, LEAKY: 2.0}
    rows = [r for r in measured({}, losses) if r.key.measure != "kept_context"]
    made = advised(rows)
    assert made.best.label == BASELINE and not made.helps
    assert "no method is significantly better at 1,024 tokens" in made.best.sentence
    assert f"Not significantly different: {LEAKY}" in made.best.sentence
    ahead = [r for r in measured({}, {**losses, LEAKY: 1.9}) if r.key.measure != "kept_context"]
    assert advised(ahead).best.label == LEAKY


def test_what_was_not_measured_at_the_target_is_not_judged() -> None:
    """A budget may leave out kept context there: that none keeps any is then no result."""
    rows = measured({}, {OWN: 9.0, LEAKY: 2.0})  # kept context at the window alone
    sentence = advised(rows).best.sentence
    assert "kept context has no numbers there" in sentence and "Training" not in sentence
    lost = measured({OWN: 0.0, LEAKY: 0.01}, {OWN: 9.0, LEAKY: 2.0}, window=-0.01)
    lost = [r for r in lost if r.key.scheme != LEAKY or r.key.measure != "kept_context"]
    sentence = advised([*lost, kept(LEAKY, TARGET, noisy(0.01, 0.2, "little"))]).best.sentence
    assert "none keeps a share above zero" in sentence and "no numbers" not in sentence


def test_what_costs_too_much_inside_the_window_leaves_the_race_for_a_short_context() -> None:
    losses = {OWN: 9.0, LEAKY: 2.0, REROPE: 2.0}
    rows = measured({OWN: 0.0, LEAKY: 0.2}, losses, in_window={REROPE: 3.0})
    assert Ranking(rows, TARGET).in_race("short") == [BASELINE, LEAKY]


def test_effective_length_is_where_as_much_is_kept_as_at_the_window() -> None:
    rows = measured({OWN: 0.3, LEAKY: 0.1, REROPE: 0.3}, {OWN: 9.0, LEAKY: 2.0, REROPE: 2.0})
    for s, share in ((LEAKY, 0.25), (REROPE, 0.3)):
        rows.append(kept(s, 512, noisy(share, 0.02, f"512 {s}")))
        rows += context(s, 512, noisy(2.0, 0.01, f"loss {s}"))
    made = advised(rows)
    assert made.effective_length == {BASELINE: 256, LEAKY: 512, REROPE: 1024}
    assert "Effective length 1,024 tokens" in made.best.sentence


def test_streaming_is_for_streams() -> None:
    shares = {OWN: 0.0, STREAMING: 0.0, LEAKY: 0.2}
    rows = measured(shares, {OWN: 9.0, STREAMING: 1.9, LEAKY: 2.0})
    made = advised(rows, goal="stream")
    assert made.goal == "stream" and made.best.label == STREAMING
    assert [one.what for one in made.goals] == ["context", "short"]
    assert made.goals[0].label == LEAKY
    out_of_time = [r for r in rows if (r.key.measure, r.key.scheme) != ("kept_context", STREAMING)]
    assert "At 1,024 tokens the loss is 1." in advised(out_of_time, goal="stream").best.sentence
    insane = measured(shares, {OWN: 9.0, STREAMING: 3.9, LEAKY: 2.0})
    assert advised(insane, goal="stream").best.label is None


def test_a_short_context_is_used_best_by_what_keeps_more_inside_the_window() -> None:
    shares, losses = {OWN: 0.0, LEAKY: 0.2, REROPE: 0.2}, {OWN: 9.0, LEAKY: 2.0, REROPE: 2.0}
    inside = [
        kept(LEAKY, WINDOW, noisy(0.45, 0.02, "a")),
        kept(REROPE, WINDOW, noisy(0.5, 0.02, "b")),
    ]
    rows = [*measured(shares, losses, in_window={REROPE: 0.3}), *inside]
    made = advised(rows, goal="short")
    assert made.best.label == LEAKY  # ReRoPE keeps more, at a price
    assert "At 256 tokens it keeps 4" in made.best.sentence
    same = [*measured(shares, losses), kept(LEAKY, WINDOW, noisy(0.2, 0.02, "window"))]
    assert advised(same, goal="short").best.sentence.startswith("Change nothing")


def test_few_documents_that_disagree_show_nothing() -> None:
    rows = [kept(LEAKY, TARGET, [0.9, -0.5]), kept(OWN, WINDOW, [0.2, 0.2])]
    rows += [*context(LEAKY, TARGET, [2.0, 2.0]), *context(OWN, WINDOW, [2.0, 2.0])]
    made = advised(rows)
    assert not made.helps and LEAKY not in made.forgets  # neither is shown


def test_what_may_keep_more_on_so_few_documents_is_told() -> None:
    """The lucky one of four documents is not the last word: others kept more, and were noisier."""
    losses = {OWN: 9.0, LEAKY: 2.0, REROPE: 2.0, STREAMING: 2.0}
    rows = [row for row in measured({}, losses) if row.key.measure != "kept_context"]
    rows += [kept(OWN, WINDOW, [0.05] * 4), kept(STREAMING, TARGET, [0.09, -0.05, 0.1, 0.0])]
    rows += [kept(LEAKY, TARGET, [0.03, 0.04, 0.03, 0.02])]
    rows += [kept(REROPE, TARGET, [0.2, 0.0, 0.06, 0.0])]
    made = advised(rows)
    assert made.best.label == LEAKY
    said = f"These may keep more: {REROPE}, 6 % (95 % CI -9 to 22). 4 documents are too few"
    assert said in made.best.sentence
    alone = advised(row for row in rows if row.key.scheme != LEAKY).best
    assert alone.label is None and said in alone.sentence
    sure = [kept(REROPE, TARGET, [0.07, 0.06, 0.07, 0.06])]
    assert "may keep more" not in advised([*rows[:-1], *sure]).best.sentence


def test_a_longer_effective_length_of_another_method_is_told() -> None:
    rows = measured({LEAKY: 0.1, REROPE: 0.1}, {OWN: 9.0, LEAKY: 2.0, REROPE: 2.2})
    rows += [kept(LEAKY, 512, [0.1] * DOCUMENTS), kept(REROPE, 512, [0.3] * DOCUMENTS)]
    rows += context(REROPE, 512, [2.0] * DOCUMENTS)
    best = advised(rows).best
    assert best.label == LEAKY
    told = f"{REROPE} keeps more of shorter texts: its effective length is 512 tokens."
    assert told in best.sentence
    rows += [kept(LEAKY, 512, [0.3] * DOCUMENTS), *context(LEAKY, 512, [2.0] * DOCUMENTS)]
    assert "shorter texts" not in advised(rows).best.sentence


def test_without_kept_context_only_what_can_keep_something_is_recommended() -> None:
    losses = {OWN: 9.0, STREAMING: 1.5, LEAKY: 2.0}
    rows = [one for s, loss in losses.items() for one in context(s, TARGET, [loss, loss + 0.1])]
    made = advised([*rows, *context(OWN, WINDOW, [2.0, 2.1])])
    assert made.best.label == LEAKY and STREAMING in made.forgets


def test_a_target_that_nothing_reached_is_told() -> None:
    made = advised(measured({OWN: 0.0, LEAKY: 0.2}, {OWN: 9.0, LEAKY: 2.0}), 4096)
    assert made.best.label == LEAKY and "nothing reached 4,096" in made.best.sentence


def test_no_rows_are_a_mistake() -> None:
    with pytest.raises(UserError, match="no measurements"):
        recommend([], TARGET)


# the smallest factor


def test_the_smallest_sufficient_factor_of_the_best_kind() -> None:
    shares = {OWN: 0.0, YARN[4]: 0.2, YARN[8]: 0.2, YARN[16]: 0.1}
    losses = {OWN: 9.0, YARN[4]: 2.1, YARN[8]: 2.1, YARN[16]: 2.4}
    right = dict.fromkeys(YARN.values(), 0.1)
    made = advised(measured(shares, losses, right))
    assert made.factor is not None and made.factor.label == YARN[4]
    assert made.factor.sentence.startswith("A factor of 4 is enough")


def test_a_factor_of_which_another_keeps_more_is_not_enough() -> None:
    shares = {OWN: 0.0, YARN[4]: 0.05, YARN[8]: 0.2}
    losses = {OWN: 9.0, YARN[4]: 2.0, YARN[8]: 2.3}
    made = advised(measured(shares, losses, dict.fromkeys((YARN[4], YARN[8]), 0.1)))
    assert made.factor is not None and made.factor.label == YARN[8]


def test_nothing_is_enough_that_retrieves_nothing() -> None:
    shares = {OWN: 0.0, YARN[4]: 0.2, YARN[8]: 0.2}
    wrong = dict.fromkeys((YARN[4], YARN[8]), 4.0)
    losses = {OWN: 9.0, YARN[4]: 2.1, YARN[8]: 2.1}
    assert advised(measured(shares, losses, wrong)).factor is None
    assert advised(measured({**shares, YARN[4]: 0.0, YARN[8]: 0.0}, losses)).factor is None


# the race


def test_what_uses_the_context_less_leaves_the_race() -> None:
    shares = {OWN: 0.0, REROPE: 0.3, LEAKY: 0.1, STREAMING: 0.0, YARN[4]: 0.29}
    losses = {OWN: 9.0, REROPE: 2.0, LEAKY: 2.1, STREAMING: 1.9, YARN[4]: 2.0}
    ranking = Ranking(measured(shares, losses), TARGET)
    assert ranking.in_race("context") == [BASELINE, REROPE, YARN[4]]
    assert ranking.in_race("stream") == [BASELINE, STREAMING]


def test_what_is_better_at_something_stays_in_the_race() -> None:
    shares = {OWN: 0.0, REROPE: 0.3, LEAKY: 0.2}
    losses = {OWN: 9.0, REROPE: 2.1, LEAKY: 2.0}
    assert LEAKY in Ranking(measured(shares, losses), TARGET).in_race("context")


# windows


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("rope(remap=streaming(4, 252))", 252),
        ("rope(remap=lm_infinite(128))", 128),
        ("rope() + window(100)", 100),
        ("rope() + window(100, sinks=4)", 100),
        ("layers(rope() + window(100), rope() + window(50))", 100),
        ("rope()", None),
        ("rope(remap=rerope(128))", None),
        ("rope(remap=self_extend(32, 64))", None),
        ("rope(remap=dual_chunk(192, 32))", None),
        ("rope(frequencies=yarn(8, original=256))", None),
        ("layers(rope() + window(100), rope())", None),
        ("split(streaming(4, 124), rerope(64), share=0.5)", None),
        ("alibi()", None),
        ("learned(2048)", None),
    ],
)
def test_what_the_last_query_sees_says_whether_a_scheme_has_a_window(
    text: str, window: int | None
) -> None:
    found = hidden_beyond(parse(text), 2048)
    assert (found is None) == (window is None)
    assert window is None or abs(int(found or 0) - window) <= 1
    assert windowed(text, 2048) is (window is not None)


def test_a_refusal_is_no_number() -> None:
    rows = measured({OWN: 0.0, LEAKY: 0.2}, {OWN: 9.0, LEAKY: 2.0})
    rows.append(row("kept_context", REROPE, TARGET, {"refused": "out of memory."}, at={"round": 0}))
    rows += [row("context", REROPE, TARGET, {"loss": 1.0}, text=document(0))]
    assert advised(rows).best.label == LEAKY
