"""Training sequences of `tune`: tokenized documents, windows cut from them, and their positions.

Positions come from a position policy: `sequential()`, `pose(target, chunks)` (Zhu et al. 2023,
arXiv:2309.10400), `randomized(target)` (Ruoss et al. 2023, arXiv:2305.16843), `e2_llm(window)` (Liu
et al. 2024, arXiv:2401.06951), `cream(target)` (Wu et al. 2024, arXiv:2406.07138) or `random_steps`
(Pal et al. 2023, arXiv:2308.10882). All but the first train positions up to the target on short
sequences, drawn for each row separately.

A window over several documents is packed: positions restart at 0 in each document, tokens attend
within their document only, and no loss is taken where one document would have to predict the next.
If most text is in documents shorter than a sequence, packing would leave nothing long to learn
from; then documents are concatenated, as `extend` reads them, and so they are with drawn positions.

Mixed windows (Shang et al. 2025, LongRoPE2, arXiv:2502.20082): a share of the steps reads the same
number of tokens in packed windows of the trained length, the others full sequences over all
documents. Frequencies that depend on the length are then trained below and above the window.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Real
from torch import Tensor

from longitude.core.part import Positions, as_tensor
from longitude.core.validate import UserError, shown
from longitude.parts import Cream, E2Llm, Pose, Randomized, RandomSteps, Sequential
from longitude.training.data import gather, windows
from longitude.training.distributed import generator
from longitude.training.loop import Batch

CHUNKS = 2  # of PoSE, as in the paper
AT_ONCE = 64  # documents per call, which a fast tokenizer spreads over all cores


def position_policy(text: str, target: int, length: int, trained: int | None = None) -> Positions:
    """Return the policy of a name, checked to place `length` tokens below the target. `trained` is
    the model's window, `length` by default."""
    window = trained or length
    policies: dict[str, Positions] = {
        "order": Sequential(), "randomized": Randomized(target), "cream": Cream(target),
        "e2_llm": E2Llm(window, scale=target / window), "random_steps": RandomSteps(target),
        "pose": Pose(target, CHUNKS),
    }  # fmt: skip
    name, _, chunks = text.strip().removesuffix(")").partition("(")
    if name not in policies or (chunks and not (name == "pose" and chunks.isdecimal())):
        raise UserError(
            f"positions are taken in order or drawn, but got {shown(text)}: write "
            f"{', '.join(policies)}, or pose(4) for four chunks."
        )
    policy = Pose(target, int(chunks)) if chunks else policies[name]
    policy.ids(length, rng=generator(0))  # raises if they do not fit
    return policy


def positions(
    policy: Positions, documents: Int[Tensor, "rows n"], seed: int, step: int
) -> Real[Tensor, "rows n"]:
    """Return the positions of a step's rows; `documents` is the document index of each token.
    Sequential positions count from 0 in every document; drawn ones span a full row."""
    rows, n = documents.shape
    if not isinstance(policy, Sequential):
        rng = generator(seed, step, "positions")
        return torch.stack([as_tensor(policy.ids(n, rng=rng)) for _ in range(rows)])
    index = torch.arange(n).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens of all documents, the document index of each, and the position policy."""

    tokens: Int[Tensor, " n"]
    document: Int[Tensor, " n"]
    name: str
    fingerprint: str
    policy: Positions
    packed: bool  # whether documents of one window are separated
    short: tuple[float, int] | None = None  # the share of steps on shorter windows, and their size

    def batch(self, rows: int, length: int, seed: int, step: int) -> Batch:
        """Return the windows of a step: `length` inputs each, or as many tokens in shorter ones."""
        packed = self.packed
        if self.short is not None:
            share, size = self.short
            drawn = torch.rand((), generator=generator(seed, step, "window"))
            packed = packed and float(drawn) < share
            if float(drawn) < share:
                rows, length = rows * max(1, length // size), size
        window = windows(self.tokens, length, rows, seed, step)
        document = torch.zeros_like(window)
        if packed:
            document = windows(self.document, length, rows, seed, step)
        weights = (document[:, 1:] == document[:, :-1]).float()
        pos = positions(self.policy, document[:, :-1], seed, step)
        total = float(weights.sum(dtype=torch.float64))
        return Batch(window[:, :-1], window[:, 1:], weights, pos, total)


def token_stream(
    sources: Sequence[str], tokenizer: Any, policy: Positions, length: int, most: int, seed: int
) -> TokenStream:
    """Tokenize the training text of files, folders or datasets (by default, Python's standard
    library), without the tenth that is held out. Documents are taken in an order that depends on
    the seed until there are `most` tokens; each ends with the tokenizer's end token, if any."""
    corpus = gather(list(sources) or None)
    texts = [text.decode() for text in corpus.train]
    random.Random(f"tune {seed}").shuffle(texts)
    eos = getattr(tokenizer, "eos_token_id", None)
    documents = [torch.empty(0, dtype=torch.int32)]
    remaining = max(most, 2 * length)
    for start in range(0, len(texts), AT_ONCE):
        batch = texts[start : start + AT_ONCE]
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False).input_ids:
            if remaining >= 0:
                ids = [*ids] if eos is None else [*ids, eos]
                documents.append(torch.tensor(ids, dtype=torch.int32))
                remaining -= len(ids)
        if remaining < 0:
            break
    tokens, sizes = torch.cat(documents), torch.tensor([len(ids) for ids in documents[1:]])
    if len(tokens) <= length:
        raise UserError(
            f"the text for training has {len(tokens):,} tokens, but one sequence takes "
            f"{length + 1:,}: give more with --text, or shorter sequences."
        )
    document = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
    long_tokens = int(sizes[sizes > length].sum())
    packed = isinstance(policy, Sequential) and 2 * long_tokens >= len(tokens)
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]
    return TokenStream(tokens, document, corpus.name, digest, policy, packed)
