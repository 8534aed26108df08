"""DeBERTa's disentangled attention: content-to-position and position-to-content beside content.

    score(i, j) = (q_i·k_j + q_i·K[δ(i,j)] + k_j·Q[δ(i,j)]) / √(3d),  δ = clip(i - j + s, 0, 2s - 1)

He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (arXiv:2006.03654).
The paper indexes the last term by δ(j,i); released checkpoints and transformers by δ(i,j), as here.
`buckets` log-spaces distances beyond buckets/2 up to `span` (v2, v3). K and Q (heads, 2s, d) are
projected relative embeddings. Site ⑤: a bias that reads q and k.
"""

from typing import ClassVar

import torch
from torch import Tensor

from longitude.core.part import Bias, Choice, Dims, Index, K, Q, Rows, Term, Weights, part
from longitude.core.validate import PositiveInt, UserError
from longitude.parts.distance_bias import at


def log_bucket(r: Tensor, buckets: int, span: int) -> Tensor:
    """Distances up to buckets/2 as they are, then log-spaced (rounded up) to `span`."""
    mid = buckets // 2
    size = torch.where((r < mid) & (r > -mid), mid - 1, r.abs())
    # both logarithms in float32, as in the released code: ±(span - 1) lies on an edge
    last = torch.full((), (span - 1) / mid, dtype=torch.float32, device=r.device)
    log = torch.ceil(torch.log(size / mid) / torch.log(last) * (mid - 1)) + mid
    return torch.where(size <= mid, r.to(log.dtype), log * r.sign()).to(torch.int64)


@part("deberta", site="bias", paper="He et al. 2020, arXiv:2006.03654")
class Deberta(Bias):
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
        """PerPair the rows of a table: s of the formula."""
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
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        c2p, p2c = (x.new_zeros(()).expand(*x.shape[:3], 2 * self.rows) for x in (q, k))
        if self.c2p:
            c2p = torch.einsum("bhid,hrd->bhir", q, weights["keys"].to(q.dtype))
        if self.p2c:
            p2c = torch.einsum("bhjd,hrd->bhjr", k, weights["queries"].to(k.dtype) * scale)

        def term(b: Index, h: Index, i: Index, j: Index) -> Tensor:
            r = self.delta(at(q_pos, b, i) - at(k_pos, b, j))
            return c2p[b, h, i, r] + p2c[b, h, j, r]

        return term

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]
