"""The documents that methods are compared on, as tokens, each as long as the target.

Without `--text` they come from what every Python installation has, the sources of the standard
library and the topics of its documentation; for the bundled checkpoints only from the tenth of it
that they were not trained on. Texts that are too short for a document are joined with others from
the same folder, and the document's name says so. Which texts are used, and where in them, depends
on the seed only.
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

SEPARATOR = "\n\n"

SAMPLE, SAMPLED_TEXTS = 1000, 20  # characters of each text, to estimate tokens per character
MARGIN = 1.25  # times the estimated number of characters is cut out
Named = tuple[str, str]  # a name and its text


@dataclass(frozen=True, eq=False)
class Document:
    """A text's name and digest, and its tokens, after the tokenizer's special ones."""

    text: Text
    ids: Int[Tensor, " n"]
    special: int  # how many tokens the tokenizer puts before any text

    def first(self, length: int) -> Int[Tensor, " m"]:
        """The first tokens, of which `length` are predicted."""
        return self.ids[: length + 1]

    def last(self, length: int) -> Int[Tensor, " m"]:
        """The special tokens and the last tokens of the text, of which `length` are predicted."""
        return torch.cat([self.ids[: self.special], self.ids[-(length + 1 - self.special) :]])


def documents(
    sources: Sequence[str], tokenizer: Any, length: int, count: int, seed: int, unseen: bool = False
) -> list[Document]:
    """Up to `count` documents of `length` predicted tokens. With `unseen`, the standard library is
    limited to what the bundled checkpoints were not trained on."""
    from longitude.training.data import for_test, read_documents

    texts = read_documents(sources)
    if unseen and not sources:
        texts = [d for d in texts if for_test(d.name)]
    return cut([(d.name, d.text.decode()) for d in sorted(texts)], tokenizer, length, count, seed)


def cut(
    texts: Sequence[Named], tokenizer: Any, length: int, count: int, seed: int
) -> list[Document]:
    """Cut up to `count` documents from (name, text) pairs."""
    texts = [*texts]
    rng = random.Random(f"documents {seed}")
    rng.shuffle(texts)
    sample = SEPARATOR.join(text[:SAMPLE] for _, text in texts[:SAMPLED_TEXTS])
    rate = max(1, len(token_ids(tokenizer, sample))) / max(1, len(sample))  # tokens per character
    need = int((length + 1) / rate * MARGIN) + 1
    long = [t for t in texts if len(t[1]) >= need]
    short = [t for t in texts if len(t[1]) < need]
    bare, full = token_ids(tokenizer, "a"), tokenizer("a", verbose=False).input_ids
    places = range(len(full) - len(bare) + 1)  # tokens before any text: usually a BOS token
    special = next((full[:at] for at in places if full[at : at + len(bare)] == bare), [])
    chosen: list[Document] = []
    for name, text in [*_pieces(long, need, rng), *_joined(short, need)]:
        if len(chosen) == count:
            break
        ids = [*special, *token_ids(tokenizer, text)][: length + 1]
        if len(ids) > length:
            digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]
            chosen.append(Document(Text(name, digest), torch.tensor(ids), len(special)))
    if not chosen:
        have = sum(len(text) for _, text in texts) * rate
        raise UserError(
            f"the text has about {have:,.0f} tokens, but one document takes {length + 1:,}: give "
            f"more with --text, or a nearer --to."
        )
    return chosen


def _pieces(long: Sequence[Named], need: int, rng: random.Random) -> list[Named]:
    """Pieces of the long texts: first one of each text, then a second of each, and so on."""
    rounds: dict[int, list[Named]] = {}
    for name, text in long:
        room = len(text) // need
        start = rng.randrange(len(text) - need * room + 1)
        for i in range(room):
            at = start + i * need
            piece = (name if room == 1 else f"{name}#{i + 1}", text[at : at + need])
            rounds.setdefault(i, []).append(piece)
    return [piece for _, pieces in sorted(rounds.items()) for piece in pieces]


def _joined(short: Sequence[Named], need: int) -> list[Named]:
    """Join short texts of the same folder until they are long enough for a document."""
    done: list[list[Named]] = []
    pending: dict[str, list[Named]] = {}
    for named in short:
        source = named[0].partition("/")[0] if "/" in named[0] else ""
        group = pending.setdefault(source, [])
        group.append(named)
        if sum(len(text) for _, text in group) >= need:
            done.append(pending.pop(source))
    joined = []
    for group in [*done, *pending.values()]:  # unfinished groups may suffice: `need` has a margin
        (first, _), *others = group
        name = first + (f" and {len(others)} more" if others else "")
        joined.append((name, SEPARATOR.join(text for _, text in group)))
    return joined


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without the special tokens that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
