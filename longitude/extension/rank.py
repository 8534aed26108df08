"""Which method to use: the best of all, the best for each runtime, and the smallest factor.

Methods are compared at the target, by one criterion after another:

1. the loss of the same last tokens with the full target before them (or, where that was not
   measured, the loss of the first tokens up to the target);
2. the share of passkeys retrieved at all lengths past the trained window, up to the target;
3. the loss inside the trained window, which an extension should not raise;
4. prefill speed, where one method is much faster than another.

A method helps if it is better than the baseline by criterion 1, or alike there and better by
criterion 2; no other is ever recommended. Of those that help, each criterion keeps the ones that
are alike to the best that is left, and in the end the lowest loss of criterion 1 decides, then
the shorter scheme. Two are alike when the 95 % interval of their paired difference holds zero, or
when they are less than 1 % apart; with one document, by the 1 % only. What has no number (it was
refused, or ran out of memory or of the budget) is left out if others have one.

A scheme that hides every key beyond its window, other than sinks, forgets: it reads on for ever,
but its context is no longer. It is listed as such and never recommended for a longer context.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from longitude.core.region import visible
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import CONTEXT, LOSS, PASSKEY, Measurement, of
from longitude.eval.stats import Interval
from longitude.eval.tables import labels, prefill_speed, results
from longitude.eval.tasks import metrics
from longitude.runtimes import recommended
from longitude.runtimes.target import supporting

NEGLIGIBLE = 0.01  # relative difference below which two are alike
MUCH_FASTER = 1.25  # ratio that is worth another scheme: timings vary by less
PAST_WINDOW = "past"  # the passkeys of all lengths past the window


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


def forgets(scheme: str, own: str, length: int) -> bool:
    """Whether a scheme hides what lies beyond its window, where the model's own does not, or hides
    less."""
    try:
        window, before = (hidden_beyond(parse(text), length) for text in (scheme, own))
    except UserError:  # the name of a tuned model is no scheme
        return False
    return window is not None and (before is None or window < before)


class Ranking:
    """The measurements of one model for a target, and the criteria by which a method is chosen."""

    def __init__(self, rows: Sequence[Measurement], target: int) -> None:
        named, subject, every = labels(rows), rows[0].key.subject, metrics()
        self.rows, self.target = rows, target
        self.schemes = {label: scheme for scheme, label in named.items()}
        self.trained, self.own = subject.trained, named.get(subject.scheme)
        self.results = {name: results(rows, metric, named) for name, metric in every.items()}
        # questions of several lengths as of one: five at each of three say more than five do
        past = [
            replace(row, key=replace(k, length=target, at={**k.at, "length": k.length}))
            for row in of(rows, PASSKEY)
            if self.trained < (k := row.key).length <= target
        ]
        self.results[PAST_WINDOW] = results(past, every[PASSKEY], named)
        lengths = {
            name: [n for _, n in self.results[name].numbers if self.trained < n <= target]
            for name in (CONTEXT, LOSS, PASSKEY)
        }
        self.measure = next((name for name in lengths if lengths[name]), CONTEXT)
        self.length = max(lengths[self.measure], default=target)
        inside = [n for _, n in self.results[LOSS].numbers if n <= self.trained]
        self.inside = max(inside, default=self.trained)
        self.criteria = (
            (self.measure, self.length),
            (PAST_WINDOW, target),
            (LOSS, self.inside),
        )
        self.forgets = [
            label for label, text in self.schemes.items() if forgets(text, subject.scheme, target)
        ]

    def value(self, measure: str, label: str | None, length: int) -> Interval | None:
        """A method's value, if there is one."""
        known = label is not None and (label, length) in self.results[measure].numbers
        return self.results[measure].interval((str(label), length)) if known else None

    def at_target(self, label: str | None) -> Interval | None:
        """A method's value by the first criterion."""
        return self.value(self.measure, label, self.length)

    def choice(self, names: Iterable[str]) -> str | None:
        """The one to use among these, or None where none of them helps."""
        left = [s for s in names if s not in self.forgets and self.helps(s)]
        for measure, length in self.criteria:
            left = self.best(left, measure, length)
        speeds = {s: v.mean for s in left if (v := self._speed(s))}
        slow = [s for s, speed in speeds.items() if speed * MUCH_FASTER < max(speeds.values())]
        by_loss = self.measure != PASSKEY

        def place(label: str) -> tuple[float, int]:
            value = self.at_target(label)
            return value.mean if value and by_loss else 0.0, len(self.schemes[label])

        return min((s for s in left if s not in slow), key=place, default=None)

    def helps(self, label: str) -> bool:
        """Whether a method does at the target what the baseline does not."""
        if label == self.own or not self.at_target(label):
            return False
        if not self.at_target(self.own):
            return True
        for measure, length in self.criteria[:2]:
            means = self.results[measure].means((label, str(self.own)), length)
            if len(means) == 2 and not self.alike(measure, label, str(self.own), length):
                return self.results[measure].best(means) == label
        return False

    def baseline_suffices(self) -> bool:
        """Whether the baseline does at the target what it does at its window."""
        here, window = ((str(self.own), n) for n in (self.length, self.trained))
        numbers = self.results[self.measure]
        gap = numbers.difference(here, window)
        if gap is None:
            return False
        worse = gap.mean if numbers.metric.lower_is_better else -gap.mean
        return worse <= NEGLIGIBLE * numbers.interval(window).mean

    def best(self, names: list[str], measure: str, length: int) -> list[str]:
        """The best by a criterion and those alike to it; all of them where none has a number."""
        means = self.results[measure].means(names, length)
        first = self.results[measure].best(means)
        if first is None:
            return names
        return [s for s in means if s == first or self.alike(measure, s, first, length)]

    def alike(self, measure: str, a: str, b: str, length: int) -> bool:
        """Whether two are not significantly different, or negligibly so."""
        ours, theirs = self.results[measure].means((a, b), length).values()
        if abs(ours - theirs) <= NEGLIGIBLE * max(abs(ours), abs(theirs)):
            return True
        gap = self.results[measure].difference((a, length), (b, length))
        return gap is not None and gap.n > 1 and not gap.clear

    def numbers(self, label: str | None) -> dict[str, Any]:
        """Everything that is said of a method, in JSON's own types."""
        here = self.at_target(label)
        intervals = {
            "value": here,
            "untouched": self.at_target(self.own),
            "window": self.value(self.measure, self.own, self.trained),
            "over": self._over_baseline(self.measure, label, self.length),
            "passkey": self.value(PASSKEY, label, self.length),
            "tax": self._over_baseline(LOSS, label, self.inside),
        }
        speed = prefill_speed(self.rows, str(label), self.length)
        alike = [
            s
            for s in self.schemes
            if here and s != label and s not in self.forgets and self.at_target(s)
            if self.alike(self.measure, s, str(label), self.length)
        ]
        return {
            "label": label,
            "own": self.own,
            "measure": self.measure,
            "length": self.length,
            "target": self.target,
            "trained": self.trained,
            **{name: value and asdict(value) for name, value in intervals.items()},
            "speed": speed and speed.mean,
            "speed_range": speed and [speed.low, speed.high],
            "alike": alike,
        }

    def _speed(self, label: str) -> Interval | None:
        """Relative to the baseline, timed in the same rounds; tokens per second without one."""
        relative = prefill_speed(self.rows, label, self.length)
        return relative or self.value("prefill", label, self.length)

    def _over_baseline(self, measure: str, label: str | None, length: int) -> Interval | None:
        if label is None or label == self.own:
            return None
        return self.results[measure].difference((label, length), (str(self.own), length))


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
    """What the measurements recommend."""

    best: Advice
    runtimes: tuple[Advice, ...]
    factor: Advice | None
    helps: bool
    forgets: tuple[str, ...] = ()  # labels of methods that hide everything beyond their window

    def to_json(self) -> dict[str, Any]:
        """The content of recommendation.json."""
        return {
            **asdict(self),
            "runtimes": [asdict(one) for one in self.runtimes],
            "forgets": [*self.forgets],
        }


