"""Which method to use: the best of all, the best for each runtime, and the smallest factor.

`case` says how one is chosen. In short: the lowest loss of the same last tokens at the target;
among those that can't be told from the best, the most passkeys, then the lowest loss inside the
trained window, then speed. Where no method is better than the model as it is, the advice is to
change nothing. With several factors of one way to scale frequencies, the smallest sufficient one is
the least that is alike to the best of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import Measurement
from longitude.extension.ranking import Case
from longitude.runtimes.support import RUNTIMES

SPELT = {"vllm": "vLLM", "sglang": "SGLang"}  # as their makers write them
TOLD = {
    "context": "the loss of the same last tokens",
    "loss": "the loss of the first tokens",
    "passkey": "the share of passkeys told",
}


@dataclass(frozen=True)
class Advice:
    """What to use for what, in a sentence, with the numbers behind it; no label: nothing."""

    what: str
    label: str | None
    scheme: str | None
    sentence: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recommendation:
    """What the measurements advise."""

    best: Advice
    runtimes: tuple[Advice, ...]
    factor: Advice | None
    helps: bool

    def plain(self) -> dict[str, Any]:
        """As it stands in recommendation.json."""
        return {**asdict(self), "runtimes": [asdict(one) for one in self.runtimes]}


def recommend(
    found: Sequence[Measurement], target: int, served: Mapping[str, tuple[str, ...]]
) -> Recommendation:
    """The advice of one model's rows for a target; `served` says by label which runtimes can run a
    method as it is."""
    if not found:
        raise UserError("There are no measurements to judge by: run some first.")
    case = Case(found, target)
    best = case.choice(case.schemes)
    return Recommendation(
        _overall(case, best),
        tuple(_for(case, runtime, served) for runtime in RUNTIMES),
        _factor(case),
        best is not None,
    )


def _overall(case: Case, best: str | None) -> Advice:
    if best is not None:
        far = "" if case.length == case.target else f", though nothing reached {case.target:,}"
        return _use(case, "best", best, f"Use {best}{far}")
    return _nothing(case, "best", "Nothing")


def _for(case: Case, runtime: str, served: Mapping[str, tuple[str, ...]]) -> Advice:
    """The best that a runtime can serve as it is."""
    name = SPELT.get(runtime, runtime)
    label = case.choice(s for s in case.schemes if runtime in served.get(s, ()))
    if label is not None:
        return _use(case, runtime, label, f"{name} can serve {label} as it is")
    return _nothing(case, runtime, f"Nothing that {name} can serve as it is")


def _use(case: Case, what: str, label: str, begin: str) -> Advice:
    numbers = case.numbers(label)
    sentence = f"{begin}: {story(numbers, what == 'best')}."
    return Advice(what, label, case.schemes[label], sentence, numbers)


def _nothing(case: Case, what: str, begin: str) -> Advice:
    """No method is better than none; or none is needed, or known."""
    numbers, own, at = case.numbers(case.own), case.own, f"{case.length:,} tokens"
    if own is None or not case.here(own):
        sentence = f"{begin} has a number at {at}, nor has the model as it is."
        return Advice(what, None, None, sentence, numbers)
    begin = f"{begin} helps at {at}"
    if case.reaches():
        begin = f"Change nothing, the model as it is reads {at} already"
    return Advice(what, own, case.schemes[own], f"{begin}: {story(numbers, True)}.", numbers)


def story(numbers: Mapping[str, Any], whole: bool) -> str:
    """The numbers in words: how good it is, and at which price; on the whole, against what."""
    by_loss = numbers["measure"] != "passkey"
    show = _loss if by_loss else _share
    told = [f"{TOLD[numbers['measure']]} at {numbers['length']:,} tokens is "]
    told[0] += show(numbers["value"]) + (_against(numbers, show) if whole else "")
    if by_loss and numbers["passkey"]:
        told.append(f"it tells {_share(numbers['passkey'])} of the passkeys there")
    if numbers["tax"]:
        told.append(f"inside the window its loss changes by {_change(numbers['tax'])}")
    if numbers["speed"] and numbers["label"] != numbers["own"]:
        told.append(f"it prefills at {numbers['speed']:.2f} of the speed")
    return "; ".join(told)


def _against(numbers: Mapping[str, Any], show: Callable[[Mapping[str, float]], str]) -> str:
    """The model as it is, at the target and at its window."""
    own = []
    if numbers["untouched"] and numbers["label"] != numbers["own"]:
        own.append(f"{show(numbers['untouched'])} as it is")
    if numbers["window"]:
        own.append(f"{show(numbers['window'])} at its window of {numbers['trained']:,}")
    return f", against {' and '.join(own)}" if own else ""


def _loss(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.3f}" + _between(one, lambda x: f"{x:.3f}")


def _share(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.0%}" + _between(one, lambda x: f"{x:.0%}")


def _change(one: Mapping[str, float]) -> str:
    return f"{one['mean']:+.3f}" + _between(one, lambda x: f"{x:+.3f}")


def _between(one: Mapping[str, float], show: Callable[[float], str]) -> str:
    """The interval, where there is one."""
    if one["n"] < 2:
        return " on one document"
    return f" ({show(one['low'])} to {show(one['high'])})"


def _factor(case: Case) -> Advice | None:
    """The smallest factor that does, of the best kind that was measured with several; None where no
    kind was."""
    kinds: dict[Scheme, dict[float, str]] = {}
    for label, text in case.schemes.items():
        if (split := _without_factor(text)) and case.here(label):
            kinds.setdefault(split[0], {})[split[1]] = label
    several = [factors for factors in kinds.values() if len(factors) > 1]
    best = case.choice(label for factors in several for label in factors.values())
    if best is None:
        return None
    factors = next(each for each in several if best in each.values())
    helpful = [label for label in factors.values() if case.helps(label)]
    enough = case.best(helpful, case.measure, case.length)
    least = min(factor for factor, label in factors.items() if label in enough)
    tried = ", ".join(f"{factor:g}" for factor in sorted(factors))
    begin = f"A factor of {least:g} is enough ({factors[least]}, of the factors {tried})"
    return _use(case, "factor", factors[least], begin)


def _without_factor(text: str) -> tuple[Scheme, float] | None:
    """A scheme that scales frequencies with its factor taken out, and the factor."""
    scheme = parse(text)
    if not isinstance(scheme, Scheme) or scheme.rotary is None:
        return None
    frequencies: Any = scheme.rotary.frequencies
    factor = getattr(frequencies, "factor", None)
    if factor is None:
        return None
    bare = replace(scheme.rotary, frequencies=replace(frequencies, factor=1))
    return replace(scheme, rotary=bare), float(factor)
