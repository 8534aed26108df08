"""The score of a query and a key as a function of their positions, over random content.

Entries of q and k, or of the embeddings x, are independent with variance 1, so that q·k/√d has
variance 1 without positions. The distance between the codes of two pairs (i, j) and (i', j') is the
root mean square over contents of s(i, j) - s(i', j'). Squared, it has a closed form at each site:

- rotation: (2/d) Σ_t |e^(iaθ_t) - e^(ibθ_t)|² between q·R(a)k/√d and q·R(b)k/√d; unrotated
  dimensions add nothing, xPos's decay and the scale of queries multiply;
- bias: (b_h - b'_h)², the mean over heads, and over drawn contents where it depends on content;
- embedding: with x + p for x and random projections, s = (x_i + p_i)ᵀ A (x_j + p_j) / D, entries
  of A of variance 1, D the model's width: |Δp_i|²/D + |Δp_j|²/D + |p_i p_jᵀ - p'_i p'_jᵀ|²/D², the
  terms position–content, content–position and position–position.

Sites add up as if independent. Learned parts have fresh weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.core.part import Dims, Pos, Region, Weights
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.parts import Multiplicative

SEED = 0
CONTENTS = 8  # drawn where a bias depends on content
MAX_TABLE = 16_384  # tokens up to which a table of every distance or position is computed
Tokens = Int[Tensor, "*#s"]


def positions(scheme: Scheme, length: int, tokens: Tensor) -> Tensor:
    ids: Pos = scheme.positions.ids(length)
    return tokens * ids.step + ids.start if isinstance(ids, range) else ids[tokens]


def remapped_distance(scheme: Scheme, i: Tensor, j: Tensor) -> Tensor:
    """The distance that the rotation uses for query and key positions (the mean, if rotary pairs
    differ); nan where hidden."""
    rope = scheme.rotary
    distance = torch.full(torch.broadcast_shapes(i.shape, j.shape), torch.nan, dtype=torch.float64)
    for region in rope.regions(rope.query_rows(i)) if rope else (Region(),):
        distance = torch.where(region.where.visible(i, j), region.q(i) - region.k(j), distance)
    return distance.where(visible(scheme.areas(), i, j), torch.nan)


def visible_keys(scheme: Scheme, length: int, tokens: Tensor) -> Tensor:
    """How many keys each of these queries sees, counted by position as attention does."""
    where = positions(scheme, length, tokens)
    count = torch.zeros_like(tokens)
    for area in scheme.areas():
        start, stop = area.interval(where)
        stop = stop if scheme.causal else stop.clamp(max=length)
        count = count + (stop - start).clamp(min=0)
    return count


def fresh_weights(scheme: Scheme, dims: Dims) -> dict[str, Weights]:
    """Fresh float64 weights by part, equal in every call; the input embedding is left out."""
    scored = replace(scheme, embed=None)
    weights: dict[str, Weights] = {p.name: {} for p in scored.parts}  # type: ignore[attr-defined]
    for key, value in scored.init(dims, _generator()).items():
        part, _, weight = key.partition(".")
        weights[part][weight] = value.double()
    return weights


@dataclass(frozen=True, eq=False)
class ScoreModel:
    """The scores of one scheme in a sequence of `length` tokens, counted from 0."""

    scheme: Scheme
    length: int
    dims: Dims

    def positions(self, tokens: Tensor) -> Tensor:
        return positions(self.scheme, self.length, tokens)

    def remapped_distance(self, i: Tokens, j: Tokens) -> Tensor:
        """The distance that the rotation uses for query token i and key token j; nan if hidden."""
        return remapped_distance(self.scheme, self.positions(i), self.positions(j))

    def visible(self, i: Tokens, j: Tokens) -> Bool[Tensor, "*_"]:
        return visible(self.scheme.areas(), self.positions(i), self.positions(j))

    def squared_distance(self, i: Tokens, j: Tokens, i2: Tokens, j2: Tokens) -> Tensor:
        """The squared distance between the codes of two pairs, elementwise."""
        total = (self.rotation_code(i, j) - self.rotation_code(i2, j2)).square().sum(-1)
        if self.scheme.bias:
            total = total + (self.bias_code(i, j) - self.bias_code(i2, j2)).square().sum(-1)
        if self.scheme.embed is None:
            return total
        tokens, where = torch.stack([i, j, i2, j2]).unique(return_inverse=True)
        code, width = self.embedding(tokens), self.dims.dim
        a, b, a2, b2 = (code[w] for w in where)
        da, db = a - a2, b - b2
        # |a bᵀ - a2 b2ᵀ|² without the difference of large numbers
        product = (
            _dot(da, da) * _dot(b, b) + _dot(a2, a2) * _dot(db, db) + 2 * _dot(da, a2) * _dot(b, db)
        ) / width**2
        if not isinstance(self.scheme.embed, Multiplicative):  # x ⊗ (1 + p) has the content in it
            product = product + (_dot(da, da) + _dot(db, db)) / width
        return total + product

    # the sites

    def rotation(
        self, i: Tokens, j: Tokens, gain: bool = False
    ) -> tuple[Float[Tensor, "... half"], Float[Tensor, "... half"]]:
        """Cosine and sine of each rotary pair's angle times its decay and, with `gain`, the
        attention factor; nan where a remap hides the pair."""
        rope, p, q = self.scheme.rotary, self.positions(i), self.positions(j)
        assert rope is not None, "only called if the scheme has a rotation"
        dim = rope.dim(self.dims.head_dim)
        shape = (*torch.broadcast_shapes(i.shape, j.shape), dim // 2)
        cos, sin = torch.full((2, *shape), torch.nan, dtype=torch.float64)
        for region in rope.regions(rope.query_rows(p)):
            frequencies = region.frequencies or rope.frequencies
            distance = region.q.by_pair(p, dim // 2) - region.k.by_pair(q, dim // 2)
            angle = distance * rope.inv_freq(dim, self.length, frequencies)
            size = torch.exp(distance * rope.decay.rate(dim)) if rope.decay else torch.ones(())
            size = size * frequencies.gain(self.length) if gain else size
            here = region.where.visible(p, q)[..., None]
            cos = torch.where(here, angle.cos() * size, cos)
            sin = torch.where(here, angle.sin() * size, sin)
        return cos, sin

    def rotation_code(self, i: Tokens, j: Tokens, factors: bool = True) -> Float[Tensor, "... f"]:
        """Vectors whose Euclidean distances are those between codes of rotation and scale, with or
        without the factors on whole scores."""
        rope, d = self.scheme.rotary, self.dims.head_dim
        size = self.scale(i) if factors else torch.ones(i.shape, dtype=torch.float64)
        size = (size * self.scheme.softmax_scale(d) * d**0.5)[..., None]
        if rope is None:
            return size.expand(*torch.broadcast_shapes(i.shape, j.shape), 1)
        cos, sin = self.rotation(i, j, gain=factors)
        width = max(d, rope.dim(d))  # polar pairs are twice as wide as a head
        unrotated = ((width - rope.dim(d)) / width) ** 0.5
        rest = torch.full((*cos.shape[:-1], 1), unrotated, dtype=torch.float64)
        return torch.cat([(2 / width) ** 0.5 * cos, (2 / width) ** 0.5 * sin, rest], -1) * size

    def bias(self, i: Tokens, j: Tokens, contents: int = 0) -> Float[Tensor, "... f"]:
        """What the biases add for each drawn content and head; with 0 `contents`, for q = k = 0."""
        i, j = torch.broadcast_tensors(i, j)
        queries, row = i.flatten().unique(return_inverse=True)
        keys, column = j.flatten().unique(return_inverse=True)
        rng, scale = _generator(), self.scheme.softmax_scale(self.dims.head_dim)
        shape = (max(contents, 1), self.dims.heads, 1, self.dims.head_dim)
        q, k = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
        size = self.scale(queries)[:, None] if contents else queries[:, None] * 0.0
        q, k = q * size, k.expand(-1, -1, len(keys), -1) * bool(contents)
        p, r = self.positions(queries)[None], self.positions(keys)[None]
        at = torch.arange(len(q))[:, None, None], torch.arange(self.dims.heads)[None, :, None]
        total = torch.zeros(len(q), self.dims.heads, len(row), dtype=torch.float64)
        for part in self.scheme.bias:
            term = part.term(q, k, p, r, self.weights[part.name], scale)  # type: ignore[attr-defined]
            total = total + term(*at, row[None, None], column[None, None])
        return total.flatten(0, 1).T.unflatten(0, i.shape)

    def bias_code(self, i: Tokens, j: Tokens) -> Float[Tensor, "... f"]:
        """Vectors whose Euclidean distances are those between codes of the biases."""
        values = self.bias(i, j, CONTENTS if self.bias_reads_content else 0)
        return values / values.shape[-1] ** 0.5

    def embedding(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """The vector of each token's position at the input."""
        table = self._embedding_table
        return self._embedded(tokens) if table is None else table[tokens]

    def scale(self, i: Tokens) -> Float[Tensor, "*_"]:
        """The factor on a query's scores, of the first head where heads differ."""
        factor = torch.ones(i.shape, dtype=torch.float64)
        if not self.scheme.scale:
            return factor
        flat = i.flatten()
        seen = visible_keys(self.scheme, self.length, flat)[None]
        for part in self.scheme.scale:
            weights = self.weights[part.name]  # type: ignore[attr-defined]
            value = part.scale(self.positions(flat)[None], seen, weights)[0, 0]
            factor = factor * value.expand(flat.shape).view(i.shape)
        return factor

    # shared by the sites

    @cached_property
    def weights(self) -> dict[str, Weights]:
        return fresh_weights(self.scheme, self.dims)

    @cached_property
    def input_weights(self) -> Weights:
        """Fresh weights of the position embedding; tables of zeros are drawn at random instead."""
        embed, rng = self.scheme.embed, _generator()
        drawn = embed.init(self.dims, rng) if embed else {}
        for key, weight in drawn.items():
            if weight.dim() > 1 and not weight.any():
                drawn[key] = torch.randn(weight.shape, generator=rng) * 0.02
        return {key: weight.double() for key, weight in drawn.items()}

    @cached_property
    def bias_reads_content(self) -> bool:
        """Whether the bias depends on the content of query and key, not on positions alone."""
        pair = torch.tensor([min(self.length, MAX_TABLE) - 1]), torch.tensor([0])
        return not torch.equal(self.bias(*pair, contents=1), self.bias(*pair))

    @cached_property
    def _embedding_table(self) -> Tensor | None:
        """All vectors at once (some parts are sequential), if they are few and none is missing."""
        try:
            return self._embedded(torch.arange(self.length)) if self.length <= MAX_TABLE else None
        except UserError:
            return None

    def _embedded(self, tokens: Tensor) -> Tensor:
        embed = self.scheme.embed
        assert embed is not None, "only called if the scheme has an embedding"
        blank = torch.zeros(len(tokens), self.dims.dim, dtype=torch.float64)
        blank = blank + 1 if isinstance(embed, Multiplicative) else blank
        return embed.embed(blank, self.positions(tokens), self.input_weights)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)
