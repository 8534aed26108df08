"""Determinism and isolation: the same prompt again, with a warm prefix cache, and beside others.

A prompt that the server has not seen is sent, sent again (its prefix is cached now, if the server
caches), and sent at the same time as others, each with a pass key of its own. Temperature is 0:
answers and log-probabilities should agree, and no answer may hold the key of another prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longitude.probing.endpoint import Endpoint, Request, apart
from longitude.probing.prompts import KEYS, NEW, haystack, with_marker

BESIDE = 3  # other prompts at the same time
REQUESTS = 3 + BESIDE  # at each length


@dataclass(frozen=True)
class Repeated:
    """One length: how far the answers are apart, in nats; None where their texts have nothing to
    compare."""

    length: int
    again: float | None
    beside: float | None
    texts_differ: bool
    mixed_up: tuple[str, ...] = ()  # keys of other prompts in an answer

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def repeat(endpoint: Endpoint, lengths: Sequence[int], seed: int) -> list[Repeated]:
    """Send one prompt three times at each length."""
    found = []
    for length in lengths:
        rng = random.Random(f"repeat {seed} {length}")
        hay = haystack(endpoint, length)
        keys = rng.sample(KEYS, BESIDE + 1)
        prompts = [with_marker(hay, rng.random(), key) for key in keys]
        what = f"determinism, {length:,} tokens"
        one, again = (endpoint.ask_all([Request(prompts[0], NEW, n)], what)[0] for n in (2, 3))
        together = [Request(prompt, NEW, 4) for prompt in prompts]
        beside, *others = endpoint.ask_all(together, what, at_once=len(together))
        if any(answer.refused for answer in (one, again, beside, *others)):
            continue
        mixed = [
            str(other)
            for key, answer in zip(keys, (beside, *others), strict=True)
            for other in keys
            if other != key and str(other) in answer.text
        ]
        found.append(
            Repeated(
                length,
                _nats(apart(one, again)),
                _nats(apart(one, beside)),
                len({one.text, again.text, beside.text}) > 1,
                tuple(mixed),
            )
        )
    return found


def _nats(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None
