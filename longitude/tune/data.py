"""Training text as sequences: documents joined into one row of tokens, windows cut from it.

A window that runs over several documents is packed: `segments` says which tokens belong together,
tokens see their own document only, and no loss is taken where one document would have to foretell
the next. Where most text stands in documents shorter than a sequence, that would leave nothing long
to learn from; then they are simply read one after another, as `extend` reads them, and as drawn
positions need it. What a step sees depends on the seed and the step alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.fields import Mistake
from longitude.lab.chance import generator
from longitude.lab.text import gather
from longitude.part import Positions
from longitude.tune.positions import drawn, positions


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a step, and the weight of all rows of all processes together."""

    tokens: Int[Tensor, "rows n"]
    targets: Int[Tensor, "rows n"]
    weights: Float[Tensor, "rows n"]
    segments: Int[Tensor, "rows n"]
    pos: Int[Tensor, "rows n"]
    total: float

    def rows(self, some: slice, device: torch.device) -> Batch:
        """Some of its rows, on a device."""
        parts = (self.tokens, self.targets, self.weights, self.segments, self.pos)
        return Batch(*(x[some].to(device) for x in parts), total=self.total)

    @property
    def packed(self) -> bool:
        """Whether any row holds more than one document."""
        return bool((self.segments != self.segments[:, :1]).any())


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens of all documents, and which document each is of."""

    tokens: Int[Tensor, " n"]
    owner: Int[Tensor, " n"]
    name: str
    fingerprint: str
    apart: bool  # whether documents of one window are kept from seeing each other

    def batch(self, part: Positions, rows: int, length: int, seed: int, step: int) -> Batch:
        """The windows of a step, `length` inputs each."""
        rng = generator(seed, step, "windows")
        starts = torch.randint(len(self.tokens) - length, (rows,), generator=rng)
        window = self.tokens.unfold(0, length + 1, 1)[starts].long()
        owner = self.owner.unfold(0, length + 1, 1)[starts].long()
        if not self.apart:
            owner = torch.zeros_like(owner)
        segments = owner[:, :-1] - owner[:, :1]
        weights = (owner[:, 1:] == owner[:, :-1]).float()
        pos = positions(part, segments, seed, step)
        total = float(weights.sum(dtype=torch.float64))
        return Batch(window[:, :-1], window[:, 1:], weights, segments, pos, total)


def stream(
    sources: Sequence[str], tokenizer: Any, part: Positions, length: int, most: int, seed: int
) -> Stream:
    """The training text of some files, folders or datasets (without any, Python's standard library
    but for the tenth that is for tests): as many documents as make `most` tokens, in an order that
    follows from the seed."""
    corpus = gather(list(sources) or None)
    documents = [text.decode() for text in corpus.train]
    random.Random(f"tune {seed}").shuffle(documents)
    found: list[Tensor] = []
    enough, have = max(most, 2 * length), 0
    for ids in _cut(documents, tokenizer):
        found.append(ids)
        have += len(ids)
        if have > enough:
            break
    tokens = torch.cat(found) if found else torch.empty(0, dtype=torch.int32)
    if len(tokens) <= length:
        raise Mistake(
            f"the text for training has {len(tokens):,} tokens, but one sequence takes "
            f"{length + 1:,}: give more with --text, or shorter sequences."
        )
    sizes = torch.tensor([len(ids) for ids in found])
    owner = torch.repeat_interleave(torch.arange(len(found), dtype=torch.int32), sizes)
    long = int(sizes[sizes > length].sum())
    apart = not drawn(part) and 2 * long >= len(tokens)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    return Stream(tokens, owner, corpus.name, digest, apart)


def _cut(documents: Sequence[str], tokenizer: Any) -> Iterator[Tensor]:
    """Each document as tokens, with the one that ends it, if the tokenizer has one."""
    end = getattr(tokenizer, "eos_token_id", None)
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        yield torch.tensor([*ids, *([] if end is None else [end])], dtype=torch.int32)