def recommend(
    rows: Sequence[Measurement], target: int, served: Mapping[str, Sequence[str]] | None = None
) -> Recommendation:
    """The recommendation of one model's rows for a target; `served` names by label the runtimes
    that can run a method unchanged (without it, as the schemes say)."""
    if not rows:
        raise UserError("There are no measurements to judge by: run some first.")
    ranking = Ranking(rows, target)
    if served is None:
        own = parse(rows[0].key.subject.scheme)
        served = {label: supporting(parse(text), own) for label, text in ranking.schemes.items()}
    best = ranking.choice(ranking.schemes)
    far = "" if ranking.length == target else f", though nothing reached {target:,}"
    overall = (
        _nothing(ranking, "best", "Nothing")
        if best is None
        else _use(ranking, "best", best, f"Use {best}{far}")
    )
    runtimes = []
    for runtime, title in ((r.name, r.title) for r in recommended()):
        label = ranking.choice(s for s in ranking.schemes if runtime in served.get(s, ()))
        runtimes.append(
            _nothing(ranking, runtime, f"Nothing that {title} can serve unchanged")
            if label is None
            else _use(ranking, runtime, label, f"{title} can serve {label} unchanged")
        )
    smallest = _smallest_factor(ranking)
    return Recommendation(
        overall, tuple(runtimes), smallest, best is not None, tuple(ranking.forgets)
    )


