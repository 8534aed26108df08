"""Families of retrieval questions beside the pass key: what a text hides, and what is asked of it.

After RULER (Hsieh et al. 2024, arXiv:2404.06654): several keys, several values of one key, chains
of variables, the most frequent word; many-shot learning (Agarwal et al. 2024, arXiv:2404.11018);
and needles that share no word with their question (NoLiMa, Modarressi et al. 2025,
arXiv:2502.05167).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from string import ascii_uppercase

from longitude.eval.tasks import Family, Prompt

RULER = "Hsieh et al. 2024 (RULER), arXiv:2404.06654"
NUMBER_OF = "The number of the {word} is {number}."
WORDS = tuple(
    "apple beach bread brush chair clock cloud crown daisy eagle field flute glass grape horse "
    "knife lemon ocean paper piano plant river robin sheep snake spoon stone storm table tiger "
    "tower wheel".split()
)
HOPS, SMALL_HOPS = 4, 1  # hops in RULER, and those that fit a short window
CHAINS = 2
SYLLABLES = "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu".split()
EXPONENT = 2.0  # of the zeta distribution: the first word makes up some 60 %
KINDS = {
    "animals": "horse tiger sheep mouse eagle zebra camel otter shark whale".split(),
    "food": "bread cheese apple butter honey pasta salad sugar lemon onion".split(),
    "tools": "hammer saw drill chisel wrench pliers shovel rake axe file".split(),
    "clothes": "shirt trousers jacket scarf gloves socks coat dress belt skirt".split(),
}
LABELS = "blick dax fep gazzer tupa wug zorb modi".split()  # invented
HELD_OUT = 2  # words of each kind that are asked for, and not among the examples
# what a person does, and a question about it; a test checks that a pair shares no word
PAIRS = (
    ("keeps bees behind the house", "Who could sell you honey?"),
    ("drives a tractor through the fields", "Who is a farmer?"),
    ("pulls bad teeth all day", "Who is a dentist?"),
    ("bakes loaves before dawn", "Who could sell you bread?"),
    ("flies passengers across the ocean", "Who is a pilot?"),
    ("lives next to the Eiffel Tower", "Who has been in Paris?"),
    ("grew up beside the Kremlin", "Who has been in Moscow?"),
    ("photographed the pyramids of Giza", "Who has been in Egypt?"),
    ("puts out burning buildings", "Who is a firefighter?"),
    ("teaches algebra to children", "Who works at a school?"),
    ("sails out with nets every morning", "Who could sell you fish?"),
    ("mends broken pipes and taps", "Who is a plumber?"),
    ("arrests thieves in the harbour", "Who is a police officer?"),
    ("sews dresses for brides", "Who is a tailor?"),
    ("never touches meat or milk", "Who is a vegan?"),
    ("shears the sheep in spring", "Who could sell you wool?"),
)
NAMES = tuple(
    "Anna Boris Clara David Edith Felix Greta Henry Irene Jacob Karin Lucas Maria Norah Oscar "
    "Paula Ralph Susan Tomas Wanda".split()
)


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(number) for number in rng.sample(range(10_000, 100_000), count)]


def keys(rng: random.Random, small: bool) -> Prompt:
    """Objects with a number each; in a small window one of them is asked for. A pass key stands out
    from its text; here the other objects are distractors, and only the name identifies the
    answer."""
    count = 2 if small else 8
    held: dict[str, str] = dict(zip(rng.sample(WORDS, count), numbers(rng, count), strict=True))
    chosen = rng.sample([*held], 1 if small else count)
    question = "What is the number of the {word}? The number of the {word} is"
    return Prompt(
        [(question.format(word=word), held[word]) for word in chosen],
        [NUMBER_OF.format(word=word, number=number) for word, number in held.items()],
    )


def values(rng: random.Random, small: bool) -> Prompt:
    """Several codes of one object, asked for in order: finding one place is not enough."""
    word, codes = rng.choice(WORDS), numbers(rng, 2 if small else 4)
    question = f"What are the {len(codes)} magic codes of the {word}, in their order? They are"
    facts = [f"One of the magic codes of the {word} is {code}." for code in codes]
    return Prompt([(question, ", ".join(codes))], facts)


def variables(rng: random.Random, small: bool) -> Prompt:
    """Two chains of assignments, mixed, each in its own order; in a small window one is asked for.
    Each hop is found through the one before it. RULER has one chain; with two, listing every name
    is wrong. Names are expected in the order of their chain."""
    hops = SMALL_HOPS if small else HOPS
    names: dict[str, None] = {}
    while len(names) < CHAINS * (hops + 1):
        names["".join(rng.choices(ascii_uppercase, k=5))] = None
    chains = [[*names][i::CHAINS] for i in range(CHAINS)]
    held = numbers(rng, CHAINS)
    # a chain's first name holds the value, each next name the one before it
    facts = [
        iter([f"Let {name} be {value}." for value, name in pairwise([first, *chain])])
        for first, chain in zip(held, chains, strict=True)
    ]
    order = [i for i, chain in enumerate(chains) for _ in chain]
    rng.shuffle(order)
    questions = [
        (
            f"Which {len(chain)} names hold {value}? The names that hold {value} are",
            ", ".join(chain),
        )
        for value, chain in zip(held, chains, strict=True)
    ]
    return Prompt(questions[: 1 if small else None], [next(facts[i]) for i in order])


def frequent_words(rng: random.Random, small: bool) -> Prompt:
    """Endless invented words from a zeta distribution, and a question for the most frequent one. No
    place in the text states the answer: all of it is needed. RULER asks for the first three."""
    words: dict[str, None] = {}
    while len(words) < (12 if small else 40):
        words["".join(rng.sample(SYLLABLES, 3))] = None
    weights = [rank**-EXPONENT for rank in range(1, len(words) + 1)]
    first, draws = next(iter(words)), random.Random(rng.random())

    def sentences() -> Iterator[str]:
        while True:
            yield f" {draws.choices([*words], weights)[0]}"

    return Prompt([("The word that stands there most often is", first)], sentences=sentences())


def many_shot(rng: random.Random, small: bool) -> Prompt:
    """Endless examples, and a question for each held-out word; one in a small window. The examples
    alone say what a label means, and more of them help a model that uses them (see also Bertsch et
    al. 2024, arXiv:2405.00200)."""
    labels = dict(zip(KINDS, rng.sample(LABELS, len(KINDS)), strict=True))
    shuffled = {kind: rng.sample(words, len(words)) for kind, words in KINDS.items()}
    shots = [(w, labels[kind]) for kind, words in shuffled.items() for w in words[HELD_OUT:]]
    targets = [(w, labels[kind]) for kind, words in shuffled.items() for w in words[:HELD_OUT]]
    draws = random.Random(rng.random())

    def sentences() -> Iterator[str]:
        while True:
            word, label = draws.choice(shots)
            yield f"\n{word}: {label}"

    questions = [(f"{word}:", label) for word, label in targets]
    return Prompt(rng.sample(questions, 1 if small else len(questions)), sentences=sentences())


def association(rng: random.Random, small: bool) -> Prompt:
    """People and what they do; the question about each uses other words. If they shared words with
    the fact, a model could find the place by matching; here it has to know that honey comes from
    bees. Names are drawn for each prompt, so that only the text has the answer."""
    count = 2 if small else 4
    people, pairs = rng.sample(NAMES, count), rng.sample(PAIRS, count)
    drawn = [(name, *pair) for name, pair in zip(people, pairs, strict=True)]
    questions = [(f"{question} It is", name) for name, _, question in drawn]
    facts = [f"{name} {fact}." for name, fact, _ in drawn]
    return Prompt(questions[: 1 if small else None], facts)


FAMILIES = (
    Family(
        "keys",
        "Eight keys",
        "Eight objects have a number each (two in windows under 1,024 tokens), asked for by name.",
        keys,
        RULER,
    ),
    Family(
        "values",
        "Several values",
        "Four codes of one object stand in different places, and are asked for in their order.",
        values,
        RULER,
    ),
    Family(
        "variables",
        "Variables tracked",
        "Values pass from name to name across the text; all names that hold one are asked for.",
        variables,
        RULER,
    ),
    Family(
        "frequent_words",
        "Most frequent word",
        "The text is a list of invented words; the most frequent one is asked for.",
        frequent_words,
        RULER,
    ),
    Family(
        "many_shot",
        "Many shots",
        "Examples with invented labels fill the text; words that it does not have are to be "
        "labelled.",
        many_shot,
        "after Agarwal et al. 2024, arXiv:2404.11018",
    ),
    Family(
        "association",
        "No shared word",
        "A person is asked for by words that the fact about them does not have.",
        association,
        "after Modarressi et al. 2025 (NoLiMa), arXiv:2502.05167",
    ),
)
