"""The recommendation in sentences: for the goal, for each runtime, and for the other goals.

Every number stands with its 95 % interval, and what is not significantly different is named. What a
runtime can serve is said with what is lost against the best of all; where nothing qualifies, with
the effective length that was reached and what would help.
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
    """What to use for what, in sentences, with the numbers behind them; no label: nothing."""

    what: str
    label: str | None
    scheme: str | None
    sentence: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recommendation:
    """What the measurements recommend for a goal; and for the other goals beside it."""

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
    """The recommendation of one model's rows for a target; `served` names by label the runtimes
    that can run a method unchanged (without it, as the schemes say), `by_plugin` the methods that
    our plugin can make one serve."""
    if not rows:
        raise UserError("There are no measurements to judge by: run some first.")
    ranking = Ranking(rows, target)
    if served is None:
        served = {}
        with suppress(UserError):  # a server's scheme is not known
            own = parse(rows[0].key.subject.scheme)
            served = {s: supporting(parse(text), own) for s, text in ranking.schemes.items()}
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
    """What to use for a goal, of all methods."""
    first = next(iter(ranking.ordered(goal)), None)
    if first is None:
        return _nothing(ranking, goal)
    numbers = ranking.numbers(first, goal)
    if first == ranking.own:
        begin = f"Change nothing, the baseline uses {ranking.length:,} tokens already"
        if numbers["kept"] is None:
            begin = (
                f"Change nothing, no method is significantly better at {ranking.length:,} tokens"
            )
    else:
        far = ranking.length != ranking.target and goal != SHORT
        begin = f"Use {first} {TITLES[goal]}"
        begin += f", though nothing reached {ranking.target:,}" if far else ""
    sentence = f"{begin}. {describe(numbers)}"
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
    """Which methods may keep more than this one, as far as so few documents tell."""
    names = ranking.undecided(label)
    kept = {s: value for s in names[:3] if (value := ranking.value(KEPT, s, ranking.length))}
    if not kept:
        return ""
    shares = "; ".join(f"{s}, {_share(asdict(value))}" for s, value in kept.items())
    count = min(value.n for value in kept.values())
    return (
        f" More may be kept by {shares}: {count} document{'s' * (count != 1)} can't tell, so "
        f"measure more (--docs, or a larger --budget)."
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
    """The best that a runtime can serve unchanged, and what is lost against the best of all, unless
    our plugin makes it serve that."""
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
        lost = [f"{_percent(kept)} of far context kept"] if kept else []
        lost += [f"effective length {reached:,}"] if reached else []
        sentence += f" The best of all, {best.label}: {', '.join(lost)}." if lost else ""
        if plugin:
            sentence += f" With Longitude's plugin {title} serves {best.label}."
    return Advice(name, first, ranking.schemes[first], sentence, numbers)


def describe(numbers: Mapping[str, Any], *, brief: bool = False) -> str:
    """The numbers in sentences: how much is kept, how far, what is answered, at which price."""
    is_baseline, at = numbers["label"] == numbers["own"], f"{numbers['length']:,} tokens"
    past, trained = numbers["length"] > numbers["trained"], f"{numbers['trained']:,}"

    def part(name: str, text: str, show: Callable[[Any], Any], when: bool = True) -> str:
        return text.format(show(numbers[name])) if when and numbers[name] else ""

    full, other, kept = not brief, not brief and not is_baseline, bool(numbers["kept"])
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
        + part("baseline", "; baseline {}", _loss, other)
        + part("window", ", {} at its window", _loss, other and past),
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
    several: the least of which no other keeps or answers significantly more. Only methods that
    qualify count; None where no kind has several that do."""
    kinds: dict[Any, dict[float, str]] = {}  # by the scheme with a factor of 1
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
    begin = f"A factor of {least:g} is enough ({several[least]}, of the factors {tried})"
    sentence = f"{begin}. {describe(numbers, brief=True)}"
    return Advice("factor", several[least], ranking.schemes[several[least]], sentence, numbers)
