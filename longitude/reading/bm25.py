"""Which pieces of a long text have most to do with a question, by their words: BM25.

Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond": for each word
of the question, idf · f · (k + 1) / (f + k · (1 - b + b · n / mean n)), f how often a piece has the
word and n how long the piece is; idf = ln(1 + (N - m + 1/2) / (m + 1/2)), m of N pieces having it.
No model is needed, so a text of any size is through in seconds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

K, B = 1.2, 0.75  # the usual ones
CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: each sign is a word
END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])|\n+")
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")


def most_telling(texts: Sequence[str], question: str, most: int) -> list[int]:
    """The places of the `most` texts that score highest, in the order in which they stand; where
    words tell nothing, the first ones."""
    found = scores(texts, question)
    best = sorted(range(len(texts)), key=lambda n: (-found[n], n))[:most]
    return sorted(best)


def telling_part(text: str, wanted: str, most: int = 200) -> str:
    """The sentence or line of a text that has most of the wanted words, and what comes after it, up
    to so many letters."""
    asked = {*words(wanted)}
    starts = [0, *(end.end() for end in END.finditer(text))]
    parts = [text[a:b] for a, b in pairwise([*starts, len(text)])]
    best = max(range(len(parts)), key=lambda n: (len(asked & {*words(parts[n])}), -n))
    return text[starts[best] : starts[best] + most].strip()


def scores(texts: Sequence[str], question: str) -> list[float]:
    """Each text's BM25 for the question."""
    asked = {*words(question)}
    counts, sizes = [], []
    for text in texts:
        held = Counter(words(text))
        counts.append({word: held[word] for word in asked if word in held})
        sizes.append(held.total())
    weights = {word: _idf(sum(word in c for c in counts), len(texts)) for word in asked}
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    return [
        sum(weights[w] * f * (K + 1) / (f + K * (1 - B + B * n / mean)) for w, f in held.items())
        for held, n in zip(counts, sizes, strict=True)
    ]


def words(text: str) -> list[str]:
    """The words of a text, all in small letters."""
    return WORD.findall(text.casefold())


def _idf(having: int, of: int) -> float:
    return math.log(1 + (of - having + 0.5) / (having + 0.5))
