"""Variable tracking: chains of assignments, scattered in filler; which names hold a value?

RULER's variable tracking (Hsieh et al. 2024, arXiv:2404.06654): each hop of a chain is found
through the one before it. RULER asks about the only chain there is; here a second chain is a
distractor, so that listing every name is wrong.
"""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from longitude.core.validate import UserError, shown
from longitude.eval.haystack import (
    Count,
    Form,
    Question,
    answered,
    ask,
    byte_count,
    checked_form,
    five_digits,
    question_metric,
)
from longitude.eval.records import VARIABLES

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
    count: Count = byte_count,
) -> Question:
    """A question whose prompt and answer take `length` tokens, or as close below as possible.

    `rng` is a seed or a generator; each of the `chains` has `hops` names after its first. Without a
    `form`, that which fits the length. `count` gives the tokens of a text, special ones included.
    """
    rng = random.Random(rng) if isinstance(rng, int) else rng
    form = checked_form(form, length)
    hops = (SHORT_HOPS if form == "short" else HOPS) if hops is None else hops
    if hops < 0 or chains < 1:
        raise UserError(
            f"there is 1 chain or more, of 0 hops or more, but got {shown(chains)} and "
            f"{shown(hops)}: use {CHAINS} and {HOPS}."
        )
    names: dict[str, None] = {}
    while len(names) < chains * (hops + 1):
        names["".join(rng.choices(ascii_uppercase, k=LETTERS))] = None
    tracked = [list(names)[i::chains] for i in range(chains)]
    values = five_digits(rng, chains)
    # a chain's first name holds the value, each next name the one before it
    facts = [
        iter([FACT.format(name=name, value=held) for held, name in pairwise([value, *chain])])
        for value, chain in zip(values, tracked, strict=True)
    ]
    order = [i for i, chain in enumerate(tracked) for _ in chain]
    rng.shuffle(order)  # chains mixed, each in its own order
    return ask(
        [next(facts[i]) for i in order],
        QUESTION.format(value=values[0], count=hops + 1),
        tracked[0],
        length=length,
        rng=rng,
        count=count,
        form=form,
        task=TASK,
        pattern=rf"\b[A-Z]{{{LETTERS}}}\b",
        what=f"a question about {chains} chains of {hops} hops",
    )


METRIC = question_metric(
    VARIABLES,
    variables,
    answered,
    title="Variables tracked",
    paper="Hsieh et al. 2024 (RULER), arXiv:2404.06654",
    help="Values pass from name to name across the text; all names that hold one are asked for.",
    heading="variables",
    chart="The share of assignment chains that the model follows to their end.",
)
