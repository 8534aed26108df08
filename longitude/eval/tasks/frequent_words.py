"""Frequent words: the text is a list of invented words; which one stands there most often?

RULER's frequent words extraction (Hsieh et al. 2024, arXiv:2404.06654), whose words follow a zeta
distribution: the answer is nowhere in the text, only its whole tells. Here for the first word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from longitude.eval.tasks import Family, Prompt

WORDS, SMALL_WORDS = 40, 12
EXPONENT = 2.0  # of the zeta distribution: the first word makes up some 60 %
SYLLABLES = "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu".split()
QUESTION = "The word that stands there most often is"


def write(rng: random.Random, small: bool) -> Prompt:
    """Words without end, and the question for the most frequent one."""
    words: dict[str, None] = {}
    while len(words) < (SMALL_WORDS if small else WORDS):
        words["".join(rng.sample(SYLLABLES, 3))] = None
    weights = [rank**-EXPONENT for rank in range(1, len(words) + 1)]
    first, draws = next(iter(words)), random.Random(rng.random())

    def sentences() -> Iterator[str]:
        while True:
            yield f" {draws.choices([*words], weights)[0]}"

    return Prompt([(QUESTION, first)], sentences=sentences())


FAMILY = Family(
    "frequent_words",
    "Most frequent word",
    "The text is a list of invented words; the most frequent one is asked for.",
    write,
    "Hsieh et al. 2024 (RULER), arXiv:2404.06654",
)
