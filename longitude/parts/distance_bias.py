"""Biases by distance: one number for each distance and head, or for each distance, head and query.

Where positions are contiguous there are no more distances than tokens: the term is then a table,
computed once per call, and the bias of a pair is a lookup. Gradients flow into the table, and from
there into the few weights behind it. Viewed along its diagonals, a table is the bias of every pair,
without a copy: this is how blocks of queries run on a CPU, for terms that are `ByDiagonals`.
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

# a slice of keys, the last key first, and what is added to their scores: (b|1, h, q|1, keys)
Addend = tuple[slice, Tensor]
Entry = Callable[[Tensor], Tensor]  # maps distances to entries of a table


class ByDiagonals(Protocol):
    """A term that a block of queries can add as tables, if positions are contiguous."""

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that its gradients flow into."""
        ...

    def with_sources(self, sources: tuple[Tensor, ...]) -> "ByDiagonals":
        """The same term with other source tensors, and with separate scratch memory."""
        ...

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two ranges, the least first: (h, r), or for each query
        (b|1, h, q, r)."""
        ...

    def addends(self, q: range, k: range) -> list[Addend]:
        """Values to add besides the table."""
        ...

    def far(self, ahead: bool) -> tuple[Tensor, Tensor | None]:
        """The constant term beyond the part's `flat_beyond`: a number for each query (b|1 h n|1),
        and for each head a vector whose products with keys are added, if there are any."""
        ...


@dataclass(frozen=True, eq=False)
class ByDistance:
    """The term value(h, i - j), with positions (b|1, n) gathered at the given indices.

    `rows` is set if the term looks up a row of it, with a number per head. The part's `entry` maps
    distances to rows; it depends on no weight, so the mapping can be cached.
    """

    q_pos: Tensor
    k_pos: Tensor
    value: Callable[[Index, Tensor], Tensor]
    cheap: bool = False  # cheaper to compute than to look up
    rows: Tensor | None = None
    slices: bool = False  # value accepts a slice for h, which copies nothing

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return self.value(h, at(self.q_pos, b, i) - at(self.k_pos, b, j))

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two contiguous ranges, the least first: (h, r)."""
        device = self.q_pos.device
        away = torch.arange(q[0] - k[-1], q[-1] - k[0] + 1, device=device)
        return self.of_heads(heads, away).expand(-1, len(away))

    def of_heads(self, heads: int, away: Tensor) -> Tensor:
        """The term of all heads at the given distances: (h|1, r)."""
        all_heads: Any = (slice(None), None)
        h = all_heads if self.slices else torch.arange(heads, device=away.device)[:, None]
        return self.value(h, away[None])

    def dense(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every pair of two contiguous ranges: (h, q, k), each row one step further
        along the table."""
        steps = self.table(heads, q, k).flip(1).unfold(1, len(k), 1)
        return steps.flip(1)


@lru_cache(maxsize=1024)
def term_type(part: HasWeights) -> type | None:
    """The type of a bias's term, from a call of the smallest sizes; None if it needs gates."""
    if getattr(part, "gated", False):
        return None
    dims, x = Dims(16, 2, 8), torch.zeros(1, 2, 1, 8)
    pos = torch.zeros(1, 1, dtype=torch.int64)
    weights = part.init(dims, torch.Generator().manual_seed(0))
    return type(part.term(x, x, pos, pos, weights, 1.0))  # type: ignore[attr-defined]


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
    """Memory that is reused for the tables of successive blocks of queries, so that its pages are
    mapped once: mapping them takes as long as computing the numbers."""

    memory: Tensor | None = None

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.memory is None or self.memory.numel() < size:
            self.memory = like.new_empty(size)
        return self.memory[:size].view(shape)


@dataclass(frozen=True, eq=False)
class ByRow:
    """The term queries[b, h, i]·vectors[h, entry(i - j)], plus keys[b, h, j] if given: each key's
    product with its head's vector in `key_vectors`.

    The product of a pair is looked up, in `rows` or along the diagonals of a `table`.
    """

    q_pos: Tensor
    k_pos: Tensor
    queries: Tensor
    vectors: Tensor  # (h|1, r, d)
    entry: Entry
    keys: Tensor | None = None
    key_vectors: Tensor | None = None  # (h, d)
    wide: bool = False  # products are float32 at least, unless gradients are needed
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
        """Bytes of one query's products with all vectors."""
        size = self.queries.element_size()
        return self.vectors.shape[1] * (max(4, size) if self.wide else size)

    def for_heads(self, heads: slice) -> "ByRow":
        """The same term for a slice of the heads."""
        fields = {"queries": self.queries[:, heads], "vectors": some_heads(self.vectors, heads)}
        if self.keys is not None:
            fields["keys"] = self.keys[:, heads]
        if self.key_vectors is not None:
            fields["key_vectors"] = self.key_vectors[heads]
        return replace(self, **fields)

    def behind(self) -> "ByRow":
        """The same term for keys not ahead of their queries, without the vectors of keys ahead."""
        kept, entry = entries_behind(self.entry, self.vectors.shape[1])
        return replace(self, vectors=self.vectors[:, kept], entry=entry)

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        r = self.entry(at(self.q_pos, b, i) - at(self.k_pos, b, j))
        product = pick(self.rows, b, h, i, r)
        return product if self.keys is None else product + self.keys[b, h, j]

    def far(self, ahead: bool) -> tuple[Tensor, Tensor | None]:
        vector = self.vectors[:, last_entry(self.entry, ahead), None]
        return self._products(vector)[..., 0], self.key_vectors

    @property
    def sources(self) -> tuple[Tensor, ...]:
        tensors = (self.queries, self.vectors, self.keys, self.key_vectors)
        return tuple(x for x in tensors if x is not None)

    def with_sources(self, sources: tuple[Tensor, ...]) -> "ByRow":
        names = ("queries", "vectors", "keys", "key_vectors")
        return replace(self, **dict(zip(names, sources, strict=False)), scratch=Scratch())

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """Products of all distances between two contiguous ranges, the least first: (b, h, q, r).
        Distances before the first change of entries share one, as do those after the last."""
        entries = self.entry(torch.arange(q[0] - k[-1], q[-1] - k[0] + 1))
        steps, first = entries.diff(), q[0] - int(self.q_pos[0, 0])
        changes = steps.nonzero().flatten().tolist() or [0]
        a, b = changes[0], min(changes[-1] + 2, len(entries))
        rising = bool((steps[a : b - 1] == 1).all())
        index = slice(int(entries[a]), int(entries[b - 1]) + 1) if rising else entries[a:b]
        queries, vectors = self.queries[:, :, first : first + len(q)], self.vectors[:, index].mT
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
    """A slice of the heads of a tensor (h|1, …), whose single head stands for all."""
    return x if x.shape[0] == 1 else x[heads]


def entries_behind(entry: Entry, entries: int) -> tuple[slice, Entry]:
    """The entries of keys not ahead of their queries, and the map from distances into them."""
    ends = entry(torch.tensor([0, FAR])).clamp(max=entries - 1)
    first, last = sorted(ends.tolist())
    return slice(first, last + 1), lambda r: entry(r).clamp(first, last) - first


def last_entry(entry: Entry, ahead: bool) -> int:
    """The entry shared by all keys far behind, or far ahead."""
    return int(entry(torch.tensor([-FAR if ahead else FAR])))


def along_diagonals(table: Tensor, keys: int) -> Tensor:
    """View a table as the value of every pair of queries and keys, the last key first: (b|1, h, q,
    keys). The table holds all distances from the least on, for each query or for all at once."""
    if table.dim() == 2:
        return table.unfold(1, keys, 1)[None]
    b, h, n, distances = table.shape
    stride = n * distances
    return table.contiguous().as_strided((b, h, n, keys), (h * stride, stride, distances + 1, 1))


def pick(table: Tensor, b: Index, h: Index, i: Index, r: Tensor) -> Tensor:
    """Return table[b, h, i, r]. Over the full grid of a call it is a gather, whose gradient is a
    scatter-add: that of indexing is sorted first, which takes a GPU ten times as long."""
    sizes = (b.numel(), h.numel(), i.numel())
    if r.dim() == 4 and sizes == table.shape[:3] and b.dim() == h.dim() == i.dim() == 4:
        return table.gather(-1, r.expand(*sizes, r.shape[-1]))
    return table[b, h, i, r]


def at(pos: Tensor, b: Index, i: Index) -> Tensor:
    """Positions (b|1, n) at batch b and index i; one row serves every batch."""
    return pos[0][i] if pos.shape[0] == 1 else pos[b, i]
