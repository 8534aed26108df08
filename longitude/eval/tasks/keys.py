"""Eight keys: several objects have a number, and each is asked for by its name.

The multi-key needle in a haystack of RULER (Hsieh et al. 2024, arXiv:2404.06654). A pass key is
the only thing that does not belong; here the others are distractors, and only the name singles out
the answer.
"""

from __future__ import annotations

import random

from longitude.eval.tasks import Family, Prompt

FACT = "The number of the {word} is {number}."
QUESTION = "What is the number of the {word}? The number of the {word} is"
KEYS, SMALL_KEYS = 8, 2
WORDS = tuple(
    "apple beach bread brush chair clock cloud crown daisy eagle field flute glass grape horse "
    "knife lemon ocean paper piano plant river robin sheep snake spoon stone storm table tiger "
    "tower wheel".split()
)


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(number) for number in rng.sample(range(10_000, 100_000), count)]


def write(rng: random.Random, small: bool) -> Prompt:
    """Objects with a number each; in a small window one of them is asked for."""
    count = SMALL_KEYS if small else KEYS
    held: dict[str, str] = dict(zip(rng.sample(WORDS, count), numbers(rng, count), strict=True))
    chosen = rng.sample([*held], 1 if small else count)
    return Prompt(
        [(QUESTION.format(word=word), held[word]) for word in chosen],
        [FACT.format(word=word, number=number) for word, number in held.items()],
    )


FAMILY = Family(
    "keys",
    "Eight keys",
    "Eight objects have a number each (two in windows under 1,024 tokens), asked for by name.",
    write,
    "Hsieh et al. 2024 (RULER), arXiv:2404.06654",
)
