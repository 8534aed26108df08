"""One call of attention as a value: what every backend starts from.

The scale of site ④ is in q already, so backends and biases see queries that carry it; or it rides
on the tables by which every pass turns q.

What is counted before attention: the keys each query may see, and each sequence's length.

Both go by positions, not by what a cache happens to hold, so that decoding counts as prefill does.
What the factors of site ④ make of the first is multiplied into q; where they are known from
positions alone, into the tables that turn q (`rides`), which costs nothing and rounds nothing.

From a user's arguments to a checked problem: sizes, positions, weights, each with its
sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from longitude.core.part import Dims, HasWeights, Index, Pos, Term, Weights, as_tensor
from longitude.core.region import FAR, Area, visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.parts.distance_bias import at

Length = int | Tensor  # one number, or one for each sequence (b, 1) or token (b, n)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
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

    def rows(self, start: int, stop: int) -> AttentionInputs:
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


def in_blocks(p: AttentionInputs, run: Callable[[AttentionInputs], Tensor], largest: int) -> Tensor:
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


FEW = 16  # queries up to which q is multiplied itself: a decoder's tables serve one step each


def scaled(p: AttentionInputs) -> Tensor:
    """q times every factor of site ④, rounded once."""
    most = None if p.scheme.causal else _keys(p)
    factor = factors(p.scheme, p.q_rows, most, p.weights)[..., None]
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return (p.q.to(wide) * factor.to(wide)).to(p.q.dtype)


def rides(p: AttentionInputs) -> bool:
    """Whether the factors are the same for all heads and known from positions alone, and every
    dimension of q turns: its tables then carry them. Biases would see a q without them."""
    scheme, rope = p.scheme, p.scheme.rotary
    if rope is None or scheme.bias or not scheme.causal or not isinstance(p.q_pos, range):
        return False
    learned = any(weights_of(part.name, p.weights) for part in scheme.scale)
    whole = rope.dim(p.q.shape[-1]) == p.q.shape[-1]
    return whole and not learned and p.q.shape[2] > FEW and not torch.compiler.is_compiling()


def factors(scheme: Scheme, q_pos: Tensor, most: Tensor | None, weights: Weights) -> Tensor:
    """The product of all factors (b|1, h|1, n), in float64; `most` keys can be seen at all."""
    seen = _seen(scheme, q_pos, most)
    factor = torch.ones((), dtype=torch.float64, device=q_pos.device)
    for part in scheme.scale:
        factor = factor * part.scale(q_pos, seen, weights_of(part.name, weights))
    return factor


def _seen(scheme: Scheme, q_pos: Tensor, most: Tensor | None) -> Tensor:
    """How many keys each query's mask lets it see, by positions: an evicted key still counts."""
    most = torch.full_like(q_pos, FAR) if most is None else most.to(q_pos.dtype)
    total = torch.zeros_like(q_pos)
    for area in scheme.areas():
        start, stop = area.interval(q_pos)
        total = total + (torch.minimum(stop, most) - start).clamp(min=0)
    return total


def _keys(p: AttentionInputs) -> Tensor:
    """How many keys there are for each query: unpadded, and of its own segment."""
    batch, nk = p.k.shape[0], p.k.shape[2]
    real = torch.ones(batch, nk, dtype=torch.int64, device=p.k.device)
    if p.key_padding is not None:
        real = (~p.key_padding).to(torch.int64)
    if p.segments is None:
        return real.sum(1, keepdim=True)
    return _by_segment(p.segments[0], p.segments[1], real, "sum")


def _by_segment(at: Tensor, ids: Tensor, values: Tensor, how: str) -> Tensor:
    """For each token of `at`, the sum or greatest of `values` over the tokens with the same id."""
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None]
    keys = torch.cat([torch.stack([batch.expand_as(x), x], -1).flatten(0, 1) for x in (ids, at)])
    _, index = keys.unique(dim=0, return_inverse=True)
    index, asked = index.split([ids.numel(), at.numel()])
    found = values.new_zeros(keys.shape[0])
    found = found.scatter_reduce(0, index, values.flatten(), how, include_self=True)
    return found[asked].view_as(at)


