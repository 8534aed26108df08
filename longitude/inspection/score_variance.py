"""The score of a pair as a function of where its query and key stand, whatever they say.

Content is drawn at random: entries of q and k, or of the embeddings x, are independent and of
variance 1, and score = q·k/√d then has variance 1 without any position. The scores s(i, j) and
s(i', j') of one content at two pairs of places differ; how much, in the root mean square over
contents, is the distance between the codes of the two pairs. It has a closed form at each site:

- rotation: q·R(a)k/√d lies (2/d) Σ_t |e^(iaθ_t) - e^(ibθ_t)|² from q·R(b)k/√d, squared; dimensions
  that don't turn add nothing, a decay or a scale of queries multiplies;
- bias: (b_h - b'_h)², in the mean over heads, and over some drawn contents where it reads content;
- embedding: with x + p in place of x and random projections, so that a score is
  (x_i + p_i)ᵀ A (x_j + p_j) / D with independent entries of variance 1 in A, it is
  |Δp_i|²/D + |Δp_j|²/D + |p_i p_jᵀ - p'_i p'_jᵀ|²/D², D the model's width: the terms
  position–content, content–position and position–position, one after the other.

Sites are added up as if they were independent. What is learned is taken at fresh weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.core.part import Dims, Weights
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.inspection.curves import positions
from longitude.inspection.terms import SEED, by_content, count_seen, fresh, name
from longitude.parts import Multiplicative, Rope

CONTENTS = 8  # drawn where a bias reads content
GROWN = 16_384  # tokens up to which a table of every distance is made
Tokens = Int[Tensor, "*#s"]
Squares = Float[Tensor, "*_"]


@dataclass(frozen=True, eq=False)
class Field:
    """The scores of one scheme in a sequence of `length` tokens, which are counted from 0."""

    scheme: Scheme
    length: int
    dims: Dims

    def __post_init__(self) -> None:
        grows = [p for p in self.scheme.bias if getattr(p, "grows", False)]
        if grows and self.length > GROWN:
            raise UserError(
                f"{grows[0]} keeps a number for every distance: give a length of at most {GROWN}."
            )

    def seen(self, i: Tokens, j: Tokens) -> Bool[Tensor, "*_"]:
        """Whether query i sees key j."""
        return visible(self.scheme.areas(), self._at(i), self._at(j))

    def squared(self, i: Tokens, j: Tokens, i2: Tokens, j2: Tokens) -> Squares:
        """The squared distance between the codes of two pairs, elementwise."""
        total = (self.waves(i, j) - self.waves(i2, j2)).square().sum(-1)
        if self.scheme.bias:
            total = total + (self.added(i, j) - self.added(i2, j2)).square().sum(-1)
        return total + self._embedded(i, j, i2, j2) if self.scheme.embed else total

    # the sites

    def waves(self, i: Tokens, j: Tokens, tempered: bool = True) -> Float[Tensor, "... f"]:
        """What rotation and scale make of the product of contents: Euclidean distances between
        these are distances between codes. Untempered: without the factors on whole scores. Nan
        where a remap hides the pair."""
        rope, d = self.scheme.rotary, self.dims.head_dim
        size = self.scale(i) if tempered else torch.ones(i.shape, dtype=torch.float64)
        size = (size * self.scheme.softmax_scale(d) * d**0.5)[..., None]
        if rope is None:
            return size.expand(*torch.broadcast_shapes(i.shape, j.shape), 1)
        dim = rope.dim(d)
        cos, sin = self.turns(i, j, tempered)
        still = torch.full((*cos.shape[:-1], 1), ((d - dim) / d) ** 0.5, dtype=torch.float64)
        return torch.cat([(2 / d) ** 0.5 * cos, (2 / d) ** 0.5 * sin, still], -1) * size

    def turns(
        self, i: Tokens, j: Tokens, tempered: bool = False
    ) -> tuple[Float[Tensor, "... half"], Float[Tensor, "... half"]]:
        """Cosine and sine of each pair's angle, times its decay and, tempered, the gain."""
        rope, (p, q) = self._rope, (self._at(i), self._at(j))
        dim = rope.dim(self.dims.head_dim)
        shape = (*torch.broadcast_shapes(i.shape, j.shape), dim // 2)
        both = [torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2)]
        for region in rope.regions(rope.query_rows(p)):
            turned = region.frequencies or rope.frequencies
            told = (region.q(p) - region.k(q))[..., None]
            angle = told * turned.inv_freq(dim, rope.base, self.length)
            size = torch.exp(told * rope.decay.rate(dim)) if rope.decay else torch.ones(())
            size = size * turned.gain(self.length) if tempered else size
            here = region.where.visible(p, q)[..., None]
            made = (angle.cos() * size, angle.sin() * size)
            both = [torch.where(here, m, b) for m, b in zip(made, both, strict=True)]
        return both[0], both[1]

    def added(self, i: Tokens, j: Tokens, blank: bool = False) -> Float[Tensor, "... f"]:
        """What the biases add for each drawn content and head, so scaled that distances between
        codes are Euclidean. Blank: for queries and keys of zeros, each head's number as it is."""
        i, j = torch.broadcast_tensors(i, j)
        queries, row = i.flatten().unique(return_inverse=True)
        keys, column = j.flatten().unique(return_inverse=True)
        q, k = self._content(queries, blank)
        each = k.expand(-1, -1, len(keys), -1)
        p, r = self._at(queries)[None], self._at(keys)[None]
        at = torch.arange(len(q))[:, None, None], torch.arange(self.dims.heads)[None, :, None]
        total = torch.zeros(len(q), self.dims.heads, len(row), dtype=torch.float64)
        scale = self.scheme.softmax_scale(self.dims.head_dim)
        for part in self.scheme.bias:
            term = part.term(q, each, p, r, self.weights[name(part)], scale)
            total = total + term(*at, row[None, None], column[None, None])
        flat = total.flatten(0, 1).T.unflatten(0, i.shape)
        return flat if blank else flat / (len(q) * self.dims.heads) ** 0.5

    def codes(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """The vector of each token's position at the input."""
        made = self._every_code
        return self._made(tokens) if made is None else made[tokens]

    def scale(self, i: Tokens) -> Float[Tensor, "*_"]:
        """The factor on a query's scores, of the first head where heads differ."""
        factor = torch.ones(i.shape, dtype=torch.float64)
        if not self.scheme.scale:
            return factor
        flat = i.flatten()
        seen, at = count_seen(self.scheme, self.length, flat)[None], self._at(flat)[None]
        for part in self.scheme.scale:
            made = part.scale(at, seen, self.weights[name(part)])[0, 0]
            factor = factor * made.expand(flat.shape).view(i.shape)
        return factor

    # what they share

    @cached_property
    def weights(self) -> dict[str, Weights]:
        """Fresh weights of what acts on scores, the same each time."""
        return fresh(self.scheme, self.dims)

    @cached_property
    def input_weights(self) -> Weights:
        """Fresh weights of the embedding of positions; a table that starts from zeros, where all
        positions are alike, is drawn as others are."""
        embed, rng = self.scheme.embed, torch.Generator().manual_seed(SEED)
        drawn = embed.init(self.dims, rng) if embed else {}
        for key, weight in drawn.items():
            if weight.dim() > 1 and not weight.any():
                drawn[key] = torch.randn(weight.shape, generator=rng) * 0.02
        return {key: weight.double() for key, weight in drawn.items()}

    @cached_property
    def _every_code(self) -> Tensor | None:
        """All vectors at once, where they are not too many and none is missing: some are found one
        after the other."""
        try:
            return self._made(torch.arange(self.length)) if self.length <= GROWN else None
        except UserError:
            return None

    def _made(self, tokens: Tensor) -> Tensor:
        embed = self.scheme.embed
        assert embed is not None, "only asked for where there is one"
        blank = torch.zeros(len(tokens), self.dims.dim, dtype=torch.float64)
        blank = blank + 1 if isinstance(embed, Multiplicative) else blank
        return embed.embed(blank, self._at(tokens), self.input_weights)

    @property
    def _rope(self) -> Rope:
        assert self.scheme.rotary is not None, "only asked for where there is one"
        return self.scheme.rotary

    def _at(self, tokens: Tensor) -> Tensor:
        return positions(self.scheme, self.length, tokens)

    def _content(self, queries: Tensor, blank: bool) -> tuple[Tensor, Tensor]:
        """Queries that carry every factor on them (contents, heads, queries, d), and one key."""
        d = self.dims.head_dim
        read = not blank and by_content(self.scheme, min(self.length, GROWN), self.dims)
        shape = (CONTENTS if read else 1, self.dims.heads, 1, d)
        if not read:
            zero = torch.zeros(shape, dtype=torch.float64)
            return zero.expand(-1, -1, len(queries), -1), zero
        rng = torch.Generator().manual_seed(SEED)
        q, k = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
        factor = self.scale(queries)[:, None] * self.scheme.softmax_scale(d)
        return q * factor, k

    def _embedded(self, i: Tensor, j: Tensor, i2: Tensor, j2: Tensor) -> Tensor:
        """The squared distance that an embedding of positions makes."""
        tokens, where = torch.stack([i, j, i2, j2]).unique(return_inverse=True)
        code, width = self.codes(tokens), self.dims.dim
        a, b, a2, b2 = (code[w] for w in where)
        da, db = a - a2, b - b2
        # |a bᵀ - a2 b2ᵀ|² without the difference of large numbers
        product = (
            _dot(da, da) * _dot(b, b) + _dot(a2, a2) * _dot(db, db) + 2 * _dot(da, a2) * _dot(b, db)
        ) / width**2
        if isinstance(self.scheme.embed, Multiplicative):
            return product  # content is inside: x ⊗ (1 + p)
        return (_dot(da, da) + _dot(db, db)) / width + product


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)
