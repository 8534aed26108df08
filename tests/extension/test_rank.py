"""What is advised, in made-up cases whose answer is plain."""

import json
import random
from collections.abc import Iterable, Mapping

import pytest

from longitude import parse
from longitude.core.validate import UserError
from longitude.eval.records import BASELINE, CONTEXT, PASSKEY, Measurement
from longitude.extension.advice import Advice, Recommendation, recommend
from longitude.extension.rank import forgets, hidden_beyond
from longitude.runtimes import recommended
from longitude.runtimes.target import supporting
from tests.measured import OWN, asked, context, cost, document, reading, row

RUNTIMES = tuple(runtime.name for runtime in recommended())
YARN = {k: f"rope(frequencies=yarn({k}, original=256))" for k in (2, 4, 8, 16)}
LEAKY = "rope(remap=leaky_rerope(64, 16))"
DYNAMIC = "rope(frequencies=dynamic_ntk(256))"
TARGET = 1024


def at_target(
    losses: Mapping[str, float], documents: int = 6, own: float = 2.0
) -> list[Measurement]:
    """Context losses at the window (the untouched model's) and at the target, documents apart by
    more than methods, methods by more than their noise."""
    rng = random.Random(1)
    hard = [rng.gauss(0, 0.5) for _ in range(documents)]
    noisy = {s: [loss + h + rng.gauss(0, 0.004) for h in hard] for s, loss in losses.items()}
    rows = [one for s, found in noisy.items() for one in context(s, TARGET, found)]
    return rows + context(OWN, 256, [own + h for h in hard])


def keys(shares: Mapping[str, float], questions: int = 20) -> list[Measurement]:
    rights = {s: [i < share * questions for i in range(questions)] for s, share in shares.items()}
    return [asked(PASSKEY, s, TARGET, right) for s, right in rights.items()]


def advised(rows: Iterable[Measurement], target: int = TARGET) -> Recommendation:
    found = [*rows]
    schemes = {one.label: one.key.scheme for one in found}
    served = {label: supporting(parse(s), parse(OWN)) for label, s in schemes.items()}
    made = recommend(found, target, served)
    assert json.loads(json.dumps(made.to_json())) == made.to_json()
    for advice in (made.best, *made.runtimes, *([made.factor] if made.factor else [])):
        assert advice.sentence.endswith(".") and "None" not in advice.sentence
        assert "nan" not in advice.sentence and len(advice.sentence) < 500
    return made


def runtimes(made: Recommendation) -> dict[str, str | None]:
    assert tuple(one.what for one in made.runtimes) == RUNTIMES
    return {one.what: one.label for one in made.runtimes}


def test_the_lowest_loss_at_the_target_wins_and_each_runtime_gets_what_it_can_serve() -> None:
    losses = {OWN: 9.0, LEAKY: 2.0, DYNAMIC: 2.2, YARN[4]: 2.5}
    made = advised([*at_target(losses), *keys({OWN: 0, LEAKY: 1, DYNAMIC: 0.5, YARN[4]: 0.5})])
    assert made.helps
    assert (made.best.label, made.best.scheme) == (LEAKY, LEAKY)
    expected = dict.fromkeys(RUNTIMES, YARN[4]) | {"transformers": DYNAMIC}
    assert runtimes(made) == expected
    value, over = made.best.numbers["value"], made.best.numbers["over"]
    for number in (value["mean"], value["low"], value["high"]):
        assert f"{number:.3f}" in made.best.sentence
    assert "100 % of passkeys (95 % CI 84–100)" in made.best.sentence
    assert over["mean"] == pytest.approx(-7, abs=0.01) and over["high"] < -6.9
    assert made.best.numbers["alike"] == []


def test_a_lower_loss_is_not_given_up_for_more_passkeys() -> None:
    rows = [*at_target({OWN: 9.0, LEAKY: 2.0, YARN[4]: 2.2})]
    assert advised([*rows, *keys({OWN: 0, LEAKY: 0.5, YARN[4]: 1})]).best.label == LEAKY


def test_passkeys_decide_between_losses_that_are_alike() -> None:
    rows = [*at_target({OWN: 9.0, LEAKY: 2.000, YARN[4]: 2.001})]
    for better, worse in ((LEAKY, YARN[4]), (YARN[4], LEAKY)):
        made = advised([*rows, *keys({OWN: 0, better: 1, worse: 0.5})])
        assert made.best.label == better
        assert made.best.numbers["alike"] == [worse]


