"""A needle that shares no word with its question: only what the words mean leads to it.

After NoLiMa (Modarressi et al. 2025, arXiv:2502.05167): where question and fact share words, a
model can find the place by matching them; here it has to know that honey comes from bees. Names are
drawn anew, so that the answer is nowhere but in the text.
"""

from __future__ import annotations

import random

from longitude.eval.tasks import Family, Prompt

# what a person does, and what is asked about it; a test holds that a pair shares no word
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
FACTS = 4
QUESTION = "{question} It is"


def write(rng: random.Random, small: bool) -> Prompt:
    """People and what they do; each is asked for by something else."""
    count = 2 if small else FACTS
    people, pairs = rng.sample(NAMES, count), rng.sample(PAIRS, count)
    questions = [
        (QUESTION.format(question=question), name)
        for name, (_, question) in zip(people, pairs, strict=True)
    ]
    facts = [f"{name} {fact}." for name, (fact, _) in zip(people, pairs, strict=True)]
    return Prompt(questions[: 1 if small else None], facts)


FAMILY = Family(
    "association",
    "No shared word",
    "A person is asked for by words that the fact about them does not have.",
    write,
    "after Modarressi et al. 2025 (NoLiMa), arXiv:2502.05167",
)
