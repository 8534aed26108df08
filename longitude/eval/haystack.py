"""Filler that brings a prompt to an exact number of tokens.

Filler repeats, so its tokens grow with its characters at one rate, save for where it is cut. The
papers count filler in characters; here "at 4,096" means 4,096 tokens, prompt and answer together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from longitude.core.validate import UserError

GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
PERIOD = len(GARBAGE) + 1  # with the space behind it
SAMPLE = 4 * len(GARBAGE)  # characters from which the tokens a character takes are told
ROUNDS = 4  # corrections of the first guess
NEARBY = 32  # characters to either side of the last: cutting a word in two costs tokens

Count = Callable[[str], int]


def bytes_of(text: str) -> int:
    """The count of a byte-level tokenizer."""
    return len(text.encode())


def fit(
    write: Callable[[str], str], length: int, count: Count, what: str, *, least: int = 0
) -> tuple[str, int]:
    """The filler that brings a text to `length` tokens or as close below as can be, and the tokens
    that the text then has.

    Args:
        write: the text with this filler.
        what: what the text is, for the sentence that says that it does not fit.
        least: the least length to take, where that is more than this text needs.
    """

    @cache  # a real tokenizer is slow on a long text
    def tokens(characters: int) -> int:
        return count(write(filler(characters)))

    least = max(least, tokens(0))
    if least > length:
        raise UserError(
            f"{what} takes at least {least} tokens, but got a length of {length}: give {least} or "
            f"more."
        )
    characters = _characters(tokens, length, what)
    return filler(characters), tokens(characters)


def filler(characters: int) -> str:
    """The garbage, over and over."""
    return (f"{GARBAGE} " * (characters // PERIOD + 1))[:characters]


def _characters(tokens: Callable[[int], int], length: int, what: str) -> int:
    rate = (tokens(SAMPLE) - tokens(0)) / SAMPLE
    if rate <= 0:
        raise UserError(
            f"the count of {what} must grow with its text, but {SAMPLE} characters more made no "
            f"difference: turn the tokenizer's truncation off."
        )
    guess = 0
    for _ in range(ROUNDS):
        guess = max(0, guess + round((length - tokens(guess)) / rate))
    around = range(max(0, guess - NEARBY), guess + NEARBY + 1)
    near = sorted(around, key=lambda characters: abs(characters - guess))
    exact = next((characters for characters in near if tokens(characters) == length), None)
    below = (characters for characters in [0, *near] if tokens(characters) < length)
    return max(below, key=tokens) if exact is None else exact
