"""Many keys: several objects have a number, scattered in filler, and one of them is asked for.

The multi-key needle in a haystack of RULER (Hsieh et al. 2024, arXiv:2404.06654). The passkey asks
for the one thing that does not belong; here the others are as odd, and only the name tells them
apart.
"""

from __future__ import annotations

import random

from longitude.core.validate import UserError, shown
from longitude.eval.haystack import Count, bytes_of
from longitude.eval.question import Question, ask, numbers
from longitude.eval.question import answered as answered
from longitude.eval.tasks.passkey import Form, form_of

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
    count: Count = bytes_of,
) -> Question:
    """A question whose prompt and answer take `length` tokens, or as few less as can be.

    `rng` is a seed or a generator, `keys` how many objects there are. `form` is that which fits the
    length where it is not given. `count` says how many tokens a text takes, special ones included.
    """
    if not 1 <= keys <= len(WORDS):
        raise UserError(f"there are 1 to {len(WORDS)} keys, but got {shown(keys)}: use 4.")
    rng = random.Random(rng) if isinstance(rng, int) else rng
    form = form_of(form, length)
    held = dict(zip(rng.sample(WORDS, keys), numbers(rng, keys), strict=True))
    word = rng.choice(list(held))
    return ask(
        [FACT.format(word=word, number=number) for word, number in held.items()],
        QUESTION.format(word=word),
        [held[word]],
        length=length,
        rng=rng,
        count=count,
        form=form,
        task=TASK,
        kind="[0-9]+",
        what=f"a question about {keys} keys",
    )
