"""Multi-value: one object has several numbers at different places, all asked for in their order.

RULER's multi-value needle (Hsieh et al. 2024, arXiv:2404.06654): one place found is not enough.
"""

from __future__ import annotations

import random

from longitude.eval.tasks import Family, Prompt
from longitude.eval.tasks.keys import WORDS, numbers

FACT = "One of the magic codes of the {word} is {number}."
QUESTION = "What are the {count} magic codes of the {word}, in their order? They are"
VALUES, SMALL_VALUES = 4, 2


def write(rng: random.Random, small: bool) -> Prompt:
    """Several codes of one object."""
    word, codes = rng.choice(WORDS), numbers(rng, SMALL_VALUES if small else VALUES)
    question = QUESTION.format(count=len(codes), word=word)
    facts = [FACT.format(word=word, number=code) for code in codes]
    return Prompt([(question, ", ".join(codes))], facts)


FAMILY = Family(
    "values",
    "Several values",
    "Four codes of one object stand in different places, and are asked for in their order.",
    write,
    "Hsieh et al. 2024 (RULER), arXiv:2404.06654",
)
