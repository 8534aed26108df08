"""Biases that read q and k: products with a vector for each distance, as in Shaw's,
DeBERTa's and Transformer-XL's attention. Site ⑤.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from longitude.core.part import (
    Bias,
    Choice,
    Dims,
    Index,
    K,
    Q,
    Rows,
    Term,
    Weights,
    part,
    train_defaults,
)
from longitude.core.validate import NonNegativeInt, PositiveFloat, PositiveInt, UserError
from longitude.parts.distance_bias import (
    Addend,
    ByRow,
    at,
    entries_behind,
    last_entry,
    some_heads,
)
from longitude.parts.embeddings import sinusoid


@part("shaw", site="bias", paper="Shaw et al. 2018, arXiv:1803.02155")
class Shaw(Bias):
    """Shaw's relative positions: keys (and values) add a learned vector for the clipped
    offset.

        score(i, j) = q_i·(k_j + aK[r]) / √d,  out_i = Σ_j α_ij (v_j + aV[r]),
        r = clip(j - i, -c, c)

    Shaw et al. 2018, "Self-Attention with Relative Position Representations"
    (arXiv:1803.02155). Site ⑤. The key side is a term like any other; the value side needs the
    full row of attention weights, so it runs eagerly only. Tables are shared by the heads.
    """

    clip: PositiveInt
    values: bool = False
    integer_positions: ClassVar[bool] = True

    @property
    def flat_beyond(self) -> int | None:
        return self.clip

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        sides = ("keys", "values") if self.values else ("keys",)
        shape = (2 * self.clip + 1, dims.head_dim)
        return {side: torch.randn(*shape, generator=rng) * dims.head_dim**-0.5 for side in sides}

    def offset(self, i: Tensor, j: Tensor) -> Tensor:
        """The row of the tables for query position i and key position j."""
        return (j - i).round().clamp(-self.clip, self.clip).to(torch.int64) + self.clip

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        vectors = (weights["keys"] * scale).to(q.dtype)[None]
        return ByRow(q_pos, k_pos, q, vectors, lambda r: self.offset(r, torch.zeros_like(r)))

    def value_term(
        self, attended: Tensor, q_pos: Tensor, k_pos: Tensor, weights: Weights
    ) -> Tensor:
        """Σ_j α_ij aV[clip(j - i)] from the weights α (b h i j)."""
        row = self.offset(q_pos[:, :, None], k_pos[:, None, :])[:, None].expand(attended.shape)
        table = weights["values"].to(attended.dtype)
        mass = attended.new_zeros(*attended.shape[:-1], table.shape[0]).scatter_add(
            -1, row, attended
        )
        return mass @ table

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(max(2, length // 4))]


def log_bucket(r: Tensor, buckets: int, span: int) -> Tensor:
    """Map distances to buckets: exact up to buckets/2, then log-spaced (rounded up) to `span`."""
    mid = buckets // 2
    size = torch.where((r < mid) & (r > -mid), mid - 1, r.abs())
    # both logarithms in float32, as in the released code: ±(span - 1) lies on an edge
    last = torch.full((), (span - 1) / mid, dtype=torch.float32, device=r.device)
    log = torch.ceil(torch.log(size / mid) / torch.log(last) * (mid - 1)) + mid
    return torch.where(size <= mid, r.to(log.dtype), log * r.sign()).to(torch.int64)


@dataclass(frozen=True, eq=False)
class Disentangled:
    """DeBERTa's term: that of `of_queries`, plus the product of each key (b h j d) with the vector
    of its distance in `key_vectors` (h|1, δ, d)."""

    of_queries: ByRow
    keys: Tensor
    key_vectors: Tensor

    def behind(self) -> "Disentangled":
        """See `ByRow.behind`."""
        kept, _ = entries_behind(self.of_queries.entry, self.key_vectors.shape[1])
        return replace(
            self, of_queries=self.of_queries.behind(), key_vectors=self.key_vectors[:, kept]
        )

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The products of each query with all vectors, and of each key with all key vectors."""
        return self.of_queries.rows, self.keys @ self.key_vectors.mT

    @property
    def query_bytes(self) -> int:
        """Bytes of all products of one query and one key."""
        of_key = self.key_vectors.shape[1] * self.keys.element_size()
        return self.of_queries.query_bytes + of_key

    def for_heads(self, heads: slice) -> "Disentangled":
        """The same term for a slice of the heads."""
        of_queries, keys = self.of_queries.for_heads(heads), self.keys[:, heads]
        return Disentangled(of_queries, keys, some_heads(self.key_vectors, heads))

    @cached_property
    def _last_first(self) -> Tensor:
        """The products of each key with all key vectors, the last key first."""
        return self.keys.flip(2) @ self.key_vectors.mT

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        of_queries = self.of_queries
        r = of_queries.entry(at(of_queries.q_pos, b, i) - at(of_queries.k_pos, b, j))
        return of_queries(b, h, i, j) + self.rows[1][b, h, j, r]

    def far(self, ahead: bool) -> tuple[Tensor, Tensor | None]:
        """See `ByDiagonals.far`."""
        r = last_entry(self.of_queries.entry, ahead)
        return self.of_queries.far(ahead)[0], self.key_vectors[:, r]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (*self.of_queries.sources, self.keys, self.key_vectors)

    def with_sources(self, sources: tuple[Tensor, ...]) -> "Disentangled":
        *of_queries, keys, vectors = sources
        queries = self.of_queries.with_sources(tuple(of_queries))
        return replace(self, of_queries=queries, keys=keys, key_vectors=vectors)

    def table(self, heads: int, q: range, k: range) -> Tensor:
        return self.of_queries.table(heads, q, k)

    def addends(self, q: range, k: range) -> list[Addend]:
        """The products of keys: one number per key if its distances to all of these queries share
        an entry, as most keys' do, else one per query."""
        of_queries, size = self.of_queries, len(q)
        entries = of_queries.entry(torch.arange(q[0] - k[-1], q[-1] - k[0] + 1))
        changes = entries.diff().nonzero().flatten().tolist() or [0]
        ahead = min(max(0, changes[0] - size + 2), len(k))  # number of keys with the first entry
        behind = min(max(ahead, changes[-1] + 1), len(k))  # index from which they have the last
        first = self.keys.shape[2] - 1 - (k[-1] - int(of_queries.k_pos[0, 0]))
        index = entries.unfold(0, size, 1)[ahead:behind].expand(*self.keys.shape[:2], -1, -1)
        return [
            (slice(ahead), self._of_keys(first, first + ahead, int(entries[0])).mT),
            (slice(ahead, behind),
             self._of_keys(first + ahead, first + behind).gather(-1, index).mT),
            (slice(behind, None),
             self._of_keys(first + behind, first + len(k), int(entries[-1])).mT),
        ]  # fmt: skip

    def _of_keys(self, first: int, stop: int, entry: int | None = None) -> Tensor:
        """Products of the reversed keys first … stop - 1 with all vectors, or with an entry's."""
        entries = slice(None) if entry is None else slice(entry, entry + 1)
        if not torch.is_grad_enabled():
            return self._last_first[:, :, first:stop, entries]
        n = self.keys.shape[2]  # slice keys first: a full gradient would be zero-filled per block
        return self.keys[:, :, n - stop : n - first].flip(2) @ self.key_vectors[:, entries].mT


