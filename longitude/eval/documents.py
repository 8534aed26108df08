"""The documents that methods are compared on, as tokens, each as long as the target.

Without `--text` they come from what every Python installation has, the sources of the standard
library and the topics of its documentation; for the package's own checkpoints only from the tenth
that they were not trained on. A text that is too short for a document is joined with those after
it. Which texts, and where in them, depends on the seed alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.core.validate import UserError
from longitude.eval.records import Text
from longitude.training import sources
from longitude.training.lab.text import for_test

JOINT = "\n\n"
SAMPLE = 20_000  # characters from which the tokens that a text takes are told
SPARE = 1.25  # how many times the characters that seem enough are cut out


@dataclass(frozen=True, eq=False)
class Document:
    """A text's name and digest, and its tokens, behind those that the tokenizer puts first."""

    text: Text
    ids: Int[Tensor, " n"]
    first: int  # tokens that the tokenizer puts before any text

    def begun(self, length: int) -> Int[Tensor, " m"]:
        """Its first tokens: `length` of them are predicted."""
        return self.ids[: length + 1]

    def ended(self, length: int) -> Int[Tensor, " m"]:
        """Its last tokens with the first of every text before them: `length` are predicted."""
        return torch.cat([self.ids[: self.first], self.ids[-(length + 1 - self.first) :]])


def documents(
    given: Sequence[str], tokenizer: Any, length: int, count: int, seed: int, unseen: bool = False
) -> list[Document]:
    """As many documents of `length` predicted tokens as there are, at most `count`; of the standard
    library, if `unseen`, only what the lab never trains on."""
    return cut(_texts(given, unseen), tokenizer, length, count, seed)


def cut(
    texts: list[tuple[str, str]], tokenizer: Any, length: int, count: int, seed: int
) -> list[Document]:
    """Documents out of names and texts, as many as there are, at most `count`."""
    texts = [*texts]
    rng = random.Random(f"documents {seed}")
    rng.shuffle(texts)
    rate = _rate(texts, tokenizer)
    need = int((length + 1) / rate * SPARE) + 1
    long = [t for t in texts if len(t[1]) >= need]
    short = [t for t in texts if len(t[1]) < need]
    found: list[Document] = []
    for name, text in [*_places(long, need, rng), *_joined(short, need)]:
        if len(found) == count:
            break
        document = _document(name, text, tokenizer, length)
        found += [document] if document is not None else []
    if not found:
        have = sum(len(text) for _, text in texts) * rate
        raise UserError(
            f"the text has about {have:,.0f} tokens, but one document takes {length + 1:,}: give "
            f"more with --text, or a nearer --to."
        )
    return found


def _texts(given: Sequence[str], unseen: bool) -> list[tuple[str, str]]:
    if not given:
        found = [d for d in sources.standard_library() if not unseen or for_test(d.name)]
    else:
        names = [source for source in given if sources.is_dataset(source)]
        paths = [source for source in given if source not in names]
        found = sources.from_paths(paths)
        found += [d for name in dict.fromkeys(names) for d in sources.from_dataset(name)]
    return [(d.name, d.text.decode()) for d in sorted(found)]


def _rate(texts: Sequence[tuple[str, str]], tokenizer: Any) -> float:
    """Tokens a character."""
    sample = JOINT.join(text[:1000] for _, text in texts[: SAMPLE // 1000])
    return max(1, len(_tokens(tokenizer, sample))) / max(1, len(sample))


def _places(
    long: Sequence[tuple[str, str]], need: int, rng: random.Random
) -> list[tuple[str, str]]:
    """Stretches of the texts that are long enough: one of each first, then a second, and so on."""
    found: list[tuple[int, str, str]] = []
    for name, text in long:
        room = len(text) // need
        start = rng.randrange(len(text) - need * room + 1)
        for i in range(room):
            at = start + i * need
            found.append((i, name if room == 1 else f"{name}#{i + 1}", text[at : at + need]))
    found.sort(key=lambda stretch: stretch[0])
    return [(name, text) for _, name, text in found]


def _joined(short: Sequence[tuple[str, str]], need: int) -> list[tuple[str, str]]:
    """Short texts one after another, as many as make a document."""
    found: list[tuple[str, str]] = []
    names: list[str] = []
    parts: list[str] = []
    for name, text in short:
        names.append(name)
        parts.append(text)
        if sum(map(len, parts)) >= need:
            found.append((_together(names), JOINT.join(parts)))
            names, parts = [], []
    if parts:  # the last may be long enough all the same: `need` has some to spare
        found.append((_together(names), JOINT.join(parts)))
    return found


def _together(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _document(name: str, text: str, tokenizer: Any, length: int) -> Document | None:
    """The text as tokens, or None where they are too few."""
    before = _before(tokenizer)
    ids = [*before, *_tokens(tokenizer, text)][: length + 1]
    if len(ids) <= length:
        return None
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]
    return Document(Text(name, digest), torch.tensor(ids), len(before))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _before(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before any text: most often the token that begins one."""
    bare, whole = _tokens(tokenizer, "a"), tokenizer("a", verbose=False).input_ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at]
    return []
