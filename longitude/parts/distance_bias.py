"""Biases by distance: a number for each head, or for each head and query.

Where positions are contiguous there are no more distances than tokens: the term is then a table,
computed once per call, and the bias of a pair is a lookup. Gradients flow into the table, and from
there into the few weights behind it. Along its diagonals a table is the bias of every pair, without
a copy: that is how blocks of queries run on a CPU, for terms that are `ByDiagonals`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from longitude.core.part import Dims, HasWeights, Index
from longitude.core.region import FAR

# numbers added to the scores of some keys, of which the last comes first: (b|1, h, q|1, keys)
Addend = tuple[slice, Tensor]
Entry = Callable[[Tensor], Tensor]  # of a table, for each distance


class ByDiagonals(Protocol):
    """A term that a block of queries can add as tables, of contiguous positions."""

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What its gradients flow into."""
        ...

    def with_sources(self, sources: tuple[Tensor, ...]) -> "ByDiagonals":
        """The same term of other values, with memory of its own."""
        ...

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two ranges, the least first: (h, r), or for each query
        (b|1, h, q, r)."""
        ...

    def addends(self, q: range, k: range) -> list[Addend]:
        """What is added beside the table."""
        ...

    def far(self, ahead: bool) -> tuple[Tensor, Tensor | None]:
        """Where it has gone flat: a number for each query (b|1 h n|1), and for each head a vector
        whose products with keys are added. Only of a part with an end, `flat_beyond`."""
        ...


@dataclass(frozen=True, eq=False)
class ByDistance:
    """The term value(h, i - j), with positions (b|1, n) gathered at the given indices.

    `rows` are given where the term is a row of theirs, a number a head, which the part's `entry`
    names for each distance: it depends on no weight, so it can be cached.
    """

    q_pos: Tensor
    k_pos: Tensor
    value: Callable[[Index, Tensor], Tensor]
    cheap: bool = False  # to compute rather than to look up
    rows: Tensor | None = None
    slices: bool = False  # value takes a slice for h, of which nothing is copied

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.value(h, at(self.q_pos, b, i) - at(self.k_pos, b, j))

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two contiguous ranges, the least first: (h, r)."""
        device = self.q_pos.device
        away = torch.arange(q[0] - k[-1], q[-1] - k[0] + 1, device=device)
        return self.of_heads(heads, away).expand(-1, len(away))

    def of_heads(self, heads: int, away: Tensor) -> Tensor:
        """The term of all heads at some distances: (h|1, r)."""
        every: Any = (slice(None), None)
        h = every if self.slices else torch.arange(heads, device=away.device)[:, None]
        return self.value(h, away[None])

    def dense(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every pair of two contiguous ranges: (h, q, k), each row a step along the
        table."""
        steps = self.table(heads, q, k).flip(1).unfold(1, len(k), 1)
        return steps.flip(1)


@lru_cache(maxsize=1024)
def term_type(part: HasWeights) -> type | None:
    """What kind of term a bias has, tried at its smallest; None if its gates are not known yet."""
    if getattr(part, "gated", False):
        return None
    dims, one = Dims(16, 2, 8), torch.zeros(1, 2, 1, 8)
    pos = torch.zeros(1, 1, dtype=torch.int64)
    weights = part.init(dims, torch.Generator().manual_seed(0))
    return type(part.term(one, one, pos, pos, weights, 1.0))  # type: ignore[attr-defined]


by_distance = ByDistance


@dataclass(frozen=True, eq=False)
class DistanceTable:
    """The term values[h, i - j - first]."""

    values: Tensor
    first: int

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def with_sources(self, sources: tuple[Tensor, ...]) -> "DistanceTable":
        return replace(self, values=sources[0])

    def table(self, heads: int, q: range, k: range) -> Tensor:
        return self.values[:, q[0] - k[-1] - self.first : q[-1] - k[0] + 1 - self.first]

    def addends(self, q: range, k: range) -> list[Addend]:
        return []

    def far(self, ahead: bool) -> tuple[Tensor, None]:
        return self.values[:, :1] if ahead else self.values[:, -1:], None


@dataclass(eq=False)
class Scratch:
    """Memory that the tables of one block of queries after another are written into: a system maps
    its pages once, which takes as long as the numbers themselves."""

    memory: Tensor | None = None

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.memory is None or self.memory.numel() < size:
            self.memory = like.new_empty(size)
        return self.memory[:size].view(shape)


@dataclass(frozen=True, eq=False)
class ByRow:
    """The term queries[b, h, i]·vectors[h, entry(i - j)], and keys[b, h, j] if given, each key's
    product with its head of `key_vectors`.

    A pair looks its product up: in `rows`, or along the diagonals of a `table`.
    """

    q_pos: Tensor
    k_pos: Tensor
    queries: Tensor
    vectors: Tensor  # (h|1, r, d)
    entry: Entry
    keys: Tensor | None = None
    key_vectors: Tensor | None = None  # (h, d)
    wide: bool = False  # products are float32 at least, but for gradients
    scratch: Scratch = field(default_factory=Scratch)

    @cached_property
    def rows(self) -> Tensor:
        """The products of each query with all vectors."""
        return self._products(self.vectors)

    def _products(self, vectors: Tensor) -> Tensor:
        x, dtype = self.queries, torch.promote_types(self.queries.dtype, torch.float32)
        graded = torch.is_grad_enabled() and (x.requires_grad or vectors.requires_grad)
        if not self.wide or x.dtype == dtype or graded or torch.compiler.is_compiling():
            return x @ vectors.mT
        if not x.is_cuda:
            return x.to(dtype) @ vectors.to(dtype).mT
        every = vectors.expand(*x.shape[:2], -1, -1).flatten(0, 1)
        return torch.bmm(x.flatten(0, 1), every.mT, out_dtype=dtype).unflatten(0, x.shape[:2])

    @property
    def query_bytes(self) -> int:
        """Of the products that a query has."""
        size = self.queries.element_size()
        return self.vectors.shape[1] * (max(4, size) if self.wide else size)

    def for_heads(self, heads: slice) -> "ByRow":
        """The same for some heads."""
        own = {"queries": self.queries[:, heads], "vectors": some_heads(self.vectors, heads)}
        if self.keys is not None:
            own["keys"] = self.keys[:, heads]
        if self.key_vectors is not None:
            own["key_vectors"] = self.key_vectors[heads]
        return replace(self, **own)

    def behind(self) -> "ByRow":
        """The same for keys that are not ahead of their queries, without the others' vectors."""
        some, entry = entries_behind(self.entry, self.vectors.shape[1])
        return replace(self, vectors=self.vectors[:, some], entry=entry)

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        r = self.entry(at(self.q_pos, b, i) - at(self.k_pos, b, j))
        found = pick(self.rows, b, h, i, r)
        return found if self.keys is None else found + self.keys[b, h, j]

    def far(self, ahead: bool) -> tuple[Tensor, Tensor | None]:
        vector = self.vectors[:, last_entry(self.entry, ahead), None]
        return self._products(vector)[..., 0], self.key_vectors

    @property
    def sources(self) -> tuple[Tensor, ...]:
        read = (self.queries, self.vectors, self.keys, self.key_vectors)
        return tuple(x for x in read if x is not None)

    def with_sources(self, sources: tuple[Tensor, ...]) -> "ByRow":
        names = ("queries", "vectors", "keys", "key_vectors")
        return replace(self, **dict(zip(names, sources, strict=False)), scratch=Scratch())

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The products of every distance between two contiguous ranges, the least first:
        (b, h, q, r). Distances before the first change of entries, or after the last, share one."""
        entries = self.entry(torch.arange(q[0] - k[-1], q[-1] - k[0] + 1))
        steps, first = entries.diff(), q[0] - int(self.q_pos[0, 0])
        changes = steps.nonzero().flatten().tolist() or [0]
        a, b = changes[0], min(changes[-1] + 2, len(entries))
        rising = bool((steps[a : b - 1] == 1).all())
        some = slice(int(entries[a]), int(entries[b - 1]) + 1) if rising else entries[a:b]
        queries, vectors = self.queries[:, :, first : first + len(q)], self.vectors[:, some].mT
        differentiable = torch.is_grad_enabled() and (queries.requires_grad | vectors.requires_grad)
        shape = (*queries.shape[:3], len(entries))
        out = None if differentiable else self.scratch(queries, *shape)
        if b - a == len(entries):
            return torch.matmul(queries, vectors, out=out)
        products = queries @ vectors
        before = products[..., :1].expand(*shape[:3], a)
        after = products[..., -1:].expand(*shape[:3], len(entries) - b)
        return torch.cat([before, products, after], -1, out=out)

    def addends(self, q: range, k: range) -> list[Addend]:
        if self.keys is None:
            return []
        first = k[0] - int(self.k_pos[0, 0])
        return [(slice(None), self.keys[:, :, None, first : first + len(k)].flip(-1))]


def some_heads(x: Tensor, heads: slice) -> Tensor:
    """Some heads of what is (h, …), or one for all."""
    return x if x.shape[0] == 1 else x[heads]


def entries_behind(entry: Entry, entries: int) -> tuple[slice, Entry]:
    """The entries of keys that are not ahead of their queries, and each distance's among them."""
    ends = entry(torch.tensor([0, FAR])).clamp(max=entries - 1)
    first, last = sorted(ends.tolist())
    return slice(first, last + 1), lambda r: entry(r).clamp(first, last) - first


def last_entry(entry: Entry, ahead: bool) -> int:
    """The entry of all keys far behind, or far ahead."""
    return int(entry(torch.tensor([-FAR if ahead else FAR])))


def along_diagonals(table: Tensor, keys: int) -> Tensor:
    """The entry of every pair of a range of queries and one of keys, the last key first, as a view
    (b|1, h, q, keys). A table holds all distances from the least, for each query or for all."""
    if table.dim() == 2:
        return table.unfold(1, keys, 1)[None]
    b, h, n, distances = table.shape
    each = n * distances
    return table.contiguous().as_strided((b, h, n, keys), (h * each, each, distances + 1, 1))


def pick(table: Tensor, b: Index, h: Index, i: Index, r: Tensor) -> Tensor:
    """table[b, h, i, r]. Over the full grid of a call it is a gather, whose gradient adds up as it
    comes: that of an index is sorted first, which takes a GPU ten times as long."""
    sizes = (b.numel(), h.numel(), i.numel())
    if r.dim() == 4 and sizes == table.shape[:3] and b.dim() == h.dim() == i.dim() == 4:
        return table.gather(-1, r.expand(*sizes, r.shape[-1]))
    return table[b, h, i, r]


def at(pos: Tensor, b: Index, i: Index) -> Tensor:
    """Positions (b|1, n) at batch b and index i; one row serves every batch."""
    return pos[0][i] if pos.shape[0] == 1 else pos[b, i]