@part("deberta", site="bias", paper="He et al. 2020, arXiv:2006.03654")
class Deberta(Bias):
    """DeBERTa's disentangled attention: content-to-position and position-to-content terms
    beside the content term.

        score(i, j) = (q_i·k_j + q_i·K[δ(i,j)] + k_j·Q[δ(i,j)]) / √(3d),
        δ = clip(i - j + s, 0, 2s - 1)

    He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention"
    (arXiv:2006.03654). The paper indexes the last term by δ(j,i); released checkpoints and
    transformers by δ(i,j), as here. `buckets` log-spaces distances beyond buckets/2 up to
    `span` (v2, v3). K and Q (heads, 2s, d) are projected relative embeddings. Site ⑤: a bias
    that reads q and k.
    """

    span: PositiveInt = 512
    buckets: int = 0
    c2p: bool = True
    p2c: bool = True
    integer_positions: ClassVar[bool] = True

    def check(self) -> None:
        if self.buckets and not 2 <= self.buckets < 2 * (self.span - 1):
            raise UserError(
                f"deberta: buckets must be 0, or at least 2 and below {2 * (self.span - 1)} for "
                f"span={self.span}, but got {self.buckets}: 256 is usual."
            )

    @property
    def rows(self) -> int:
        """Half the number of rows of a table: s in the formula."""
        return self.buckets or self.span

    @property
    def flat_beyond(self) -> int | None:
        return self.span

    def softmax_scale(self, head_dim: int) -> float:
        """1/√(d·(1 + terms)): the paper's scale counts the terms."""
        return (head_dim * (1 + self.c2p + self.p2c)) ** -0.5

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        shape = (dims.heads, 2 * self.rows, dims.head_dim)
        sides = [name for name, used in (("keys", self.c2p), ("queries", self.p2c)) if used]
        return {side: torch.randn(*shape, generator=rng) * 0.02 for side in sides}

    def delta(self, r: Tensor) -> Tensor:
        """The row of the tables for distance r = i - j."""
        r = r.round().to(torch.int64)
        r = log_bucket(r, self.buckets, self.span) if self.buckets else r
        return (r + self.rows).clamp(0, 2 * self.rows - 1)

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        k, zeros = k.repeat_interleave(q.shape[1] // k.shape[1], 1), q.new_zeros(2 * self.rows, 1)
        zeros = zeros.expand(1, -1, q.shape[-1])
        vectors = (weights["keys"] * scale).to(q.dtype) if self.c2p else zeros
        key_vectors = (weights["queries"] * scale).to(k.dtype) if self.p2c else zeros
        of_queries = ByRow(q_pos, k_pos, q, vectors, self.delta)
        return Disentangled(of_queries, k, key_vectors)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]