def _use(ranking: Ranking, what: str, label: str, begin: str) -> Advice:
    numbers = ranking.numbers(label)
    sentence = f"{begin}. {describe(numbers, what == 'best')}"
    return Advice(what, label, ranking.schemes[label], sentence, numbers)


def _nothing(ranking: Ranking, what: str, begin: str) -> Advice:
    """No method is better than the baseline; or none is needed, or none has a number."""
    numbers, own, at = ranking.numbers(ranking.own), ranking.own, f"{ranking.length:,} tokens"
    if own is None or not ranking.at_target(own):
        sentence = f"{begin} has a number at {at}, nor has the baseline."
        return Advice(what, None, None, sentence, numbers)
    begin = f"{begin} helps at {at}"
    if ranking.baseline_suffices():
        begin = f"Change nothing, the baseline reads {at} already"
    sentence = f"{begin}. {describe(numbers, True)}"
    return Advice(what, own, ranking.schemes[own], sentence, numbers)


# sentences


def describe(numbers: Mapping[str, Any], full: bool) -> str:
    """The numbers in sentences: how good, at which price; in full, compared with the baseline."""
    by_loss, is_baseline = numbers["measure"] != PASSKEY, numbers["label"] == numbers["own"]
    at = f"At {numbers['length']:,} tokens"
    if by_loss:
        first = "first" if numbers["measure"] == LOSS else "same last"
        sentence = f"{at} the loss of the {first} tokens is {_loss(numbers['value'])}"
    else:
        sentence = f"{at} it retrieves {_share(numbers['value'])}"
    show = _loss if by_loss else _share
    if full and numbers["untouched"] and not is_baseline:
        sentence += f"; baseline {show(numbers['untouched'])}"
    if full and numbers["window"]:
        own = "" if is_baseline else "the baseline's "
        sentence += f"; at {own}window of {numbers['trained']:,}: {show(numbers['window'])}"
    sentences = [sentence]
    if by_loss and numbers["passkey"]:
        sentences.append(f"It retrieves {_share(numbers['passkey'])}")
    if numbers["tax"]:
        sentences.append(f"In-window cost {_change(numbers['tax'])}")
    if numbers["speed"] and not is_baseline:
        low, high = (f"{x:.2f}" for x in numbers["speed_range"])
        spread = f" ({low}–{high})" if low != high else ""
        sentences.append(f"Prefill {numbers['speed']:.2f}× baseline speed{spread}")
    if full and not is_baseline and numbers["alike"]:
        sentences.append(f"Not significantly different: {', '.join(numbers['alike'])}")
    return ". ".join(sentences) + "."


def _loss(value: Mapping[str, float]) -> str:
    low, high = f"{value['low']:.3f}", f"{value['high']:.3f}"
    return f"{value['mean']:.3f}" + _interval(value, low, high)


def _share(value: Mapping[str, float]) -> str:
    low, high = f"{100 * value['low']:.0f}", f"{100 * value['high']:.0f}"
    return f"{100 * value['mean']:.0f} % of passkeys" + _interval(value, low, high)


def _change(value: Mapping[str, float]) -> str:
    low, high = f"{value['low']:+z.3f}", f"{value['high']:+z.3f}"  # z: no -0.000
    return f"{value['mean']:+z.3f} nats per token" + _interval(value, low, high, " to ")


def _interval(value: Mapping[str, float], low: str, high: str, dash: str = "–") -> str:
    return " (one document)" if value["n"] < 2 else f" (95 % CI {low}{dash}{high})"


def _smallest_factor(ranking: Ranking) -> Advice | None:
    """The smallest sufficient factor: the least that is alike to the best of its kind, for the best
    kind of frequency scaling that was measured with several; None where no kind was."""
    kinds: dict[Scheme, dict[float, str]] = {}
    for label, text in ranking.schemes.items():
        scheme = parse(text)
        if not isinstance(scheme, Scheme) or scheme.rotary is None or not ranking.at_target(label):
            continue
        frequencies: Any = scheme.rotary.frequencies
        factor = getattr(frequencies, "factor", None)
        if factor is None:
            continue
        bare = replace(scheme.rotary, frequencies=replace(frequencies, factor=1))
        kinds.setdefault(replace(scheme, rotary=bare), {})[float(factor)] = label
    several = [factors for factors in kinds.values() if len(factors) > 1]
    best = ranking.choice(label for factors in several for label in factors.values())
    if best is None:
        return None
    factors = next(each for each in several if best in each.values())
    helpful = [label for label in factors.values() if ranking.helps(label)]
    enough = ranking.best(helpful, ranking.measure, ranking.length)
    least = min(factor for factor, label in factors.items() if label in enough)
    tried = ", ".join(f"{factor:g}" for factor in sorted(factors))
    begin = f"A factor of {least:g} is enough ({factors[least]}, of the factors {tried})"
    return _use(ranking, "factor", factors[least], begin)
