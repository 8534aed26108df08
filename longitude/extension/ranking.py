"""The case of one model: its numbers, and the questions by which one method is chosen.

Methods are compared at the target, by one question after another:

1. the loss of the same last tokens with the whole target before them (or, where that was not
   measured, the loss of the first tokens up to the target);
2. the share of passkeys told at all lengths past the trained window, up to the target;
3. the loss inside the trained window, which an extension should not raise;
4. prefill, where one method is much faster than another.

A method helps if it is better than the model as it is at question 1, or alike there and better at
question 2; no other is ever advised. Of those that help, each question keeps the ones that are
alike to the best that is left, and in the end the lowest loss of question 1 decides, then the
shorter scheme.

Two are alike when the 95 % interval of their paired difference holds zero, or when they are less
than 1 % apart, which nobody would notice; with one document, by the 1 % alone. What has no number
at a question (it was refused, or ran out of memory, or out of the budget) is left out if others
have one, so what was refused at the target is never the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from longitude.eval.records import PASSKEY, Measurement, of
from longitude.eval.results import KINDS, labels, sheet
from longitude.eval.stats import Interval

NOTICED = 0.01  # of a number: what is closer is alike
FASTER = 1.25  # how many times as fast is worth another scheme: timings vary by less
LOSSES = ("context", "loss")
PAST = "past"  # the sheet of all passkeys past the window


class Case:
    """What was measured of one model, for a target."""

    def __init__(self, found: Sequence[Measurement], target: int) -> None:
        named = labels(found)
        subject = found[0].key.subject
        self.target = target
        self.schemes = {label: scheme for scheme, label in named.items()}
        self.trained, self.own = subject.trained, named.get(subject.scheme)
        self.sheets = {
            name: sheet(of(found, kind.measure), kind, named) for name, kind in KINDS.items()
        }
        past = [one for one in found if self.trained < one.key.length <= target]
        self.sheets[PAST] = sheet(_at_once(of(past, PASSKEY), target), KINDS[PASSKEY], named)
        lengths = {
            name: [n for _, n in self.sheets[name].numbers if self.trained < n <= target]
            for name in (*LOSSES, "passkey")
        }
        self.measure = next((name for name in lengths if lengths[name]), "context")
        self.length = max(lengths[self.measure], default=target)

    def value(self, measure: str, label: str | None, length: int) -> Interval | None:
        """A method's number, if there is one."""
        known = label is not None and (label, length) in self.sheets[measure].numbers
        return self.sheets[measure].interval((str(label), length)) if known else None

    def here(self, label: str | None) -> Interval | None:
        """A method's number at the first question."""
        return self.value(self.measure, label, self.length)

    def choice(self, names: Iterable[str]) -> str | None:
        """The one to use among these, or None where none of them helps."""
        left = [s for s in names if self.helps(s)]
        for measure, length in self._questions():
            left = self.best(left, measure, length)
        left = self._fast(left)
        return min(left, key=lambda s: (self._loss(s), len(self.schemes[s])), default=None)

    def helps(self, label: str) -> bool:
        """Whether a method does at the target what the model as it is does not."""
        if label == self.own or not self.here(label):
            return False
        if not self.here(self.own):
            return True
        for measure, length in self._questions()[:2]:
            means = self.sheets[measure].means((label, str(self.own)), length)
            if len(means) == 2 and not self.alike(measure, label, str(self.own), length):
                return self.sheets[measure].best(means) == label
        return False

    def reaches(self) -> bool:
        """Whether the model as it is does at the target what it does at its window."""
        here, window = ((str(self.own), n) for n in (self.length, self.trained))
        gap = self.sheets[self.measure].difference(here, window)
        if gap is None:
            return False
        worse = gap.mean if KINDS[self.measure].lower_is_better else -gap.mean
        return worse <= NOTICED * self.sheets[self.measure].interval(window).mean

    def best(self, names: list[str], measure: str, length: int) -> list[str]:
        """The best at a question and those alike to it; all of them where none has a number."""
        means = self.sheets[measure].means(names, length)
        first = self.sheets[measure].best(means)
        if first is None:
            return names
        return [s for s in means if s == first or self.alike(measure, s, first, length)]

    def alike(self, measure: str, a: str, b: str, length: int) -> bool:
        """Whether two can't be told apart, or no one would notice."""
        ours, theirs = self.sheets[measure].means((a, b), length).values()
        if abs(ours - theirs) <= NOTICED * max(abs(ours), abs(theirs)):
            return True
        gap = self.sheets[measure].difference((a, length), (b, length))
        return gap is not None and gap.n > 1 and not gap.clear

    def numbers(self, label: str | None) -> dict[str, Any]:
        """Everything that is told of a method, in JSON's own types."""
        own, known = self.own, label is not None and self.here(label) is not None
        told = {
            "value": self.here(label),
            "untouched": self.here(own),
            "window": self.value(self.measure, own, self.trained),
            "over": self._over(self.measure, label, self.length),
            "passkey": self.value("passkey", label, self.length),
            "tax": self._over("loss", label, self._inside()),
        }
        alike = [
            s
            for s in self.schemes
            if known and s != label and self.here(s) and self._first_alike(s, str(label))
        ]
        plain = {name: one and asdict(one) for name, one in told.items()}
        where = {"label": label, "own": own, "measure": self.measure, "length": self.length}
        where |= {"target": self.target, "trained": self.trained}
        return {**where, **plain, "speed": self._speed(label), "alike": alike}

    def _questions(self) -> list[tuple[str, int]]:
        return [
            (self.measure, self.length),
            (PAST, self.target),
            ("loss", self._inside()),
        ]

    def _first_alike(self, a: str, b: str) -> bool:
        return self.alike(self.measure, a, b, self.length)

    def _inside(self) -> int:
        """The greatest length in the trained window that losses were taken at."""
        known = [n for _, n in self.sheets["loss"].numbers if n <= self.trained]
        return max(known, default=self.trained)

    def _over(self, measure: str, label: str | None, length: int) -> Interval | None:
        """How far a method is from the model as it is."""
        if label is None or label == self.own:
            return None
        return self.sheets[measure].difference((label, length), (str(self.own), length))

    def _fast(self, names: list[str]) -> list[str]:
        speeds = {s: v.mean for s in names if (v := self.value("prefill", s, self.length))}
        slow = [s for s, speed in speeds.items() if speed * FASTER < max(speeds.values())]
        return [s for s in names if s not in slow]

    def _speed(self, label: str | None) -> float | None:
        """Prefill, in that of the model as it is."""
        ours, own = (self.value("prefill", s, self.length) for s in (label, self.own))
        return ours.mean / own.mean if ours and own else None

    def _loss(self, label: str) -> float:
        value = self.here(label) if self.measure in LOSSES else None
        return value.mean if value else 0.0


def _at_once(found: Iterable[Measurement], target: int) -> list[Measurement]:
    """Questions of several lengths as of one: five at each of three tell more than five do."""
    return [
        replace(
            one,
            key=replace(one.key, length=target, at={**one.key.at, "length": one.key.length}),
        )
        for one in found
    ]