def lengths(p: AttentionInputs, length: int | Sequence[int] | Tensor | None) -> dict[str, Length]:
    """The length that frequencies see: as given, or each sequence's last position + 1."""
    if isinstance(length, int):
        return {"q_length": length, "k_length": length}
    if length is not None:
        given = torch.as_tensor(length, device=p.q.device).view(-1, 1)
        if given.shape[0] != p.q.shape[0]:
            raise UserError(
                f"length must be one number, or one for each of {p.q.shape[0]} sequences."
            )
        return {"q_length": given, "k_length": given}
    if isinstance(p.k_pos, range) and not p.hides:
        last = (
            max(p.k_pos[-1], p.q_pos[-1] if isinstance(p.q_pos, range) else 0) + 1 if p.k_pos else 1
        )
        return {"q_length": last, "k_length": last}
    reach = p.k_rows.expand(p.k.shape[0], -1).ceil().to(torch.int64) + 1
    if p.key_padding is not None:
        reach = reach.masked_fill(p.key_padding, 1)
    if p.segments is None:
        last = reach.amax(1, keepdim=True)
        return {"q_length": last, "k_length": last}
    q, k = p.segments
    return {
        "q_length": _by_segment(q, k, reach, "amax"),
        "k_length": _by_segment(k, k, reach, "amax"),
    }


def prepare(
    scheme: Scheme,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Pos,
    k_pos: Pos,
    weights: Weights | None,
    *,
    scale: float | None,
    segments: Tensor | tuple[Tensor, Tensor] | None,
    length: int | Sequence[int] | Tensor | None,
    **rest: object,
) -> AttentionInputs:
    """Check the inputs and multiply the scale of ④ into q, or leave it to what turns q."""
    _check_sizes(q, k, v)
    q_pos = _positions("q_pos", q_pos, q)
    k_pos = _positions("k_pos", k_pos, k)
    scale = scheme.softmax_scale(q.shape[-1]) if scale is None else scale
    pair = (segments, segments) if isinstance(segments, Tensor) else segments
    p = AttentionInputs(scheme, q, k, v, q_pos, k_pos, weights or {}, scale, segments=pair, **rest)  # type: ignore[arg-type]
    _check_hidden(p)
    _check_weights(p)
    if scheme.scale:
        p = replace(p, rides=True) if rides(p) else replace(p, q=scaled(p))
    if scheme.rotary and scheme.rotary.frequencies.by_length:
        p = replace(p, **lengths(p, length))
    return p


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise UserError(
                f"{name} must be (batch, heads, tokens, size), but got {tuple(x.shape)}."
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(
            f"q, k and v do not fit together, but got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}: give q (b h n d), k and v (b hkv m d)."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(
            f"{q.shape[1]} query heads can't share {k.shape[1]} key heads evenly: "
            f"the first must be a multiple of the second."
        )


def _positions(name: str, pos: Pos, x: Tensor) -> Pos:
    if isinstance(pos, range):
        if len(pos) != x.shape[2]:
            raise UserError(
                f"{name} holds {len(pos)} positions, but there are {x.shape[2]} tokens."
            )
        return pos
    rows = torch.atleast_2d(pos).to(x.device)
    if rows.dim() != 2 or rows.shape[1] != x.shape[2] or rows.shape[0] not in (1, x.shape[0]):
        raise UserError(
            f"{name} must be a range, (n) or (batch, n), but got {tuple(pos.shape)} for "
            f"{x.shape[0]} × {x.shape[2]} tokens."
        )
    return rows


def _check_hidden(p: AttentionInputs) -> None:
    batch, _, nq, _ = p.q.shape
    nk = p.k.shape[2]
    if p.key_padding is not None and p.key_padding.shape != (batch, nk):
        raise UserError(
            f"key_padding must be (batch, keys) = ({batch}, {nk}), but got "
            f"{tuple(p.key_padding.shape)}: True where a key is padding."
        )
    if p.segments and (p.segments[0].shape, p.segments[1].shape) != ((batch, nq), (batch, nk)):
        raise UserError(
            f"segments must be one id a token, ({batch}, {nq}) for queries and ({batch}, {nk}) for "
            f"keys, but got {tuple(p.segments[0].shape)} and {tuple(p.segments[1].shape)}: "
            f"give a pair where they differ."
        )
    if p.sink_logits is not None and p.sink_logits.shape != (p.q.shape[1],):
        raise UserError(
            f"sink_logits must be one number a head, ({p.q.shape[1]},), but got "
            f"{tuple(p.sink_logits.shape)}."
        )


@lru_cache(maxsize=1024)
def _learned(part: HasWeights) -> frozenset[str]:
    """The names of a part's weights."""
    return frozenset(part.init(Dims(1, 1, 1), None))


def _check_weights(p: AttentionInputs) -> None:
    for part in (*p.scheme.bias, *p.scheme.scale):
        if missing := sorted(_learned(part) - set(weights_of(part.name, p.weights))):
            names = ", ".join(f"{part.name}.{m}" for m in missing)
            raise UserError(
                f"{part} is learned, but weights lack {names}: pass "
                f"weights=scheme.init(Dims(…)) or a "
                f"checkpoint's own."
            )
