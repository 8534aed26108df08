"""Variable tracking: chains of assignments, scattered over the text; which names hold a value?

RULER's variable tracking (Hsieh et al. 2024, arXiv:2404.06654): each hop of a chain is found
through the one before it. RULER asks about the only chain there is; here there are two, each asked
for, so that listing every name is wrong. Names are expected in the order of their chain.
"""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from longitude.eval.tasks import Family, Prompt
from longitude.eval.tasks.keys import numbers

FACT = "Let {name} be {value}."
QUESTION = "Which {count} names hold {value}? The names that hold {value} are"
LETTERS = 5  # of a name
HOPS, SMALL_HOPS = 4, 1  # RULER's, and what fits a short window
CHAINS = 2


def write(rng: random.Random, small: bool) -> Prompt:
    """Two chains, mixed, each in its own order; in a small window one is asked for."""
    hops = SMALL_HOPS if small else HOPS
    names: dict[str, None] = {}
    while len(names) < CHAINS * (hops + 1):
        names["".join(rng.choices(ascii_uppercase, k=LETTERS))] = None
    chains = [[*names][i::CHAINS] for i in range(CHAINS)]
    values = numbers(rng, CHAINS)
    # a chain's first name holds the value, each next name the one before it
    facts = [
        iter([FACT.format(name=name, value=held) for held, name in pairwise([value, *chain])])
        for value, chain in zip(values, chains, strict=True)
    ]
    order = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(order)
    questions = [
        (QUESTION.format(count=len(chain), value=value), ", ".join(chain))
        for value, chain in zip(values, chains, strict=True)
    ]
    return Prompt(questions[: 1 if small else None], [next(facts[i]) for i in order])


FAMILY = Family(
    "variables",
    "Variables tracked",
    "Values pass from name to name across the text; all names that hold one are asked for.",
    write,
    "Hsieh et al. 2024 (RULER), arXiv:2404.06654",
)
