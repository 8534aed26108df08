"""Which method to use, for a goal: judged by whether a longer context is used.

**Effective length** of a method: the longest measured length at which it keeps at least the share
of context that the baseline keeps at the end of its own window, and its loss is sane: within half a
nat of the baseline's in its window. With a loss beyond that, a share means nothing.

**context** (the default goal): candidates are the methods whose kept share at the target is above
zero with 95 % confidence and whose loss there is sane. Those whose effective length is the target
come first; among these, those that stayed in the race and so are known from the most documents;
then the best mean rank over three groups: kept context; the answers' loss, family by family; the
loss past the window. Methods that are not significantly different share a rank, so that a
thousandth of a nat decides nothing. Ties go to the better mean rank by means alone, then to the
lower in-window cost, then to the faster prefill. A baseline that qualifies and is not significantly
different from the first is preferred. A method that keeps nothing "forgets" and is never
recommended for this goal.

**stream**: endless fluent text in constant memory. Candidates are the methods that hide everything
beyond a window and have a sane loss; the lowest loss past the window wins.

**short**: the best use of the context inside the window. Candidates are the methods that keep
significantly more than the baseline at the end of its window, at an in-window cost of next to
nothing; the best mean rank there wins.

Every comparison is paired, on the same documents and questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
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
from longitude.eval.tables import SANE, Results, labels, relative_speed, results
from longitude.eval.tasks import metrics

NEXT_TO_NOTHING = 0.02  # nats per token of in-window cost
CONTEXT_GOAL, STREAM, SHORT = GOALS = ("context", "stream", "short")


def hidden_beyond(scheme: Scheme | Layers, length: int) -> int | None:
    """The distance beyond which every layer hides all keys from the last query, except the first
    few (attention sinks); None if some layer sees the full text."""
    query, keys = torch.tensor(length - 1), torch.arange(length)
    windows = []
    for layer in set(scheme.schemes):
        is_visible = visible(layer.areas(), query, keys)
        hidden = (~is_visible).nonzero().flatten()
        if not len(hidden):
            return None
        window = length - 1 - int(hidden[-1])  # keys visible up to the query without a gap
        sinks = int(hidden[0])
        beyond = int(is_visible[: int(hidden[-1])].sum())
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
        named, subject, all_metrics = labels(rows), rows[0].key.subject, metrics()
        self.rows, self.target = rows, target
        self.schemes = {label: scheme for scheme, label in named.items()}
        self.trained, self.own = subject.trained, named.get(subject.scheme)
        self.results = {name: results(rows, metric, named) for name, metric in all_metrics.items()}
        by_family: dict[str, list[Measurement]] = {}
        for row in of(rows, RETRIEVAL):
            by_family.setdefault(str(row.key.at["family"]), []).append(row)
        self.families = {
            family: results(of_family, all_metrics[ANSWER_LOSS], named)
            for family, of_family in sorted(by_family.items())
        }
        self.passkeys = results(by_family.get(PASSKEY, ()), all_metrics[RETRIEVAL], named)
        measured = [n for m in (KEPT, ANSWER_LOSS, CONTEXT, LOSS) for n in self.results[m].lengths]
        self.length = max((n for n in measured if self.trained < n <= target), default=target)
        self.windowed = [s for s, text in self.schemes.items() if windowed(text, target)]

    def length_for(self, goal: str) -> int:
        """The length at which methods are compared for a goal."""
        return self.trained if goal == SHORT else self.length

    # what was measured

    def value(self, measure: str, label: str | None, length: int) -> Interval | None:
        numbers = self.results[measure]
        known = label is not None and (label, length) in numbers.numbers
        return numbers.interval((str(label), length)) if known else None

    def loss(self, label: str | None, length: int) -> Interval | None:
        """The loss of the last tokens of this much text, or else of its first `length` tokens."""
        return self.value(CONTEXT, label, length) or self.value(LOSS, label, length)

    def sane(self, label: str, length: int) -> bool:
        """Whether the loss is within half a nat of the baseline's in its window."""
        here, own = self.loss(label, length), self.loss(self.own, self.trained)
        return here is not None and (own is None or here.mean <= own.mean + SANE)

    def keeps(self, label: str, length: int) -> bool:
        """Whether the kept share is above zero with 95 % confidence; if no share was measured,
        whether the scheme can keep anything at all."""
        kept = self.value(KEPT, label, length)
        if kept is None:
            return not self.results[KEPT].numbers and label not in self.windowed
        return kept.n > 1 and kept.low > 0

    @property
    def forgets(self) -> list[str]:
        """The methods that keep nothing at the target: their interval includes zero and lies below
        half of what the baseline keeps at the end of its window. A scheme with a window counts
        unless its share is above zero."""
        own = self.value(KEPT, self.own, self.trained)

        def nothing(label: str) -> bool:
            kept = self.value(KEPT, label, self.length)
            little = kept is not None and own is not None and kept.high < own.mean / 2
            return little or label in self.windowed

        return [s for s in self.schemes if not self.keeps(s, self.length) and nothing(s)]

    @property
    def effective_length(self) -> dict[str, int]:
        """Effective lengths in tokens, by label; 0 if no measured length meets the definition."""
        baseline = self.value(KEPT, self.own, self.trained)
        if baseline is None or baseline.mean <= 0:
            return {}
        window, kept = (str(self.own), self.trained), self.results[KEPT]
        reached = dict.fromkeys(self.schemes, 0)
        for label, length in kept.numbers:
            gain = kept.difference((label, length), window)  # on the same documents
            if gain is not None and gain.mean >= 0 and self.sane(label, length):
                reached[label] = max(reached[label], length)
        return reached

    def in_window_cost(self, label: str | None) -> Interval | None:
        """The loss inside the window minus the baseline's."""
        inside = [n for _, n in self.results[LOSS].numbers if n <= self.trained]
        if label is None or label == self.own or not inside:
            return None
        at = max(inside)
        return self.results[LOSS].difference((label, at), (str(self.own), at))

    # how methods compare

    def groups(self, length: int) -> dict[str, list[Results]]:
        """The groups of results that methods are ranked by at a length."""
        groups = {
            "kept context": [self.results[KEPT]],
            "answers": [*self.families.values()],
            "loss": [self.results[n] for n in self._losses(length)],
        }
        measured = {name: [r for r in each if length in r.lengths] for name, each in groups.items()}
        return {name: each for name, each in measured.items() if each}

    def _losses(self, length: int) -> tuple[str, ...]:
        return (LOSS,) if length <= self.trained else (PAST_WINDOW, CONTEXT)

    def mean_ranks(
        self, names: Iterable[str], length: int, groups: Mapping[str, Sequence[Results]],
        clear: bool = True,
    ) -> dict[str, float]:  # fmt: skip
        """The mean over groups of the mean rank in a group. A rank is 1 plus the number of methods
        ahead; equal ones (with `clear`: not significantly different ones) count as a half."""
        names = [*names]

        def behind(one: Results, a: str, b: str) -> float:
            if (b, length) not in one.numbers:  # a missing number ranks last
                return 0.0 if (a, length) in one.numbers else 0.5
            if (a, length) not in one.numbers:
                return 1.0
            gap = one.difference((a, length), (b, length))
            if gap is None or gap.mean == 0 or (clear and not gap.clear):
                return 0.5
            return 0.0 if (gap.mean < 0) == one.metric.lower_is_better else 1.0

        def rank(one: Results, label: str) -> float:
            return 1 + sum(behind(one, label, other) for other in names if other != label)

        each = groups.values()
        return {
            s: fmean(fmean(rank(one, s) for one in group) for group in each) if groups else 0.0
            for s in names
        }

    def candidates(self, goal: str) -> list[str]:
        """The methods that qualify for a goal."""
        names, at = self.schemes, self.length
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
        """The methods that qualify for a goal, best first; with `names` only those, in their order
        among all."""
        qualified, at = self.candidates(goal), self.length_for(goal)
        groups = self.groups(at)
        if goal == STREAM:
            groups = {name: group for name, group in groups.items() if name == "loss"}
        ranks, by_means = (self.mean_ranks(qualified, at, groups, clear) for clear in (True, False))
        reached = self.effective_length if goal == CONTEXT_GOAL else {}
        known = {s: kept.n if (kept := self.value(KEPT, s, at)) else 0 for s in qualified}

        def place(label: str) -> tuple[bool, bool, float, float, float, float, int]:
            cost, speed = self.in_window_cost(label), relative_speed(self.rows, label, self.length)
            return (
                reached.get(label, 0) < at,
                known[label] < max(known.values()),  # it left the race before the others
                round(ranks[label], 9),
                round(by_means[label], 9),
                cost.mean if cost else 0.0,
                -speed.mean if speed else 0.0,
                len(self.schemes[label]),
            )

        chosen = {*(qualified if names is None else names)}
        order = sorted((label for label in qualified if label in chosen), key=place)
        if self.own in order and not any(self.compared(order[0], self.own, at)):
            order = [self.own, *(s for s in order if s != self.own)]  # nothing shows a difference
        return order

    def compared(self, a: str, b: str, length: int) -> tuple[set[str], set[str]]:
        """The measures by which a is significantly better than b, and those by which worse."""
        better, worse = set(), set()
        for name in (KEPT, ANSWER_LOSS, *self._losses(length)):
            gap = self.results[name].difference((a, length), (b, length))
            if gap is not None and gap.clear:
                ahead = (gap.mean < 0) == self.results[name].metric.lower_is_better
                (better if ahead else worse).add(name)
        return better, worse

    def alike(self, label: str, goal: str) -> list[str]:
        """The other candidates that are not significantly different by any measure."""
        others = (s for s in self.candidates(goal) if s != label)
        return [s for s in others if not any(self.compared(s, label, self.length_for(goal)))]

    def undecided(self, label: str | None) -> list[str]:
        """The methods that keep more at the target than `label` (None: than nothing) but not
        significantly above zero, so that more documents could make them candidates. They are
        sorted by what they keep, the most first."""
        kept = {s: self.value(KEPT, s, self.length) for s in self.schemes}
        own, known = kept.get(str(label)), self.candidates(CONTEXT_GOAL)
        means = {s: k.mean for s, k in kept.items() if k and k.mean > (own.mean if own else 0)}
        open_methods = [s for s in means if s not in known and self._may_qualify(s, CONTEXT_GOAL)]
        return sorted(open_methods, key=means.__getitem__, reverse=True)

    def in_race(self, goal: str) -> list[str]:
        """The methods that may still turn out to be the best, and always the baseline. Left out are
        those that use the context significantly less than the leader (kept context or answers) and
        are better by no measure."""
        first, at, left = self.ordered(goal)[:1], self.length_for(goal), []
        for label in self.schemes:
            better, worse = self.compared(label, first[0], at) if first else (set(), set())
            beaten = worse & {KEPT, ANSWER_LOSS} and not better
            if label == self.own or (self._may_qualify(label, goal) and not beaten):
                left.append(label)
        return left

    def _may_qualify(self, label: str, goal: str) -> bool:
        """Whether more documents could make a method a candidate."""
        if goal == STREAM:
            return label in self.windowed
        if goal == SHORT:
            cost = self.in_window_cost(label)
            return cost is None or cost.n < 2 or cost.low <= NEXT_TO_NOTHING
        kept = self.value(KEPT, label, self.length)
        hopeless = kept is not None and kept.n > 1 and kept.high <= 0
        return label not in self.windowed and not hopeless and self.sane(label, self.length)

    def numbers(self, label: str | None, goal: str = CONTEXT_GOAL) -> dict[str, Any]:
        """All numbers that are reported about a method, as JSON types."""
        at = self.length_for(goal)
        place = (str(label), at)
        intervals = {
            "kept": self.value(KEPT, label, at),
            "window_kept": self.value(KEPT, self.own, self.trained),
            "retrieval": self.value(RETRIEVAL, label, at),
            "answer_loss": self.value(ANSWER_LOSS, label, at),
            "passkey": self.passkeys.interval(place) if place in self.passkeys.numbers else None,
            "value": self.loss(label, at),
            "past_window": self.value(PAST_WINDOW, label, at),
            "baseline": self.loss(self.own, at),
            "baseline_kept": self.value(KEPT, self.own, at),
            "window": self.loss(self.own, self.trained),
            "in_window_cost": self.in_window_cost(label),
        }
        speed, decode_speed = (
            relative_speed(self.rows, str(label), at, field) for field in ("speed", "decode_speed")
        )
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
            "decode_speed": decode_speed and decode_speed.mean,
            "decode_speed_range": decode_speed and [decode_speed.low, decode_speed.high],
            "alike": self.alike(label, goal) if label is not None else [],
        }
