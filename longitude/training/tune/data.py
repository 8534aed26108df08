"""Which positions a training sequence takes: in order, PoSE's skips, or sorted draws.

Each is a part of the library: `sequential()`, `pose(target, chunks)` (Zhu et al. 2023,
arXiv:2309.10400) and `randomized(target)` (Ruoss et al. 2023, arXiv:2305.16843). The last two train
positions up to the target on short sequences. Every row has a draw of its own, which follows from
the seed, the step and the row alone. In order, a document that is packed into a row begins at 0.

Training text as sequences: documents joined into one row of tokens, windows cut from it.

A window that runs over several documents is packed: `segments` says which tokens belong together,
tokens see their own document only, and no loss is taken where one document would have to foretell
the next. Where most text stands in documents shorter than a sequence, that would leave nothing long
to learn from; then they are simply read one after another, as `extend` reads them, and as drawn
positions need it. What a step sees depends on the seed and the step alone.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Positions, as_tensor
from longitude.core.validate import UserError, shown
from longitude.parts import Pose, Randomized, Sequential
from longitude.training.distributed import generator
from longitude.training.lab.text import gather

CHUNKS = 2  # the paper's


def policy(written: str, target: int, length: int) -> Positions:
    """The part that a word asks for, sure to place `length` tokens below the target."""
    match = re.fullmatch(r"(order|randomized|pose)(?:\((\d+)\))?", written.strip())
    if match is None or (match[2] and match[1] != "pose"):
        raise UserError(
            f"positions are taken in order, by pose or randomized, but got {shown(written)}: write "
            f"order, pose, pose(4) for four chunks, or randomized."
        )
    if match[1] == "order":
        return Sequential()
    made = Randomized(target) if match[1] == "randomized" else Pose(target, int(match[2] or CHUNKS))
    made.ids(length, rng=generator(0))  # what does not fit is told here
    return made


def drawn(part: Positions) -> bool:
    """Whether positions are drawn, and so don't tell where a document begins."""
    return not isinstance(part, Sequential)


def in_order(segments: Int[Tensor, "rows n"]) -> Int[Tensor, "rows n"]:
    """Positions that count from 0 in every document."""
    n = segments.shape[1]
    index = torch.arange(n).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def positions(
    part: Positions, segments: Int[Tensor, "rows n"], seed: int, step: int
) -> Int[Tensor, "rows n"]:
    """The positions of a step's rows; drawn ones run over a whole row."""
    if not drawn(part):
        return in_order(segments)
    rows, n = segments.shape
    rng = generator(seed, step, "positions")
    return torch.stack([as_tensor(part.ids(n, rng=rng)) for _ in range(rows)])


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
        raise UserError(
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