def test_a_difference_that_no_one_would_notice_does_not_outweigh_passkeys() -> None:
    hard = [1.8, 2.0, 2.2, 2.4]
    rows = [*context(OWN, TARGET, [9.0] * 4), *context(LEAKY, TARGET, hard)]
    rows += context(YARN[4], TARGET, [h + 0.01 for h in hard])  # told apart, but by half a percent
    assert advised([*rows, *keys({OWN: 0, LEAKY: 0, YARN[4]: 1})]).best.label == YARN[4]
    assert advised(rows).best.label == LEAKY


def test_then_the_tax_then_the_speed() -> None:
    rows = [*at_target({OWN: 9.0, LEAKY: 2.000, YARN[4]: 2.001})]
    rows += keys({OWN: 0, LEAKY: 0.95, YARN[4]: 1})  # which tells nothing apart
    windows = {OWN: 2.0, LEAKY: 2.5, YARN[4]: 2.0}
    taxed = [
        one
        for s, loss in windows.items()
        for one in reading(s, 1024, [{256: loss + d / 10, 1024: 3.0} for d in range(4)])
    ]
    made = advised([*rows, *taxed])
    assert made.best.label == YARN[4]
    assert made.best.numbers["tax"]["mean"] == 0
    for fast in (LEAKY, YARN[4]):
        speeds = {s: 1000.0 if s == fast else 500.0 for s in (OWN, LEAKY, YARN[4])}
        made = advised([*rows, *(cost(s, TARGET, speed) for s, speed in speeds.items())])
        assert made.best.label == fast
        assert (
            made.best.numbers["speed"] == 2.0
            and "Prefill 2.00× baseline speed" in made.best.sentence
        )


def test_what_was_refused_at_the_target_is_never_best() -> None:
    rows = [*at_target({OWN: 9.0, YARN[4]: 2.5}), *context(LEAKY, 512, [1.0] * 6)]
    rows += [
        row(CONTEXT, LEAKY, TARGET, {"refused": "out of memory."}, text=document(d))
        for d in range(6)
    ]
    assert advised(rows).best.label == YARN[4]


def test_nothing_helps() -> None:
    rows = [*at_target({OWN: 5.0, LEAKY: 5.001, YARN[4]: 6.0}, own=2.0)]
    made = advised([*rows, *keys({OWN: 0.5, LEAKY: 0.5, YARN[4]: 0.5})])
    assert not made.helps and made.factor is None
    assert (made.best.label, made.best.scheme) == (BASELINE, OWN)
    assert made.best.sentence.startswith("Nothing helps at 1,024 tokens. At 1,024 tokens the loss")
    assert set(runtimes(made).values()) == {BASELINE}


def test_nothing_is_needed() -> None:
    made = advised(at_target({OWN: 1.9, LEAKY: 1.9, YARN[4]: 2.2}, own=2.0))
    assert not made.helps and made.best.label == BASELINE
    assert made.best.sentence.startswith("Change nothing, the baseline reads 1,024 tokens")


def test_more_passkeys_help_where_losses_are_alike() -> None:
    rows = at_target({OWN: 2.0, LEAKY: 2.001})
    made = advised([*rows, *keys({OWN: 0.0, LEAKY: 1.0})])
    assert made.helps and made.best.label == LEAKY
    assert runtimes(made)["vllm"] == BASELINE


def test_passkeys_asked_of_one_alone_are_no_help() -> None:
    made = advised([*at_target({OWN: 2.0, LEAKY: 2.001}), *keys({LEAKY: 1.0})])
    assert not made.helps


def test_few_documents_that_disagree_tell_nothing() -> None:
    rows = [*context(OWN, TARGET, [2.0, 3.0, 2.5]), *context(LEAKY, TARGET, [2.4, 2.0, 2.6])]
    assert not advised(rows).helps


def test_one_document_is_judged_by_its_number() -> None:
    made = advised([*context(OWN, TARGET, [9.0]), *context(LEAKY, TARGET, [2.0])])
    assert made.helps and made.best.label == LEAKY
    assert "2.000 (one document)" in made.best.sentence
    assert not advised([*context(OWN, TARGET, [2.01]), *context(LEAKY, TARGET, [2.0])]).helps


def test_a_model_that_has_no_number_of_its_own_is_helped_by_whatever_has() -> None:
    rows = context("hierarchical(256)", TARGET, [3.0, 3.1])
    rows += [row(CONTEXT, OWN, TARGET, {"refused": "no position."}, text=document(0))]
    made = recommend(rows, TARGET, {"hierarchical(256)": ("transformers",)})
    assert made.helps and made.best.label == "hierarchical(256)"
    assert made.best.numbers["untouched"] is None
    llama = made.runtimes[-1]
    assert llama.label is None and "llama.cpp" in llama.sentence


