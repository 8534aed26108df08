"""The lab's text: a corpus split into train and test, training windows, and test excerpts.

Tokens are bytes, and byte 0 ends a document. One document in ten is for the test, picked by a hash
of its name alone, so the split is the same on every machine and in every order of reading. Windows
are cut from the joined documents at places that depend on the seed and the step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from os import fsencode
from pathlib import Path
from platform import python_version

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from longitude.core.validate import UserError, short
from longitude.training.distributed import generator
from longitude.training.sources import (
    Document,
    from_dataset,
    from_paths,
    is_dataset,
    standard_library,
)

END = b"\0"
ONE_IN = 10  # documents for the test


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and to test on. The fingerprint is that of all names and contents."""

    train: tuple[bytes, ...] = field(repr=False)
    test: tuple[bytes, ...] = field(repr=False)
    fingerprint: str
    name: str


def gather(sources: Sequence[str] | None = None) -> Corpus:
    """The corpus of some files, folders or datasets; without any, Python's standard library."""
    if not sources:
        own = f"the standard library of Python {python_version()}"
        return _corpus(standard_library(), own)
    sources = [sources] if isinstance(sources, str) else sources
    names = [source for source in sources if is_dataset(source)]
    paths = [source for source in sources if source not in names]
    # paths first: a mistake in one should not have to wait for a download
    documents = from_paths(paths) + [d for name in dict.fromkeys(names) for d in from_dataset(name)]
    called = [source if source in names else Path(source).resolve().name for source in sources]
    return _corpus(documents, short(", ".join(called)))


class Stream:
    """Documents joined into one row of bytes, each ended by a NUL, and windows cut from it."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self.tokens = _tokens(_joined(documents))

    def batch(
        self, seed: int, step: int, size: int, length: int, rows: slice = slice(None)
    ) -> Int64[Tensor, "rows window"]:
        """Windows of `length` inputs and one token more, the last target.

        `size` windows are drawn, whoever asks; `rows` picks those that this process wants.
        """
        places = self._places(length)
        starts = torch.randint(places, (size,), generator=generator(seed, step, "windows"))
        return self.tokens.unfold(0, length + 1, 1)[starts[rows]].long()

    def _places(self, length: int) -> int:
        """How many places a window can start at."""
        if len(self.tokens) <= length:
            raise UserError(
                f"the training text has {len(self.tokens)} bytes, but a window of {length} takes "
                f"{length + 1}: give more text or a shorter window."
            )
        return len(self.tokens) - length


def windows(corpus: Corpus, length: int) -> Stream:
    """The training stream, once it is sure that a window of this length fits in."""
    stream = Stream(corpus.train)
    stream._places(length)
    return stream


def excerpts(
    corpus: Corpus, length: int, count: int, seed: int
) -> Int64[Tensor, "{count} {length}"]:
    """Pieces of the test text: none overlap, each lies within one document, and no document gives
    two before each that is long enough has given one. Where the documents are too short for that,
    pieces spread over the joined text."""
    rng = generator(seed, purpose="excerpts")
    enough = [document for document in corpus.test if len(document) >= length]
    room = [len(document) // length for document in enough]
    if sum(room) < count:
        return _spread(_tokens(_joined(corpus.test)), length, count, rng)
    pieces = [
        _apart(_tokens(document), length, share, rng)
        for document, share in zip(enough, _shares(room, count, rng), strict=True)
        if share
    ]
    return torch.cat(pieces)


def _corpus(documents: list[Document], name: str) -> Corpus:
    documents = sorted(documents)
    train = tuple(d.text for d in documents if not for_test(d.name))
    test = tuple(d.text for d in documents if for_test(d.name))
    if not train or not test:
        train, test = _cut(tuple(d.text for d in documents))
    return Corpus(train, test, _fingerprint(documents), name)


def for_test(name: str) -> bool:
    """Whether the document of this name is for the test, on every machine."""
    return int.from_bytes(sha256(fsencode(name)).digest()[:8], "big") % ONE_IN == 0


def _cut(texts: tuple[bytes, ...]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Too few documents to split by name: the last tenth of the joined text is for the test."""
    joined = END.join(texts)
    at = len(joined) * (ONE_IN - 1) // ONE_IN
    train, test = (tuple(filter(None, s.split(END))) for s in (joined[:at], joined[at:]))
    return train, test


def _fingerprint(documents: list[Document]) -> str:
    digest = sha256()
    for name, text in ((fsencode(d.name), d.text) for d in documents):
        digest.update(b"%d %d " % (len(name), len(text)) + name + text)
    return digest.hexdigest()


def _joined(documents: Sequence[bytes]) -> bytes:
    return b"".join(document + END for document in documents)


def _tokens(text: bytes) -> UInt8[Tensor, " n"]:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()


def _shares(room: list[int], count: int, rng: torch.Generator) -> list[int]:
    """How many excerpts each document gives, in turns, none more than it has room for."""
    shares = [0] * len(room)
    while count:
        for d in torch.randperm(len(room), generator=rng).tolist():
            if count and shares[d] < room[d]:
                shares[d] += 1
                count -= 1
    return shares


def _apart(
    tokens: UInt8[Tensor, " n"], length: int, count: int, rng: torch.Generator
) -> Int64[Tensor, "{count} {length}"]:
    """Excerpts at random places that do not overlap: what they leave over is shared out as gaps."""
    left = len(tokens) - count * length
    gaps = torch.randint(left + 1, (count,), generator=rng).sort().values
    return tokens.unfold(0, length, 1)[gaps + length * torch.arange(count)].long()


def _spread(
    tokens: UInt8[Tensor, " n"], length: int, count: int, rng: torch.Generator
) -> Int64[Tensor, "{count} {length}"]:
    """Excerpts from the whole stream, one from each of `count` equal stretches of starts."""
    places = len(tokens) - length + 1
    if places < 1:
        raise UserError(
            f"the test text has {len(tokens)} bytes, but an excerpt takes {length}: "
            f"give more text or a shorter length."
        )
    shares = torch.arange(count) + torch.rand(count, generator=rng, dtype=torch.float64)
    return tokens.unfold(0, length, 1)[(shares * places / count).long()].long()
