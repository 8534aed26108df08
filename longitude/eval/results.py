"""The numbers of one measure as they were taken: by label and length, and there by document or
question, so that two methods are compared on what both were measured on.

What is asked twice counts once, with the younger answer; rows are of one model and one protocol.
Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longitude.eval.records import CONTEXT, COST, KEYS, LOSS, PASSKEY, VARIABLES, Measurement
from longitude.eval.stats import Interval, matched, over_documents, paired, share

NOISE = 0.05  # costs that are no further apart are tied
Unit = tuple[str, ...]  # a document or a question: what two methods are paired by
Numbers = dict[Unit, float]
Place = tuple[str, int]  # a label and a length


class Kind(NamedTuple):
    """What a board shows: which field of which rows, and how it is read."""

    measure: str
    field: str
    title: str
    unit: str
    lower_is_better: bool


KINDS = {
    "loss": Kind(LOSS, "means", "Loss of the first tokens", "nats a token", True),
    "context": Kind(CONTEXT, "loss", "Loss of the same last tokens", "nats a token", True),
    "passkey": Kind(PASSKEY, "right", "Passkeys told", "share", False),
    "keys": Kind(KEYS, "right", "One key of many told", "share", False),
    "variables": Kind(VARIABLES, "right", "Variables followed", "share", False),
    "prefill": Kind(COST, "prefill", "Prefill", "tokens a second", False),
    "decode": Kind(COST, "decode", "Decoding", "milliseconds a token", True),
    "memory": Kind(COST, "peak", "Peak memory", "bytes", True),
}


@dataclass
class Sheet:
    """The numbers of one board as they were measured, by document or question."""

    kind: Kind
    numbers: dict[Place, Numbers] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({length for _, length in {**self.numbers, **self.refused}}))

    def interval(self, place: Place) -> Interval:
        values = [*self.numbers[place].values()]
        return share(values) if self.kind.field == "right" else over_documents(values)

    def difference(self, a: Place, b: Place) -> Interval | None:
        """a less b on what both were measured on; None where that is nothing."""
        ours, theirs = self.numbers.get(a, {}), self.numbers.get(b, {})
        both = [each for each in ours if each in theirs]
        if not both:
            return None
        how = matched if self.kind.field == "right" else paired
        return how([ours[each] for each in both], [theirs[each] for each in both])

    def means(self, names: Iterable[str], length: int) -> dict[str, float]:
        """The means of those that have numbers: on what all of them were measured on, or each on
        its own where that is nothing."""
        known = {s: found for s in names if (found := self.numbers.get((s, length)))}
        shared = set.intersection(*map(set, known.values())) if known else set()
        kept = {
            s: [v for u, v in ns.items() if u in shared or not shared] for s, ns in known.items()
        }
        return {s: math.fsum(values) / len(values) for s, values in kept.items()}

    def best(self, means: Mapping[str, float]) -> str | None:
        """Whose mean is the best."""
        pick = min if self.kind.lower_is_better else max
        return pick(means, key=means.__getitem__, default=None)

    def tied(self, a: Place, b: Place) -> bool:
        """Whether two can't be told apart."""
        if self.kind.measure == COST:
            ours, theirs = self.interval(a).mean, self.interval(b).mean
            return abs(ours - theirs) <= NOISE * max(ours, theirs)
        gap = self.difference(a, b)
        return gap is None or not gap.clear


def labels(found: Iterable[Measurement]) -> dict[str, str]:
    """What each scheme is called, the untouched model first, then in order of first appearance.
    Two schemes under one label go by their written forms."""
    named: dict[str, str] = {}
    for one in sorted(found, key=lambda one: not one.is_baseline):
        named.setdefault(one.key.scheme, one.label)
    twice = [*named.values()]
    return {scheme: s if twice.count(s) == 1 else scheme for scheme, s in named.items()}


def sheet(rows: Sequence[Measurement], kind: Kind, names: Mapping[str, str]) -> Sheet:
    """The numbers of one kind, by label, length and document."""
    made = Sheet(kind)
    for name, one in answered(rows, names):
        for length, each, value in numbers(one, kind.field):
            made.numbers.setdefault((name, length), {})[each] = value
    for one in rows:
        if one.refused:
            _refuse(made, names[one.key.scheme], one)
    return made


def _refuse(made: Sheet, name: str, one: Measurement) -> None:
    """Enter a refusal where there are no numbers; a reading's is for all it would have told."""
    lengths = {one.key.length, *(made.lengths if made.kind.field == "means" else ())}
    for length in lengths:
        if length <= one.key.length and (name, length) not in made.numbers:
            made.refused[name, length] = str(one.refused)


def answered(
    found: Iterable[Measurement], names: Mapping[str, str]
) -> Iterator[tuple[str, Measurement]]:
    """The rows that have numbers, each with its label: the youngest of those that ask the same, and
    the shortest reading last, for its means to count. (A scheme that depends on the length of the
    whole is read once a length, and its longer readings say nothing about a shorter one.)"""
    last = {_question(one): one for one in sorted(found, key=lambda one: one.made)}
    return (
        (names[one.key.scheme], one)
        for one in sorted(last.values(), key=lambda one: -one.key.length)
        if not one.refused
    )


def _question(one: Measurement) -> tuple[str, str, int, Unit]:
    return one.key.measure, one.key.scheme, one.key.length, unit(one)


def unit(one: Measurement) -> Unit:
    """The document or the place in a grid, whatever method is asked."""
    text = one.key.text.digest if one.key.text else ""
    at = json.dumps(dict(one.key.at), sort_keys=True)
    return text, at, str(one.key.seed)


def numbers(one: Measurement, field: str) -> Iterator[tuple[int, Unit, float]]:
    """Length, document or question, and number: several in a row of answers or of means."""
    value, whole, length = one.value.get(field), unit(one), one.key.length
    if field == "means":
        yield from ((n, whole, mean) for n, mean in one.value["means"])
    elif field == "right":
        yield from ((length, (*whole, str(i)), float(r)) for i, r in enumerate(one.value["right"]))
    elif value is not None:
        yield length, whole, float(value)