@part("transformer_xl", site="bias", paper="Dai et al. 2019, arXiv:1901.02860")
class TransformerXl(Bias):
    """Transformer-XL's relative attention: a content and a position term with learned global
    biases.

        score(i, j) = ((q_i + u)·k_j + (q_i + v)·(W R_{i-j})) / √d

    Dai et al. 2019, "Transformer-XL" (arXiv:1901.02860); XLNet (bidirectional). R is
    sinusoidal, all sines then all cosines; W, u and v are learned for each head; values carry
    no position. `clamp` limits distances (0: unlimited). For segment memory, pass the
    memory's keys with their positions. Site ⑤: a bias that reads q and k.
    """

    clamp: NonNegativeInt = 0
    base: PositiveFloat = 10000
    integer_positions: ClassVar[bool] = True

    @property
    def grows(self) -> bool:
        """Whether the term's table of distances grows with the call: n² numbers without a clamp."""
        return not self.clamp

    @property
    def flat_beyond(self) -> int | None:
        return self.clamp or None

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        shape = (dims.heads, dims.head_dim)
        return {
            "relative": torch.randn(*shape, dims.dim, generator=rng) * dims.dim**-0.5,
            "u": torch.randn(*shape, generator=rng) * 0.02,
            "v": torch.randn(*shape, generator=rng) * 0.02,
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        distances, row = self._distances(q_pos, k_pos)
        wide = torch.promote_types(q.dtype, torch.float32)
        relative, u, v = (weights[name].to(wide) for name in ("relative", "u", "v"))
        wave = sinusoid(distances, relative.shape[-1], self.base, "concatenated")
        keys = torch.einsum("hdm,rm->hrd", relative, wave.to(wide)) * scale
        queries, u = q, (u * scale).to(q.dtype)
        if q.dtype == wide:
            queries = q + v[:, None]
        else:  # keys and v's products, as extra dimensions, are split in two: nothing is rounded
            v_products, parts = keys @ v[..., None], []
            for x in (keys, v_products):
                high = x.to(q.dtype)
                parts += [high, (x - high).to(q.dtype)]
            queries = torch.cat([q, pad(q, (0, 8), value=1.0)], -1)
            keys = pad(torch.cat(parts, -1), (0, 6))
        group = q.shape[1] // k.shape[1]
        content = torch.einsum("hd,bhjd->bhj", u, k.repeat_interleave(group, 1))

        entry = lambda r: row(r).to(torch.int64)  # noqa: E731
        keys = keys.to(q.dtype)
        return ByRow(q_pos, k_pos, queries, keys, entry, content, u, wide=True)

    def _distances(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the distances that the table must hold, and a function from distance to row: all
        from the least to the greatest, or those that occur where positions have gaps."""
        if q_pos.is_floating_point() or k_pos.is_floating_point():
            raise UserError("transformer_xl: distances must be integers: give integer positions.")
        if not q_pos.numel() or not k_pos.numel():
            return q_pos.new_zeros(1), torch.zeros_like
        low, high = -self.clamp, self.clamp
        if not 0 < self.clamp < min(q_pos.shape[1], k_pos.shape[1]):
            # reading positions synchronises a GPU: done if they may need fewer rows than the clamp
            low, high = int(q_pos.min() - k_pos.max()), int(q_pos.max() - k_pos.min())
        limit = self.clamp or max(-low, high)
        low, high = max(min(low, limit), -limit), max(min(high, limit), -limit)
        if self.clamp or high - low < 4 * (q_pos.shape[1] + k_pos.shape[1]):
            distances = torch.arange(low, high + 1, device=q_pos.device)
            return distances, lambda r: r.clamp(low, high) - low
        distances = (q_pos[:, :, None] - k_pos[:, None, :]).unique()
        return distances, lambda r: torch.searchsorted(distances, r)

    training = train_defaults