def test_the_smallest_sufficient_factor_of_the_best_kind() -> None:
    losses = {OWN: 9.0, YARN[2]: 4.0, YARN[4]: 2.003, YARN[8]: 2.0, YARN[16]: 2.3, LEAKY: 1.5}
    linear = {f"rope(frequencies=linear({k}))": 3.0 for k in (2, 4)}
    factor = advised(at_target({**losses, **linear})).factor
    assert isinstance(factor, Advice)
    assert (factor.what, factor.label) == ("factor", YARN[4])
    assert "A factor of 4 is enough" in factor.sentence and "2, 4, 8, 16" in factor.sentence


def test_one_factor_alone_says_nothing_of_the_smallest() -> None:
    alone = {OWN: 9.0, YARN[4]: 2.0, "rope(frequencies=ntk(8))": 2.1, LEAKY: 2.0}
    assert advised(at_target(alone)).factor is None


def test_other_measures_stand_in_for_those_that_are_missing() -> None:
    losses = [
        one
        for s, far in ((OWN, 9.0), (LEAKY, 2.0), (YARN[4], 3.0))
        for one in reading(s, 1024, [{256: 2.0 + d, 1024: far + d} for d in range(4)])
    ]
    made = advised(losses)
    assert made.best.label == LEAKY and made.best.numbers["measure"] == "loss"
    made = advised(keys({OWN: 0.0, LEAKY: 0.5, YARN[4]: 1.0}))
    assert made.best.label == YARN[4] and made.best.numbers["measure"] == "passkey"
    assert "At 1,024 tokens it retrieves 100 % of passkeys" in made.best.sentence
    made = advised([cost(OWN, TARGET, 1.0), cost(LEAKY, TARGET, 2.0)])
    assert not made.helps and made.best.label is None


def test_a_target_that_nothing_reached_is_told() -> None:
    made = advised(at_target({OWN: 9.0, LEAKY: 2.0}), target=4096)
    assert made.best.label == LEAKY and made.best.numbers["length"] == TARGET
    assert "nothing reached 4,096" in made.best.sentence


def test_no_rows_are_a_mistake() -> None:
    with pytest.raises(UserError, match="no measurements"):
        recommend([], 1024, {})


def test_passkeys_of_all_lengths_past_the_window_count_together() -> None:
    """Five at each of three lengths tell two methods apart where five at one can't."""
    found = [*context(OWN, 2048, [5.0, 5.1, 4.9, 5.0])]
    for scheme, told in (("rope(remap=rerope(8))", True), ("rope(remap=rerope(9))", False)):
        found += context(scheme, 2048, [1.0, 1.1, 0.9, 1.0])
        found += [
            asked("passkey", scheme, n, [told], depth=d / 4)
            for n in (512, 1024, 2048)
            for d in range(5)
        ]
    found += [
        cost("rope(remap=rerope(9))", 2048, 900.0),
        cost("rope(remap=rerope(8))", 2048, 300.0),
    ]
    assert recommend(found, 2048, {}).best.label == "rope(remap=rerope(8))"


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
        ("alibi()", None),
        ("learned(2048)", None),
    ],
)
def test_what_the_last_query_sees_says_whether_a_scheme_forgets(
    text: str, window: int | None
) -> None:
    found = hidden_beyond(parse(text), 2048)
    assert (found is None) == (window is None)
    assert window is None or abs(int(found or 0) - window) <= 1
    assert forgets(text, "rope()", 2048) is (window is not None)
    assert not forgets(text, text, 2048)  # it hides no more than the model's own


def test_what_forgets_is_listed_and_never_recommended() -> None:
    streaming = "rope(remap=streaming(4, 252))"
    losses = {OWN: 9.0, streaming: 1.5, LEAKY: 2.0}
    rows = [*at_target(losses), *keys({OWN: 0, streaming: 1, LEAKY: 1})]
    served = dict.fromkeys((streaming, LEAKY, BASELINE), ("transformers",))
    made = recommend(rows, TARGET, served)
    assert made.best.label == LEAKY and made.forgets == (streaming,)
    assert made.to_json()["forgets"] == [streaming]
    assert {one.label for one in made.runtimes} == {LEAKY, BASELINE}
    alone = [one for one in rows if one.key.scheme != LEAKY]
    assert not recommend(alone, TARGET, served).helps
    level = [
        *at_target({OWN: 9.0, streaming: 2.0, LEAKY: 2.0}),
        *keys({OWN: 0, streaming: 1, LEAKY: 1}),
    ]
    assert streaming not in recommend(level, TARGET, served).best.sentence  # not as an equal either
