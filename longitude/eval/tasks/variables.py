"""Variable tracking: chains of assignments, scattered in filler; which names hold a value?

RULER's variable tracking (Hsieh et al. 2024, arXiv:2404.06654): each hop of a chain has to be found
through the one before it. RULER asks about the only chain there is; here another one stands among
it, so that to name every name is no answer.
"""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from longitude.core.validate import UserError, shown
from longitude.eval.haystack import Count, bytes_of
from longitude.eval.question import Question, ask, numbers
from longitude.eval.question import answered as answered
from longitude.eval.tasks.passkey import Form, form_of

TASK = (
    "Names are given values in the text below: numbers, or what another name holds. Keep track of "
    "them: the names that hold one of the numbers will be asked for at the end."
)
FACT = "Let {name} be {value}."
QUESTION = "Which names hold {value}? The {count} names that hold {value} are"
LETTERS = 5  # of a name
HOPS, SHORT_HOPS = 4, 2  # RULER's, and what fits a short window
CHAINS = 2


def variables(
    length: int,
    *,
    rng: random.Random | int,
    hops: int | None = None,
    chains: int = CHAINS,
    form: Form | None = None,
    count: Count = bytes_of,
) -> Question:
    """A question whose prompt and answer take `length` tokens, or as few less as can be.

    `rng` is a seed or a generator; each of the `chains` has `hops` names behind its first. `form`
    is that which fits the length where it is not given. `count` says how many tokens a text takes,
    special ones included.
    """
    rng = random.Random(rng) if isinstance(rng, int) else rng
    form = form_of(form, length)
    hops = (SHORT_HOPS if form == "short" else HOPS) if hops is None else hops
    if hops < 0 or chains < 1:
        raise UserError(
            f"there is 1 chain or more, of 0 hops or more, but got {shown(chains)} and "
            f"{shown(hops)}: use {CHAINS} and {HOPS}."
        )
    names = _names(rng, chains * (hops + 1))
    tracked = [names[i::chains] for i in range(chains)]
    values = numbers(rng, chains)
    return ask(
        _shuffled(rng, [_facts(*chain) for chain in zip(values, tracked, strict=True)]),
        QUESTION.format(value=values[0], count=hops + 1),
        tracked[0],
        length=length,
        rng=rng,
        count=count,
        form=form,
        task=TASK,
        kind=rf"\b[A-Z]{{{LETTERS}}}\b",
        what=f"a question about {chains} chains of {hops} hops",
    )


def _names(rng: random.Random, count: int) -> list[str]:
    """Different names."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(ascii_uppercase, k=LETTERS))] = None
    return list(found)


def _facts(value: str, names: list[str]) -> list[str]:
    """A chain's assignments in their order: the first name holds the value, each next the last."""
    return [FACT.format(name=name, value=held) for held, name in pairwise([value, *names])]


def _shuffled(rng: random.Random, chains: list[list[str]]) -> list[str]:
    """The facts of all chains mixed, those of one in their order."""
    turns = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(turns)
    waiting = [iter(chain) for chain in chains]
    return [next(waiting[turn]) for turn in turns]
