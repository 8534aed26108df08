"""Rows of tokens that go on with the same tokens: read once, in groups, each with its own cache.

The beginning that all rows share is read once, and its cache repeated. The rest is read with the
padding on the right, where a causal model needs no mask for it, up to each row's last token; then
the padding is moved to the left, and every further token is one forward of a column. Models whose
cache can't be moved about read rows of one length together instead.

Caches beyond `room` bytes are not kept: such rows are read again for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.eval.prefill import chunk_for, input_device, lm_head
from longitude.reading.forward import fresh, logits, movable, moved, read, repeated, size

AT_ONCE = 2**14  # tokens of rows that are read together


@dataclass(eq=False)
class Group:
    """Rows that run together, as tokens behind the shared beginning."""

    places: list[int]
    rows: list[list[int]]
    cache: Any = None
    lengths: list[int] = field(default_factory=list)  # tokens of each row in the cache

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))


class Rows:
    """Several rows of one model, read up to their ends."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        *,
        at_once: int = AT_ONCE,
        room: int | None = None,
    ) -> None:
        self.model, self.room = model, room
        self.said: list[int] = []  # the tokens that all rows went on with
        self.count, self.held = len(rows), 0  # rows, and bytes of the caches that are kept
        full = [list(row) for row in rows]
        self.movable = movable(model)
        shared = _alike(full) if self.movable and len(full) > 1 else 0
        self.head = full[0][:shared]
        self.head_cache = self._read_head()
        self.groups = self._grouped([row[shared:] for row in full], at_once)

    def first(self) -> Float[Tensor, "rows v"]:
        """What each row's last token is followed by."""
        return self._all(self._open)

    def next(self, token: int) -> Float[Tensor, "rows v"]:
        """The same after one token more in every row."""
        self.said.append(token)
        return self._all(lambda group: self._further(group, token))

    def _all(self, ask: Any) -> Tensor:
        found: dict[int, Tensor] = {}
        for group in self.groups:
            found |= zip(group.places, ask(group), strict=True)
        return torch.stack([found[place] for place in range(self.count)])

    def _grouped(self, rows: list[list[int]], at_once: int) -> list[Group]:
        """Rows of like length together, no more than `at_once` tokens of them."""
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        groups: list[Group] = []
        for place in order:
            last = groups[-1] if groups else None
            fits = last is not None and (len(last.rows) + 1) * last.longest <= at_once
            alike = last is not None and (self.movable or len(rows[place]) == last.longest)
            if last is None or not (fits and alike):
                groups.append(Group([place], [rows[place]]))
            else:
                last.places.append(place)
                last.rows.append(rows[place])
        return groups

    def _read_head(self) -> Any:
        if not self.head:
            return None
        cache = fresh(self.model)
        self._read(torch.tensor([self.head]), 0, cache)
        return cache

    def _read(self, ids: Tensor, first: int, cache: Any) -> None:
        """Read rows into a cache, as many tokens at a time as fit."""
        ids = ids.to(input_device(self.model))
        chunk = chunk_for(self.model, *ids.shape, lm_head(self.model))  # type: ignore[misc]
        for piece in ids.split(chunk, 1):
            at = torch.arange(first, first + piece.shape[1], device=ids.device)
            read(self.model, piece, at.expand(len(ids), -1), cache)
            first += piece.shape[1]

    def _open(self, group: Group) -> Tensor:
        """Read a group up to its rows' last tokens, then these; keep the cache if there is room."""
        rows = [row + self.said for row in group.rows]
        before = [len(row) - 1 for row in rows]
        widest = max(before)
        shared = self.head_cache
        cache = fresh(self.model) if shared is None else repeated(shared, len(rows))
        if widest:
            # padded with a token of its own: some models warn of the one that is called padding
            padded = [r[:-1] + r[-1:] * (widest - n) for r, n in zip(rows, before, strict=True)]
            self._read(torch.tensor(padded), len(self.head), cache)
            if self.movable:
                moved(cache, [widest - n for n in before])
        group.cache, group.lengths = cache, [len(self.head) + n for n in before]
        out = self._column(group, [row[-1] for row in rows])
        self._keep(group)
        return out

    def _keep(self, group: Group) -> None:
        taken = size(group.cache)
        if self.room is not None and self.held + taken > self.room:
            group.cache = None
        else:
            self.held += taken

    def _further(self, group: Group, token: int) -> Tensor:
        if group.cache is None:
            return self._open(group)
        return self._column(group, [token] * len(group.rows))

    def _column(self, group: Group, tokens: list[int]) -> Tensor:
        """One token of each row."""
        place = input_device(self.model)
        ids = torch.tensor(tokens, device=place)[:, None]
        lengths = torch.tensor(group.lengths, device=place)[:, None]
        mask, longest = None, max(group.lengths) + 1
        if min(group.lengths) < max(group.lengths):
            columns = torch.arange(longest, device=place)
            mask = (columns >= longest - 1 - lengths).long()
        out = logits(self.model, ids, lengths, group.cache, mask=mask)
        group.lengths = [n + 1 for n in group.lengths]
        return out


def _alike(rows: list[list[int]]) -> int:
    """How many first tokens all rows share, of those before their last ones."""
    shared = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, zip(*rows, strict=False)))
    return min(shared, min(map(len, rows)) - 1)
