"""Many shots: the text is a list of examples with invented labels; new ones are to be labelled.

Many-shot in-context learning (Agarwal et al. 2024, arXiv:2404.11018; Bertsch et al. 2024,
arXiv:2405.00200): what a label means is told by the examples alone, and more of them help a model
that uses them. Words of a kind that are asked for are not among the examples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from longitude.eval.tasks import Family, Prompt

KINDS = {
    "animals": "horse tiger sheep mouse eagle zebra camel otter shark whale".split(),
    "food": "bread cheese apple butter honey pasta salad sugar lemon onion".split(),
    "tools": "hammer saw drill chisel wrench pliers shovel rake axe file".split(),
    "clothes": "shirt trousers jacket scarf gloves socks coat dress belt skirt".split(),
}
LABELS = "blick dax fep gazzer tupa wug zorb modi".split()  # invented
HELD_OUT = 2  # words of each kind that are asked for
TEMPLATE, QUESTION = "\n{word}: {label}", "{word}:"


def write(rng: random.Random, small: bool) -> Prompt:
    """Examples without end, and a question for each held-out word; one in a small window."""
    labels = dict(zip(KINDS, rng.sample(LABELS, len(KINDS)), strict=True))
    shuffled = {kind: rng.sample(words, len(words)) for kind, words in KINDS.items()}
    shots = [(w, labels[kind]) for kind, words in shuffled.items() for w in words[HELD_OUT:]]
    targets = [(w, labels[kind]) for kind, words in shuffled.items() for w in words[:HELD_OUT]]
    draws = random.Random(rng.random())

    def sentences() -> Iterator[str]:
        while True:
            word, label = draws.choice(shots)
            yield TEMPLATE.format(word=word, label=label)

    questions = [(QUESTION.format(word=word), label) for word, label in targets]
    return Prompt(rng.sample(questions, 1 if small else len(questions)), sentences=sentences())


FAMILY = Family(
    "many_shot",
    "Many shots",
    "Examples with invented labels fill the text; words that it does not have are to be labelled.",
    write,
    "after Agarwal et al. 2024, arXiv:2404.11018",
)
