"""A text in segments that end where sentences do, none longer than so many tokens.

Joined, the segments are the text to the letter. A sentence that is too long alone is cut between
words, and a word that is too long anywhere: base64, or a script that writes no spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# the space behind a full stop and its closing quotes, or an empty line; CJK needs no space. It
# looks back for the full stop, because a run of a million dots must not be read a million times.
END = re.compile(r"""(?<=[.!?…])["'”’»)\]]*\s+|(?<=[。！？])[”’」』）]*\s*|\n\s*\n\s*""")
Size = Callable[[str], int]  # how many tokens a text has


def segments(text: str, most: int, size: Size) -> list[str]:
    """The text in pieces of `most` tokens or fewer (one letter at least), cut at sentence ends."""
    found: list[str] = []
    parts: list[str] = []
    held = 0
    for sentence, tokens in _fitting(text, most, size):
        if parts and held + tokens > most:
            found.append("".join(parts))
            parts, held = [], 0
        parts.append(sentence)
        held += tokens
    return [*found, "".join(parts)] if parts else found


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, each with the space behind it."""
    begun = 0
    for end in END.finditer(text):
        yield text[begun : end.end()]
        begun = end.end()
    if begun < len(text):
        yield text[begun:]


def cut(text: str, most: int, size: Size) -> str:
    """The beginning of a text, of `most` tokens or fewer, up to a sentence's end if it can be."""
    return (segments(text, most, size) or [""])[0].strip() if most > 0 else ""


def _fitting(text: str, most: int, size: Size) -> Iterator[tuple[str, int]]:
    """Sentences with their sizes, those halved that are too long."""
    waiting = list(sentences(text))[::-1]
    while waiting:
        part = waiting.pop()
        tokens = size(part)
        if tokens > most and len(part) > 1:
            at = _middle(part)
            waiting += [part[at:], part[:at]]
        else:
            yield part, tokens


def _middle(part: str) -> int:
    """Where to cut: behind the space nearest before the middle, or in the middle."""
    half = (len(part) + 1) // 2
    return part.rfind(" ", 1, half) + 1 or half
