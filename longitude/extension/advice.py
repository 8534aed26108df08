"""The recommendation in sentences: for the goal, for each runtime, and for the other goals.

Every number comes with its 95 % confidence interval, and methods that are not significantly
different are named. Advice for a runtime includes what the best method overall keeps. If no method
qualifies, the advice gives the longest effective length that was reached and what would help.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import ANSWER_LOSS, KEPT, Measurement
from longitude.extension.rank import CONTEXT_GOAL, GOALS, SHORT, STREAM, Ranking
from longitude.runtimes import Runtime, recommended
from longitude.runtimes.target import supporting

TITLES = {
    CONTEXT_GOAL: "for a longer context",
    STREAM: "to stream without end",
    SHORT: "inside the window",
}


@dataclass(frozen=True)
class Advice:
    """Advice for a goal or a runtime, with its numbers; `label` is None if no method qualifies."""

    what: str
    label: str | None
    scheme: str | None
    sentence: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recommendation:
    """What the measurements recommend for a goal, for each runtime and for the other goals."""

    goal: str
    best: Advice
    runtimes: tuple[Advice, ...]
    goals: tuple[Advice, ...]
    factor: Advice | None
    helps: bool
    effective_length: Mapping[str, int]
    forgets: tuple[str, ...] = ()  # methods that keep nothing at the target

    def to_json(self) -> dict[str, Any]:
        """The content of recommendation.json."""
        plain = asdict(self)
        return {k: [*value] if isinstance(value, tuple) else value for k, value in plain.items()}


def recommend(
    rows: Sequence[Measurement],
    target: int,
    served: Mapping[str, Sequence[str]] | None = None,
    goal: str = CONTEXT_GOAL,
    by_plugin: Collection[str] = (),
) -> Recommendation:
    """Recommend methods for a target from the rows of one model. `served` maps a method's label to
    the runtimes that can run it unchanged (None: derived from the schemes); `by_plugin` lists the
    labels of the methods that a runtime can serve with our plugin."""
    if not rows:
        raise UserError("There are no measurements to judge by: run some first.")
    ranking = Ranking(rows, target)
    if served is None:
        served = {}
        with suppress(UserError):  # the scheme of a server is unknown
            own_scheme = parse(rows[0].key.subject.scheme)
            served = {s: supporting(parse(text), own_scheme) for s, text in ranking.schemes.items()}
    advice = {each: _advice(ranking, each) for each in GOALS}
    best = advice.pop(goal)
    runtimes = []
    for runtime in recommended():
        names = [s for s in ranking.schemes if runtime.name in served.get(s, ())]
        plugin = bool(runtime.any_since) and best.label in by_plugin
        runtimes.append(_for_runtime(ranking, goal, runtime, names, best, plugin))
    return Recommendation(
        goal,
        best,
        tuple(runtimes),
        goals=tuple(advice.values()),
        factor=_smallest_factor(ranking) if goal == CONTEXT_GOAL else None,
        helps=best.label not in (None, ranking.own),
        effective_length=ranking.effective_length,
        forgets=tuple(ranking.forgets),
    )


def _advice(ranking: Ranking, goal: str) -> Advice:
    """The recommendation for a goal among all methods."""
    first = next(iter(ranking.ordered(goal)), None)
    if first is None:
        return _nothing(ranking, goal)
    numbers = ranking.numbers(first, goal)
    if first == ranking.own:
        opening = f"Change nothing, the baseline uses {ranking.length:,} tokens already"
        if numbers["kept"] is None:
            opening = (
                f"Change nothing, no method is significantly better at {ranking.length:,} tokens"
            )
    else:
        short_of_target = ranking.length != ranking.target and goal != SHORT
        opening = f"Use {first} {TITLES[goal]}"
        opening += f", though nothing reached {ranking.target:,}" if short_of_target else ""
    sentence = f"{opening}. {describe(numbers)}"
    if goal == CONTEXT_GOAL:
        reached = ranking.effective_length
        furthest = max(ranking.candidates(goal), key=lambda label: reached.get(label, 0))
        if reached and reached[furthest] > reached[first]:
            sentence += (
                f" {furthest} keeps more of shorter texts: its effective length is "
                f"{reached[furthest]:,} tokens."
            )
        sentence += _undecided(ranking, first)
    return Advice(goal, first, ranking.schemes[first], sentence, numbers)


def _undecided(ranking: Ranking, label: str | None) -> str:
    """A sentence on methods that may keep more than this one, but need more documents to tell."""
    names = ranking.undecided(label)
    kept = {s: value for s in names[:3] if (value := ranking.value(KEPT, s, ranking.length))}
    if not kept:
        return ""
    shares = "; ".join(f"{s}, {_share(asdict(value))}" for s, value in kept.items())
    count = min(value.n for value in kept.values())
    return (
        f" These may keep more: {shares}. {count} document{'s are' if count > 1 else ' is'} too "
        f"few to decide: measure more (--docs, or a larger --budget)."
    )


def _nothing(ranking: Ranking, goal: str) -> Advice:
    """Why no method qualifies, what was reached, and what would help."""
    own, reached = ranking.own, ranking.effective_length
    numbers = ranking.numbers(own, goal)
    if goal == SHORT:
        sentence = "Change nothing inside the window: no method keeps significantly more there."
        return Advice(goal, own, ranking.schemes.get(str(own)), sentence, numbers)
    at = f"{ranking.length:,} tokens"
    furthest = max(reached, key=lambda s: (reached[s], s == own), default=None)
    if goal == STREAM:
        sentence = "No method that was measured streams: name one with --methods streaming."
    elif ranking.length not in ranking.results[KEPT].lengths:
        sentence = (
            f"No method is shown to use {at} of context: kept context has no numbers there, so "
            f"measure it (--tasks kept_context, or a larger --budget)."
        )
    else:
        sentence = (
            f"No method uses {at} of context: none keeps a share above zero (95 % CI) at a sane "
            f"loss. "
        )
        if furthest is not None:
            by = f"{reached[furthest]:,} tokens, by {furthest}"
            sentence += f"The longest effective length is {by}. "
        sentence += (
            "Training helps (`longitude tune`), or read the text in windows (`longitude read --by "
            "nbce`)."
        )
        sentence += _undecided(ranking, None)
    return Advice(goal, None, None, sentence, numbers)


def _for_runtime(
    ranking: Ranking, goal: str, runtime: Runtime, names: Sequence[str], best: Advice, plugin: bool
) -> Advice:
    """The best method of `names`, which a runtime can serve unchanged, and what the best overall
    keeps; `plugin` is whether the runtime can serve the latter with our plugin."""
    name, title = runtime.name, runtime.title
    first = next((s for s in ranking.ordered(goal, names) if s != ranking.own), None)
    if first is None:
        numbers = ranking.numbers(ranking.own, goal)
        sentence = f"Nothing that {title} can serve unchanged qualifies {TITLES[goal]}"
        sentence += f"; with Longitude's plugin it serves {best.label}." if plugin else "."
        return Advice(name, ranking.own, None, sentence, numbers)
    numbers = ranking.numbers(first, goal)
    sentence = f"{title} can serve {first} unchanged. {describe(numbers, brief=True)}"
    if best.label not in (first, None):
        kept, reached = best.numbers["kept"], best.numbers["effective_length"]
        strengths = [f"{_percent(kept)} of far context kept"] if kept else []
        strengths += [f"effective length {reached:,}"] if reached else []
        sentence += f" The best of all, {best.label}: {', '.join(strengths)}." if strengths else ""
        if plugin:
            sentence += f" With Longitude's plugin {title} serves {best.label}."
    return Advice(name, first, ranking.schemes[first], sentence, numbers)


def describe(numbers: Mapping[str, Any], *, brief: bool = False) -> str:
    """The numbers in sentences: context kept, effective length, answers, loss, cost and speed."""
    is_baseline, at = numbers["label"] == numbers["own"], f"{numbers['length']:,} tokens"
    past, trained = numbers["length"] > numbers["trained"], f"{numbers['trained']:,}"

    def part(name: str, text: str, show: Callable[[Any], Any], when: bool = True) -> str:
        return text.format(show(numbers[name])) if when and numbers[name] else ""

    full, not_baseline, kept = not brief, not brief and not is_baseline, bool(numbers["kept"])
    beside = kept and not past and not is_baseline
    window = f"; the baseline {{}} at its window of {trained}"
    sentences = (
        part("kept", f"At {at} it keeps {{}} of far context", _share)
        + part("window_kept", window, _percent, kept and past)
        + part("baseline_kept", "; the baseline {}", _share, beside),
        part("effective_length", "Effective length {} tokens", "{:,}".format),
        part("retrieval", "It answers {} of the questions exactly", _share, full)
        + part("passkey", " and retrieves {} of passkeys", _share, full),
        part("value", "Loss {}" if kept else f"At {at} the loss is {{}}", _loss)
        + part("baseline", "; baseline {}", _loss, not_baseline)
        + part("window", ", {} at its window", _loss, not_baseline and past),
        part("in_window_cost", "In-window cost {}", _change, full),
        part("speed", "Prefill {}× baseline speed", "{:.2f}".format, not is_baseline)
        + part("speed_range", " ({0[0]:.2f}–{0[1]:.2f})", list, not is_baseline)
        + part("decode_speed", ", decoding {}×", "{:.2f}".format, not is_baseline)
        + part("decode_speed_range", " ({0[0]:.2f}–{0[1]:.2f})", list, not is_baseline),
        part("alike", "Not significantly different: {}", ", ".join, full),
    )
    return "".join(f"{sentence}. " for sentence in sentences if sentence).rstrip()


def _percent(value: Mapping[str, float]) -> str:
    return f"{100 * value['mean']:z.0f} %"  # z: no -0


def _share(value: Mapping[str, float]) -> str:
    low, high = f"{100 * value['low']:z.0f}", f"{100 * value['high']:z.0f}"
    return _percent(value) + _interval(value, low, high, " to " if low.startswith("-") else "–")


def _loss(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f}" + _interval(value, f"{value['low']:.3f}", f"{value['high']:.3f}")


def _change(value: Mapping[str, float]) -> str:
    low, high = f"{value['low']:+z.3f}", f"{value['high']:+z.3f}"  # z: no -0.000
    return f"{value['mean']:+z.3f} nats per token" + _interval(value, low, high, " to ")


def _interval(value: Mapping[str, float], low: str, high: str, dash: str = "–") -> str:
    return " (one document)" if value["n"] < 2 else f" (95 % CI {low}{dash}{high})"


def _smallest_factor(ranking: Ranking) -> Advice | None:
    """The smallest sufficient factor of the best kind of frequency scaling that was measured with
    several: no other factor keeps or answers significantly more. Only methods that qualify count.
    None if no kind has several that do, or if the factor answers no question."""
    kinds: dict[Any, dict[float, str]] = {}  # by the scheme with its factor set to 1
    for label in ranking.ordered(CONTEXT_GOAL):
        scheme = parse(ranking.schemes[label])
        rope = scheme.rotary if isinstance(scheme, Scheme) else None
        frequencies: Any = rope and rope.frequencies
        if rope is not None and getattr(frequencies, "factor", None) is not None:
            bare = replace(rope, frequencies=replace(frequencies, factor=1))
            of_kind = kinds.setdefault(replace(scheme, rotary=bare), {})
            of_kind[float(frequencies.factor)] = label
    several = next((factors for factors in kinds.values() if len(factors) > 1), {})
    beaten = {  # another factor keeps or answers significantly more
        label
        for label in several.values()
        for other in several.values()
        if ranking.compared(other, label, ranking.length)[0] & {KEPT, ANSWER_LOSS}
    }
    least = min((factor for factor, label in several.items() if label not in beaten), default=None)
    if least is None:
        return None
    numbers = ranking.numbers(several[least])
    answers = numbers["retrieval"]
    if answers is not None and answers["mean"] == 0:
        return None
    tried = ", ".join(f"{factor:g}" for factor in sorted(several))
    opening = f"A factor of {least:g} is enough ({several[least]}, of the factors {tried})"
    sentence = f"{opening}. {describe(numbers, brief=True)}"
    return Advice("factor", several[least], ranking.schemes[several[least]], sentence, numbers)
