"""Whether answers agree: of one server with itself, and of two probes with the same prompts.

Determinism and isolation: a prompt that is new to the server is sent, sent again (its prefix is
cached now, if the server caches), and sent at the same time as other prompts, each with a different
pass key. Temperature is 0: answers and log-probabilities should agree, and no answer may contain
the key of another prompt.

Drift: correct answers are compared question by question with an exact sign test over all lengths
(McNemar's, by the binomial distribution): a single test, so that many lengths raise no false alarm.
Log-probabilities of first tokens are compared in nats.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from statistics import fmean
from typing import Any

from longitude.core.validate import UserError
from longitude.eval.stats import matched
from longitude.probing.endpoint import NEW, Endpoint, Request, difference, haystack, with_marker

BESIDE = 3  # other prompts sent at the same time
REQUESTS = 3 + BESIDE  # sent at each length
KEYS = range(10_000, 50_001)
SIGNIFICANT = 0.05
LARGE_GAP = 0.1  # nats: kernels and batching cause less
NONE_SHARED = 10.0  # nats, if two lists of likeliest tokens share none


@dataclass(frozen=True)
class Repeated:
    """Answers to one prompt of one length: how far they are apart in nats, None if they share no
    token whose log-probabilities could be compared."""

    length: int
    again: float | None  # when sent again
    beside: float | None  # when sent beside others
    texts_differ: bool
    mixed_up: tuple[str, ...] = ()  # other prompts' keys in an answer


def repeat(endpoint: Endpoint, lengths: Sequence[int], seed: int) -> list[Repeated]:
    """Send one prompt three times at each length, the third time beside others."""
    results = []
    for length in lengths:
        rng = random.Random(f"repeat {seed} {length}")
        hay = haystack(endpoint, length)
        keys = rng.sample(KEYS, BESIDE + 1)
        prompts = [with_marker(hay, rng.random(), key) for key in keys]
        what = f"determinism, {length:,} tokens"
        first, again = (endpoint.ask_all([Request(prompts[0], NEW, n)], what)[0] for n in (2, 3))
        together = [Request(prompt, NEW, 4) for prompt in prompts]
        beside, *others = endpoint.ask_all(together, what, at_once=len(together))
        if any(answer.refused for answer in (first, again, beside, *others)):
            continue
        leaked = [
            str(other)
            for key, answer in zip(keys, (beside, *others), strict=True)
            for other in keys
            if other != key and str(other) in answer.text
        ]
        gaps = (difference(first, again), difference(first, beside))
        in_nats, in_nats_beside = (gap if math.isfinite(gap) else None for gap in gaps)
        differ = len({first.text, again.text, beside.text}) > 1
        results.append(Repeated(length, in_nats, in_nats_beside, differ, tuple(leaked)))
    return results


@dataclass(frozen=True)
class Change:
    """Changes at one length: questions won and lost, and how far first tokens are apart."""

    length: int
    questions: int
    won: int
    lost: int
    low: float  # of the difference of shares, at 95 %
    high: float
    gap: float | None  # nats, the mean over questions


@dataclass(frozen=True)
class Drift:
    """What changed from an earlier probe, or from the first server to the second."""

    before: str  # name of the probe compared with
    changes: tuple[Change, ...]
    p: float  # of the sign test over all lengths
    ends: tuple[Any, Any]  # (kind, limit) of the input, before and now
    gap: float | None  # nats

    @property
    def significant(self) -> bool:
        return self.p < SIGNIFICANT

    @property
    def other_end(self) -> bool:
        """Whether input ends elsewhere, by more than the resolution of the search."""
        (kind, limit), (new_kind, new_limit) = self.ends
        far = bool(limit and new_limit and abs(limit - new_limit) > 0.05 * max(limit, new_limit))
        return kind != new_kind or far

    @property
    def changed(self) -> bool:
        """Whether the two probes differ."""
        return self.significant or self.other_end or (self.gap or 0.0) > LARGE_GAP

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "significant": self.significant, "changed": self.changed}


def sign_test(won: int, lost: int) -> float:
    """The probability that fair coins fall at least as unevenly (two-sided)."""
    n, least = won + lost, min(won, lost)
    tail = sum(comb(n, k) for k in range(least + 1)) / 2**n
    return min(1.0, 2 * tail)


def compare(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Drift:
    """Compare two probes of the same prompts, given as JSON."""
    old, new = (_by_place(item) for item in (before, now))
    shared = [place for place in new if place in old]
    if not shared:
        raise UserError(
            f"{name} has no question in common with this probe: probe with the same --to, --tasks "
            f"and --seed, or save it again."
        )
    changes, gaps = [], []
    for length in sorted({place[1] for place in shared}):
        pairs = [(old[place], new[place]) for place in shared if place[1] == length]
        was, now_is = ([float(item["exact"]) for item in side] for side in zip(*pairs, strict=True))
        won = sum(b > a for a, b in zip(was, now_is, strict=True))
        lost = sum(b < a for a, b in zip(was, now_is, strict=True))
        tops = [(a["top"], b["top"]) for a, b in pairs if a["top"] and b["top"]]
        differences = [
            max((abs(a[t] - b[t]) for t in a.keys() & b), default=NONE_SHARED) for a, b in tops
        ]
        gaps += differences
        interval = matched(now_is, was)
        mean = fmean(differences) if differences else None
        changes.append(Change(length, len(pairs), won, lost, interval.low, interval.high, mean))
    p = sign_test(sum(c.won for c in changes), sum(c.lost for c in changes))
    was, is_now = ((item["input"]["kind"], item["input"]["limit"]) for item in (before, now))
    return Drift(name, tuple(changes), p, (was, is_now), fmean(gaps) if gaps else None)


def _by_place(probe: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    try:
        rows = probe["reach"]["questions"]
        _ = probe["input"]["kind"], probe["input"]["limit"]
        return {(r["family"], r["length"], r["depth"], r["index"]): r for r in rows}
    except (KeyError, TypeError):
        raise UserError("this is no saved probe: write one with longitude probe --save.") from None
