"""Multi-key retrieval: several objects have a number, scattered in filler; one is asked for.

The multi-key needle in a haystack of RULER (Hsieh et al. 2024, arXiv:2404.06654). A passkey is
the only thing that does not belong; here there are distractors, and only the name singles out the
answer.
"""

from __future__ import annotations

import random

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
from longitude.eval.records import KEYS

TASK = (
    "Some objects in the text below have a number. Remember their numbers: one of them will be "
    "asked for at the end."
)
FACT = "The number of the {word} is {number}."
QUESTION = "What is the number of the {word}? The number of the {word} is"
# all of one length, so that a length that holds one draw holds any
WORDS = tuple(
    "apple beach bread brush chair clock cloud crown daisy eagle field flute glass grape horse "
    "knife lemon ocean paper piano plant river robin sheep snake spoon stone storm table tiger "
    "tower wheel".split()
)


def keys(
    length: int,
    *,
    rng: random.Random | int,
    keys: int = 4,
    form: Form | None = None,
    count: Count = byte_count,
) -> Question:
    """A question whose prompt and answer take `length` tokens, or as close below as possible.

    `rng` is a seed or a generator, `keys` the number of objects. Without a `form`, that which fits
    the length. `count` gives the tokens of a text, special ones included.
    """
    if not 1 <= keys <= len(WORDS):
        raise UserError(f"there are 1 to {len(WORDS)} keys, but got {shown(keys)}: use 4.")
    rng = random.Random(rng) if isinstance(rng, int) else rng
    form = checked_form(form, length)
    values = dict(zip(rng.sample(WORDS, keys), five_digits(rng, keys), strict=True))
    word = rng.choice(list(values))
    return ask(
        [FACT.format(word=word, number=number) for word, number in values.items()],
        QUESTION.format(word=word),
        [values[word]],
        length=length,
        rng=rng,
        count=count,
        form=form,
        task=TASK,
        pattern="[0-9]+",
        what=f"a question about {keys} keys",
    )


METRIC = question_metric(
    KEYS,
    keys,
    answered,
    title="One key of many retrieved",
    paper="Hsieh et al. 2024 (RULER), arXiv:2404.06654",
    help="Several numbers are hidden under names, and one of them is asked for.",
    heading="multi-key",
)
