"""One call of attention as a value: what every backend starts from.

The scale of site ④ is in q already, so backends and biases see queries that carry it; or it rides
on the tables by which every pass turns q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.part import Index, Pos, Term, Weights, as_tensor
from longitude.parts.bias.distance import at
from longitude.region import Area, visible
from longitude.scheme import Scheme

Length = int | Tensor  # one number, or one for each sequence (b, 1) or token (b, n)


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of one call; positions are ranges or tensors (b|1, n)."""

    scheme: Scheme
    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Pos
    k_pos: Pos
    weights: Weights
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    key_padding: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    sink_logits: Tensor | None = None
    q_length: Length = 1
    k_length: Length = 1
    rides: bool = False

    @property
    def q_rows(self) -> Tensor:
        """Query positions as a tensor (b|1, n)."""
        return torch.atleast_2d(as_tensor(self.q_pos, self.q.device))

    @property
    def k_rows(self) -> Tensor:
        """Key positions as a tensor (b|1, n)."""
        return torch.atleast_2d(as_tensor(self.k_pos, self.k.device))

    @property
    def plain(self) -> bool:
        """Whether visibility is a matter of positions alone, and scores of q·k alone."""
        return not (self.scheme.bias or self.softcap or self.hides)

    @property
    def hides(self) -> bool:
        """Whether padding or segments hide pairs that the mask would show."""
        return self.key_padding is not None or self.segments is not None

    @property
    def overflows(self) -> bool:
        """Whether a decay's gains over all these queries at once would leave float32's range."""
        rope = self.scheme.rotary
        if rope is None or rope.decay is None or self.q.shape[2] == 0:
            return False
        if isinstance(self.q_pos, range):
            span = abs(self.q_pos[-1] - self.q_pos[0])
        else:
            span = float(self.q_pos.max() - self.q_pos.min())
        return span > rope.decay.span(rope.dim(self.q.shape[-1]))

    def rows(self, start: int, stop: int) -> Problem:
        """The same call for some of its queries."""
        pos = self.q_pos[start:stop] if isinstance(self.q_pos, range) else self.q_pos[:, start:stop]
        segments = self.segments and (self.segments[0][:, start:stop], self.segments[1])
        length = self.q_length
        if isinstance(length, Tensor) and length.shape[1] > 1:
            length = length[:, start:stop]
        q = self.q[:, :, start:stop]
        return replace(self, q=q, q_pos=pos, segments=segments, q_length=length)

    def visible(self, b: Index, i: Index, j: Index) -> Tensor:
        """Whether each pair of indices is visible: the scheme's areas, padding and segments."""
        return self.mask(self.scheme.areas())(b, i, j)

    def mask(self, areas: tuple[Area, ...]) -> Callable[[Index, Index, Index], Tensor]:
        """Whether pairs of indices lie in these areas and neither padding nor segments hide
        them."""
        q_pos, k_pos, padding, segments = self.q_rows, self.k_rows, self.key_padding, self.segments

        def seen(b: Index, i: Index, j: Index) -> Tensor:
            shown = visible(areas, at(q_pos, b, i), at(k_pos, b, j))
            shown = shown if padding is None else shown & ~padding[b, j]
            return shown if segments is None else shown & (segments[0][b, i] == segments[1][b, j])

        return seen

    def grid(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices b, h, i, j that broadcast to the whole score matrix."""
        sizes = (*self.q.shape[:3], self.k.shape[2])
        axes = [torch.arange(n, device=self.q.device) for n in sizes]
        b, h, i, j = (
            a.view([-1 if d == axis else 1 for d in range(4)]) for axis, a in enumerate(axes)
        )
        return b, h, i, j

    def terms(self) -> dict[str, Term]:
        """The term of each bias, by name."""
        if not self.scheme.bias:
            return {}
        q, q_pos, k_pos = self.q * self.scale, self.q_rows, self.k_rows
        return {
            p.name: p.term(q, self.k, q_pos, k_pos, weights_of(p.name, self.weights), self.scale)
            for p in self.scheme.bias
        }

    def value_parts(self) -> list[tuple[object, Weights]]:
        """Biases that also add to the values (Shaw's), with their weights."""
        parts = [p for p in self.scheme.bias if getattr(p, "values", False)]
        return [(p, weights_of(p.name, self.weights)) for p in parts]


def contiguous(*positions: Pos) -> bool:
    """Whether these are ranges of consecutive positions."""
    return all(isinstance(pos, range) and pos.step == 1 and len(pos) for pos in positions)


def in_blocks(p: Problem, run: Callable[[Problem], Tensor], largest: int) -> Tensor:
    """Run a call in blocks of queries of at most `largest` scores each: memory stays linear.

    Where gradients are wanted a block is computed again in the backward pass rather than kept.
    """
    batch, heads, nq, _ = p.q.shape
    size = max(1, largest // max(1, batch * heads * p.k.shape[2]))
    rope = p.scheme.rotary
    if rope and rope.decay:  # a block's gains must fit into float32
        size = max(1, min(size, int(rope.decay.span(rope.dim(p.q.shape[-1])))))
    if size >= nq:
        return run(p)
    blocks = [p.rows(a, min(a + size, nq)) for a in range(0, nq, size)]
    if not torch.is_grad_enabled():
        return torch.cat([run(block) for block in blocks], 2)
    from torch.utils.checkpoint import checkpoint

    return torch.cat([checkpoint(run, block, use_reentrant=False) for block in blocks], 2)  # type: ignore[misc]


def weights_of(name: str, weights: Weights) -> Weights:
    """One part's weights, without its name."""
    return {key.split(".", 1)[1]: w for key, w in weights.items() if key.split(".", 1)[0] == name}
