"""Which method to use, for a goal: judged by whether a longer context is used.

**Effective length** of a method: the longest measured length at which it keeps at least the share
of context that the baseline keeps at the end of its own window, and its loss is sane: within half a
nat of the baseline's in its window. With a loss beyond that, a share means nothing.

**context** (the default goal): of the methods whose kept share at the target is above zero with
95 % confidence and whose loss there is sane, the best mean rank over three groups: kept context;
the answers' loss, family by family; the loss past the window. Ties go to the lower in-window cost,
then to the faster prefill. A method that keeps nothing forgets, and is never recommended for a
context.

**stream**: fluent without end in constant memory: of the methods that hide everything beyond a
window, with a sane loss, the one with the lowest loss past the window.

**short**: the best use of the context inside the window: of the methods that keep significantly
more than the baseline at its window's end, at an in-window cost of next to nothing, the best mean
rank there.

Every comparison is paired, on the same documents and questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from longitude.core.region import visible
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import (
    ANSWER_LOSS,
    CONTEXT,
    KEPT,
    LOSS,
    PASSKEY,
    PAST_WINDOW,
    RETRIEVAL,
    Measurement,
    of,
)
from longitude.eval.stats import Interval
from longitude.eval.tables import SANE, Results, labels, prefill_speed, results
from longitude.eval.tasks import metrics
from longitude.runtimes import recommended
from longitude.runtimes.target import supporting

NEXT_TO_NOTHING = 0.02  # nats per token of in-window cost
CONTEXT_GOAL, STREAM, SHORT = GOALS = ("context", "stream", "short")


def hidden_beyond(scheme: Scheme | Layers, length: int) -> int | None:
    """The distance beyond which every layer hides all keys from the last query, except a few first
    ones (attention sinks); None if some layer sees the full text."""
    query, keys = torch.tensor(length - 1), torch.arange(length)
    windows = []
    for layer in {scheme.layer(i) for i in range(len(scheme))}:
        seen = visible(layer.areas(), query, keys)
        hidden = (~seen).nonzero().flatten()
        if not len(hidden):
            return None
        window = length - 1 - int(hidden[-1])  # keys visible up to the query without a gap
        sinks = int(hidden[0])
        beyond = int(seen[: int(hidden[-1])].sum())
        if beyond > sinks or 2 * sinks > length - window:  # it sees more than sinks
            return None
        windows.append(window)
    return max(windows)


def windowed(scheme: str, length: int) -> bool:
    """Whether a scheme hides what lies beyond a window, so that its cache stays bounded."""
    try:
        return hidden_beyond(parse(scheme), length) is not None
    except UserError:  # the name of a tuned model is no scheme
        return False


class Ranking:
    """The measurements of one model for a target, and the rules by which a method is chosen."""

    def __init__(self, rows: Sequence[Measurement], target: int) -> None:
        named, subject, every = labels(rows), rows[0].key.subject, metrics()
        self.rows, self.target = rows, target
        self.schemes = {label: scheme for scheme, label in named.items()}
        self.trained, self.own = subject.trained, named.get(subject.scheme)
        self.results = {name: results(rows, metric, named) for name, metric in every.items()}
        asked = of(rows, RETRIEVAL)
        self.families: dict[str, Results] = {
            family: results(
                [r for r in asked if r.key.at["family"] == family], every[ANSWER_LOSS], named
            )
            for family in sorted({str(r.key.at["family"]) for r in asked})
        }
        decisive = (KEPT, ANSWER_LOSS, CONTEXT, LOSS)
        past = [
            max(reached)
            for name in decisive
            if (reached := [n for n in self.results[name].lengths if self.trained < n <= target])
        ]
        self.length = max(past, default=target)
        self.windowed = [s for s, text in self.schemes.items() if windowed(text, target)]

    # what is known

    def value(self, measure: str, label: str | None, length: int) -> Interval | None:
        """A method's value, if there is one."""
        numbers = self.results[measure]
        known = label is not None and (label, length) in numbers.numbers
        return numbers.interval((str(label), length)) if known else None

    def loss(self, label: str | None, length: int) -> Interval | None:
        """The loss of the last tokens of this much text; of the first, where that is missing."""
        return self.value(CONTEXT, label, length) or self.value(LOSS, label, length)

    def sane(self, label: str, length: int) -> bool:
        """Whether the loss is within half a nat of the baseline's in its window."""
        here, own = self.loss(label, length), self.loss(self.own, self.trained)
        return here is not None and (own is None or here.mean <= own.mean + SANE)

    def keeps(self, label: str, length: int) -> bool:
        """Whether the kept share is above zero, with 95 % confidence; where it was not measured,
        whether the scheme can keep anything."""
        kept = self.value(KEPT, label, length)
        if kept is None:
            return not self.results[KEPT].lengths and label not in self.windowed
        return kept.n > 1 and kept.low > 0

    @property
    def forgets(self) -> list[str]:
        """The methods that keep nothing at the target, as far as was measured."""
        measured = self.results[KEPT].numbers
        return [
            s
            for s in self.schemes
            if ((s, self.length) in measured and not self.keeps(s, self.length))
            or ((s, self.length) not in measured and s in self.windowed)
        ]

    @property
    def effective_length(self) -> dict[str, int]:
        """Tokens by method; 0 where even the window is not used as the baseline uses it."""
        least = self.value(KEPT, self.own, self.trained)
        if least is None or least.mean <= 0:
            return {}
        window, kept = (str(self.own), self.trained), self.results[KEPT]
        reached = dict.fromkeys(self.schemes, 0)
        for label, length in kept.numbers:
            more = kept.difference((label, length), window)  # on the same documents
            if more is not None and more.mean >= 0 and self.sane(label, length):
                reached[label] = max(reached[label], length)
        return reached

    def in_window_cost(self, label: str | None) -> Interval | None:
        """The loss inside the window less the baseline's."""
        inside = [n for _, n in self.results[LOSS].numbers if n <= self.trained]
        if label is None or label == self.own or not inside:
            return None
        at = max(inside)
        return self.results[LOSS].difference((label, at), (str(self.own), at))

    # how methods compare

    def groups(self, length: int) -> dict[str, list[Results]]:
        """What methods are ranked by at a length."""
        inside = length <= self.trained
        groups = {
            "kept context": [self.results[KEPT]],
            "answers": [*self.families.values()],
            "loss": [self.results[n] for n in ((LOSS,) if inside else (PAST_WINDOW, CONTEXT))],
        }
        measured = {name: [r for r in each if length in r.lengths] for name, each in groups.items()}
        return {name: each for name, each in measured.items() if each}

    def mean_ranks(
        self, names: Iterable[str], length: int, groups: Mapping[str, Sequence[Results]]
    ) -> dict[str, float]:
        """The mean over groups of the mean rank in a group; a missing number ranks last, and equal
        numbers share their ranks."""
        names, places = [*names], []
        for group in groups.values():
            ranks = []
            for one in group:
                means = one.means(names, length)
                sign = 1 if one.metric.lower_is_better else -1
                order = sorted(sign * mean for mean in means.values())
                ranks.append({
                    s: fmean(i for i, x in enumerate(order, 1) if x == sign * means[s])
                    if s in means else len(names)
                    for s in names
                })  # fmt: skip
            places.append({s: fmean(r[s] for r in ranks) for s in names})
        return {s: fmean(p[s] for p in places) if places else 0.0 for s in names}

    def candidates(self, goal: str, names: Iterable[str] | None = None) -> list[str]:
        """The methods that qualify for a goal."""
        names = [*(self.schemes if names is None else names)]
        at = self.length
        if goal == STREAM:
            return [s for s in names if s in self.windowed and self.sane(s, at)]
        if goal == SHORT:
            return [s for s in names if s != self.own and self._uses_the_window(s)]
        return [s for s in names if self.keeps(s, at) and self.sane(s, at)]

    def _uses_the_window(self, label: str) -> bool:
        """Whether a method keeps significantly more than the baseline at its window's end, at an
        in-window cost of next to nothing."""
        at, cost = self.trained, self.in_window_cost(label)
        more = self.results[KEPT].difference((label, at), (str(self.own), at))
        cheap = cost is not None and cost.mean <= NEXT_TO_NOTHING
        return more is not None and more.clear and more.mean > 0 and cheap

    def ordered(self, goal: str, names: Iterable[str] | None = None) -> list[str]:
        """The methods that qualify for a goal, the best first."""
        left, at = self.candidates(goal, names), self.trained if goal == SHORT else self.length
        groups = self.groups(at)
        if goal == STREAM:
            groups = {name: group for name, group in groups.items() if name == "loss"}
        ranks = self.mean_ranks(left, at, groups)

        def place(label: str) -> tuple[float, float, float, int]:
            cost, speed = self.in_window_cost(label), prefill_speed(self.rows, label, self.length)
            return (
                round(ranks[label], 9),
                cost.mean if cost else 0.0,
                -speed.mean if speed else 0.0,
                len(self.schemes[label]),
            )

        return sorted(left, key=place)

    def compared(self, a: str, b: str, length: int) -> tuple[set[str], set[str]]:
        """By which measures a is significantly better than b, and by which worse."""
        better, worse = set(), set()
        inside = length <= self.trained
        for name in (KEPT, ANSWER_LOSS, *((LOSS,) if inside else (PAST_WINDOW, CONTEXT))):
            gap = self.results[name].difference((a, length), (b, length))
            if gap is not None and gap.clear:
                ahead = (gap.mean < 0) == self.results[name].metric.lower_is_better
                (better if ahead else worse).add(name)
        return better, worse

    def alike(self, label: str, goal: str) -> list[str]:
        """The other candidates that no measure shows to be worse or better."""
        at = self.trained if goal == SHORT else self.length
        others = (s for s in self.candidates(goal) if s != label)
        return [s for s in others if not any(self.compared(s, label, at))]

    def in_race(self, goal: str) -> list[str]:
        """The methods that may still turn out to be the best: not those that use the context
        significantly less than the leader, by what is kept or answered, and are better by no
        measure. The baseline stays."""
        first, at = self.ordered(goal)[:1], self.trained if goal == SHORT else self.length
        left = []
        for label in self.schemes:
            better, worse = self.compared(label, first[0], at) if first else (set(), set())
            beaten = worse & {KEPT, ANSWER_LOSS} and not better
            if label == self.own or (self._may_qualify(label, goal) and not beaten):
                left.append(label)
        return left

    def _may_qualify(self, label: str, goal: str) -> bool:
        """Whether more documents could make a candidate of it."""
        if goal == STREAM:
            return label in self.windowed
        if goal == SHORT:
            return True
        kept = self.value(KEPT, label, self.length)
        hopeless = kept is not None and kept.n > 1 and kept.high <= 0
        return label not in self.windowed and not hopeless and self.sane(label, self.length)

    def numbers(self, label: str | None, goal: str = CONTEXT_GOAL) -> dict[str, Any]:
        """Everything that is said of a method, in JSON's own types."""
        at = self.trained if goal == SHORT else self.length
        passkeys = [r for r in of(self.rows, RETRIEVAL) if r.key.at["family"] == PASSKEY]
        names = {scheme: s for s, scheme in self.schemes.items()}
        single = results(passkeys, metrics()[RETRIEVAL], names)
        place = (str(label), at)
        intervals = {
            "kept": self.value(KEPT, label, at),
            "window_kept": self.value(KEPT, self.own, self.trained),
            "retrieval": self.value(RETRIEVAL, label, at),
            "answer_loss": self.value(ANSWER_LOSS, label, at),
            "passkey": single.interval(place) if place in single.numbers else None,
            "value": self.loss(label, at),
            "past_window": self.value(PAST_WINDOW, label, at),
            "baseline": self.loss(self.own, at),
            "baseline_kept": self.value(KEPT, self.own, at),
            "window": self.loss(self.own, self.trained),
            "in_window_cost": self.in_window_cost(label),
        }
        speed = prefill_speed(self.rows, str(label), at)
        return {
            "label": label,
            "own": self.own,
            "goal": goal,
            "measure": CONTEXT if self.value(CONTEXT, label, at) else LOSS,
            "length": at,
            "target": self.target,
            "trained": self.trained,
            "effective_length": self.effective_length.get(str(label)),
            "sane": label is not None and self.sane(label, at),
            **{name: value and asdict(value) for name, value in intervals.items()},
            "speed": speed and speed.mean,
            "speed_range": speed and [speed.low, speed.high],
            "alike": self.alike(label, goal) if label is not None else [],
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
        lists = ("runtimes", "goals", "forgets")
        return asdict(self) | {name: [*asdict(self)[name]] for name in lists}


def recommend(
    rows: Sequence[Measurement],
    target: int,
    served: Mapping[str, Sequence[str]] | None = None,
    goal: str = CONTEXT_GOAL,
) -> Recommendation:
    """The recommendation of one model's rows for a target; `served` names by label the runtimes
    that can run a method unchanged (without it, as the schemes say)."""
    if not rows:
        raise UserError("There are no measurements to judge by: run some first.")
    ranking = Ranking(rows, target)
    if served is None:
        own = parse(rows[0].key.subject.scheme)
        served = {label: supporting(parse(text), own) for label, text in ranking.schemes.items()}
    advice = {each: _advice(ranking, each) for each in GOALS}
    best = advice[goal]
    runtimes = []
    for runtime in recommended():
        names = [s for s in ranking.schemes if runtime.name in served.get(s, ())]
        runtimes.append(_for_runtime(ranking, goal, runtime.name, runtime.title, names, best))
    return Recommendation(
        goal,
        best,
        tuple(runtimes),
        tuple(advice[each] for each in GOALS if each != goal),
        _smallest_factor(ranking) if goal == CONTEXT_GOAL else None,
        best.label not in (None, ranking.own),
        ranking.effective_length,
        tuple(ranking.forgets),
    )


TITLES = {
    CONTEXT_GOAL: "for a longer context",
    STREAM: "to stream without end",
    SHORT: "inside the window",
}


def _advice(ranking: Ranking, goal: str) -> Advice:
    """What to use for a goal, of all methods."""
    first = next(iter(ranking.ordered(goal)), None)
    if first is None:
        return _nothing(ranking, goal)
    numbers = ranking.numbers(first, goal)
    if first == ranking.own:
        begin = f"Change nothing, the baseline uses {ranking.length:,} tokens already"
    else:
        far = ranking.length != ranking.target and goal != SHORT
        begin = f"Use {first} {TITLES[goal]}"
        begin += f", though nothing reached {ranking.target:,}" if far else ""
    sentence = f"{begin}. {describe(numbers)}"
    return Advice(goal, first, ranking.schemes[first], sentence, numbers)


def _nothing(ranking: Ranking, goal: str) -> Advice:
    """Why no method qualifies, what was reached, and what would help."""
    own, numbers = ranking.own, ranking.numbers(ranking.own, goal)
    at = f"{ranking.length:,} tokens"
    if goal == STREAM:
        sentence = "No method that was measured streams: name one with --methods streaming."
        return Advice(goal, None, None, sentence, numbers)
    if goal == SHORT:
        sentence = "Change nothing inside the window: no method keeps significantly more there."
        scheme = None if own is None else ranking.schemes[own]
        return Advice(goal, own, scheme, sentence, numbers)
    reached = ranking.effective_length
    furthest = max(reached, key=lambda s: (reached[s], s == own), default=None)
    if furthest is None:
        why = f"No method is shown to use {at} of context"
        return Advice(goal, None, None, f"{why}: kept context has no numbers there.", numbers)
    sentence = (
        f"No method uses {at} of context: none keeps a share above zero (95 % CI) at a sane loss. "
        f"The longest effective length is {reached[furthest]:,} tokens, by {furthest}. Training "
        f"helps (`longitude tune`), or read the text in windows (`longitude read --by nbce`)."
    )
    return Advice(goal, None, None, sentence, numbers)


def _for_runtime(
    ranking: Ranking, goal: str, name: str, title: str, names: Sequence[str], best: Advice
) -> Advice:
    """The best that a runtime can serve unchanged, and what is lost against the best of all."""
    first = next((s for s in ranking.ordered(goal, names) if s != ranking.own), None)
    if first is None:
        numbers = ranking.numbers(ranking.own, goal)
        sentence = f"Nothing that {title} can serve unchanged qualifies {TITLES[goal]}."
        return Advice(name, ranking.own, None, sentence, numbers)
    numbers = ranking.numbers(first, goal)
    sentence = f"{title} can serve {first} unchanged. {describe(numbers, brief=True)}"
    if best.label not in (first, None):
        lost = [
            f"{_percent(theirs['kept'])} of far context kept"
            for theirs in (best.numbers,)
            if theirs["kept"]
        ]
        lost += [f"effective length {n:,}" for n in (best.numbers["effective_length"],) if n]
        sentence += f" The best of all, {best.label}: {', '.join(lost)}." if lost else ""
    return Advice(name, first, ranking.schemes[first], sentence, numbers)


# sentences


def describe(numbers: Mapping[str, Any], *, brief: bool = False) -> str:
    """The numbers in sentences: how much is kept, how far, what is answered, at which price."""
    is_baseline, at = numbers["label"] == numbers["own"], f"{numbers['length']:,} tokens"
    past, trained = numbers["length"] > numbers["trained"], f"{numbers['trained']:,}"

    def said(name: str, text: str, show: Callable[[Any], str], when: bool = True) -> str:
        return text.format(show(numbers[name])) if when and numbers[name] else ""

    full, other = not brief, not brief and not is_baseline
    loss = "Loss {}" if numbers["kept"] else f"At {at} the loss is {{}}"
    sentences = (
        said("kept", f"At {at} it keeps {{}} of far context", _share)
        + said("window_kept", f"; the baseline {{}} at its window of {trained}", _percent, past)
        + said("baseline_kept", "; the baseline {}", _share, not past and not is_baseline),
        said("effective_length", "Effective length {} tokens", "{:,}".format),
        said("retrieval", "It answers {} of the questions exactly", _share, full)
        + said("passkey", " and retrieves {} of passkeys", _share, full),
        said("value", loss, _loss)
        + said("baseline", "; baseline {}", _loss, other)
        + said("window", ", {} at its window", _loss, other and past),
        said("in_window_cost", "In-window cost {}", _change, full),
        said("speed", "Prefill {}× baseline speed", "{:.2f}".format, not is_baseline)
        + said("speed_range", " ({})", _range, not is_baseline),
        said("alike", "Not significantly different: {}", ", ".join, full),
    )
    return "".join(f"{sentence}. " for sentence in sentences if sentence).rstrip()


def _range(ends: Sequence[float]) -> str:
    return "–".join(f"{end:.2f}" for end in ends)


def _percent(value: Mapping[str, float]) -> str:
    return f"{100 * value['mean']:.0f} %"


def _share(value: Mapping[str, float]) -> str:
    low, high = f"{100 * value['low']:.0f}", f"{100 * value['high']:.0f}"
    return _percent(value) + _interval(value, low, high, " to " if value["low"] < 0 else "–")


def _loss(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f}" + _interval(value, f"{value['low']:.3f}", f"{value['high']:.3f}")


def _change(value: Mapping[str, float]) -> str:
    low, high = f"{value['low']:+z.3f}", f"{value['high']:+z.3f}"  # z: no -0.000
    return f"{value['mean']:+z.3f} nats per token" + _interval(value, low, high, " to ")


def _interval(value: Mapping[str, float], low: str, high: str, dash: str = "–") -> str:
    return " (one document)" if value["n"] < 2 else f" (95 % CI {low}{dash}{high})"


def _smallest_factor(ranking: Ranking) -> Advice | None:
    """The smallest sufficient factor of the best kind of frequency scaling that was measured with
    several: the least that is not significantly worse than the best of its kind. Only methods that
    qualify count; None where no kind has several that do."""
    kinds: dict[Scheme, dict[float, str]] = {}
    for label in ranking.ordered(CONTEXT_GOAL):
        scheme = parse(ranking.schemes[label])
        if not isinstance(scheme, Scheme) or scheme.rotary is None:
            continue
        frequencies: Any = scheme.rotary.frequencies
        factor = getattr(frequencies, "factor", None)
        if factor is not None:
            bare = replace(scheme.rotary, frequencies=replace(frequencies, factor=1))
            kinds.setdefault(replace(scheme, rotary=bare), {})[float(factor)] = label
    several = next((factors for factors in kinds.values() if len(factors) > 1), None)
    if several is None:
        return None
    best, *others = several.values()  # in the order of their ranks
    at = ranking.length
    enough = [best, *(s for s in others if not ranking.compared(s, best, at)[1])]
    least = min(factor for factor, label in several.items() if label in enough)
    numbers = ranking.numbers(several[least])
    answers = numbers["retrieval"]
    if answers is not None and answers["mean"] == 0:
        return None
    tried = ", ".join(f"{factor:g}" for factor in sorted(several))
    begin = f"A factor of {least:g} is enough ({several[least]}, of the factors {tried})"
    sentence = f"{begin}. {describe(numbers, brief=True)}"
    return Advice("factor", several[least], ranking.schemes[several[least]], sentence, numbers)
