"""The inputs of one attention call, validated once on entry: what every kernel starts from.

Positions are `range`s of step 1 where they are contiguous (readable without touching the device),
otherwise tensors (b|1, n) of int64 or float64. The scale of site ④ is already multiplied into q, so
kernels and biases see scaled queries; where its factors follow from positions alone, they are
folded into the rotary tables of q (`scale_in_tables`, `DecodePlan.scaled`), at no cost or rounding.

The number of keys that a causal query may see, and the length of a sequence, follow from positions
and not from what a cache holds, so that decoding agrees with prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longitude.core.part import Dims, HasWeights, Index, Pos, Term, Weights, as_rows, as_tensor
from longitude.core.region import Area, visible
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown
from longitude.ops import axes
from longitude.parts.distance_bias import at
from longitude.parts.rope import polar_pairs

Length = int | Tensor  # one number, or one for each sequence (b, 1) or token (b, n)
BLOCK_SCORES = 2**23  # pairs in one block of queries
_softmax_scale = lru_cache(maxsize=256)(Scheme.softmax_scale)
TABLE_QUERIES = 16  # with more, a call's tables carry the scale; with fewer they would be used once


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of one call; `prepare` validates and builds them."""

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
    scale_in_tables: bool = False
    forget_sums: tuple[Tensor, Tensor] | None = None  # of queries and of keys (b h n)
    shared: dict[Hashable, Any] | None = field(default=None, init=False)  # by calls like this one

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, computed once for all calls that differ only in tensor values."""
        shared = {} if self.shared is None else self.shared
        return shared[key] if key in shared else shared.setdefault(key, make())

    @property
    def q_rows(self) -> Tensor:
        """Query positions as a tensor (b|1, n)."""
        return as_rows(self.q_pos, self.q.device)

    @property
    def k_rows(self) -> Tensor:
        """Key positions as a tensor (b|1, n)."""
        return as_rows(self.k_pos, self.k.device)

    @property
    def empty(self) -> bool:
        """Whether there are no queries or no keys."""
        return self.q.numel() == 0 or self.k.shape[2] == 0

    @property
    def hides(self) -> bool:
        """Whether padding or segments hide pairs that the mask shows."""
        return self.key_padding is not None or self.segments is not None

    @property
    def needs_grad(self) -> bool:
        """Whether any gradient is needed."""
        others = (*self.weights.values(), *(self.forget_sums or ()), self.sink_logits)
        tensors = (x for x in (self.q, self.k, self.v, *others) if x is not None)
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def overflows(self) -> bool:
        """Whether a decay's gains over all these queries at once would overflow float32."""
        rope = self.scheme.rotary
        if rope is None or rope.decay is None or self.empty:
            return False
        pos = self.q_pos
        span = pos[-1] - pos[0] if isinstance(pos, range) else float(pos.max() - pos.min())
        return span > rope.decay.span(rope.dim(self.q.shape[-1]))

    def zeros(self) -> Tensor:
        """Return the output if nothing is visible; the inputs get gradients of zero."""
        out = self.v.new_zeros(*self.q.shape[:3], self.v.shape[-1])
        return out + sum(x[..., :0].sum() for x in (self.q, self.k, self.v))

    def rows(self, cut: slice) -> AttentionInputs:
        """Return the same call for a slice of its queries."""
        segments, sums = self.segments, self.forget_sums
        return replace(
            self, q=self.q[:, :, cut], q_pos=cut_tokens(self.q_pos, cut),
            q_length=cut_tokens(self.q_length, cut),
            segments=segments and (segments[0][:, cut], segments[1]),
            forget_sums=sums and (sums[0][:, :, cut], sums[1]),
        )  # fmt: skip

    def mask(
        self, areas: tuple[Area, ...] | None = None
    ) -> Callable[[Index, Index, Index], Tensor]:
        """Return a function of indices (b, i, j): whether pairs lie in these areas, by default the
        scheme's, and neither padding nor segments hide them."""
        q_pos, k_pos, padding, segments = self.q_rows, self.k_rows, self.key_padding, self.segments
        areas = self.scheme.areas() if areas is None else areas

        def seen(b: Index, i: Index, j: Index) -> Tensor:
            shown = visible(areas, at(q_pos, b, i), at(k_pos, b, j))
            shown = shown if padding is None else shown & ~padding[b, j]
            return shown if segments is None else shown & (segments[0][b, i] == segments[1][b, j])

        return seen

    def grid(self) -> list[Tensor]:
        """Return indices b, h, i, j that broadcast to the full score matrix."""
        sizes = (*self.q.shape[:3], self.k.shape[2])
        return [
            torch.arange(n, device=self.q.device).view([1] * axis + [n] + [1] * (3 - axis))
            for axis, n in enumerate(sizes)
        ]

    def terms(self) -> dict[str, Term]:
        """Return the term of each bias, by name."""
        if not self.scheme.bias:
            return {}
        q_pos, k_pos = self.q_rows, self.k_rows
        sums = dict(zip(("sums_of_queries", "sums"), self.forget_sums or (), strict=False))
        return {
            p.name: p.term(
                self.q, self.k, q_pos, k_pos, weights_of(p.name, self.weights) | sums, self.scale
            )
            for p in self.scheme.bias
        }


def cut_tokens(x: Any, tokens: slice) -> Any:
    """Slice positions or lengths by tokens; a number that all tokens share is unchanged."""
    if isinstance(x, range):
        return x[tokens]
    return x[:, tokens] if isinstance(x, Tensor) and x.shape[1] > 1 else x


def weights_of(name: str, weights: Weights) -> Weights:
    """Return one part's weights, without its name as prefix."""
    return {key.split(".", 1)[1]: w for key, w in weights.items() if key.split(".", 1)[0] == name}


def prepare(
    scheme: Any, q: Any, k: Any, v: Any, q_pos: Any, k_pos: Any, weights: Weights | None = None, *,
    scale: Any = None, dropout: Any = 0.0, softcap: Any = None, key_padding: Any = None,
    segments: Any = None, sink_logits: Any = None, length: Any = None, forget_sums: Any = None,
) -> AttentionInputs:  # fmt: skip
    """Validate the arguments of `attention`; apply the scale of ④ to q, or leave it to tables."""
    scheme = one_scheme(scheme)
    _check_tensors(q, k, v)
    _check_numbers(scale, dropout, softcap)
    _check_hidden(q, k, key_padding, sink_logits)
    rule = "segments must be one integer per token"
    segments = _pair(rule, segments, _is_integer, q.shape[:1], q, k)
    _check_weights(scheme, weights := weights or {}, q.shape[1], q.shape[3])
    if scheme.rotary is not None and scheme.rotary.axes is not None:
        call = (scheme, (q, k, v), q_pos, k_pos, weights, key_padding)
        scheme, q, k, v, q_pos, k_pos = axes.one_position(*call)
    q_pos, k_pos = _positions("q_pos", q_pos, q), _positions("k_pos", k_pos, k)
    lengths = _check_length(length, q)
    scale = _softmax_scale(scheme, q.shape[-1]) if scale is None else float(scale)
    scheme, q, k, v = as_half_pairs(scheme, q, k, v, weights)
    p = AttentionInputs(
        scheme, q, k, v, q_pos, k_pos, weights, scale, dropout, softcap,
        None if key_padding is None else key_padding.to(q.device), segments, sink_logits,
        forget_sums=_check_sums(scheme, q, k, forget_sums),
    )  # fmt: skip
    if p.empty:
        return p
    if scheme.scale:
        many = q.shape[2] > TABLE_QUERIES and segments is None and not torch.compiler.is_compiling()
        fits = isinstance(p.q_pos, range) and factors_fit_tables(scheme, q.shape[3])
        p = replace(p, scale_in_tables=True) if many and fits else replace(p, q=_scaled(p))
    if scheme.rotary and scheme.rotary.frequencies.by_length:
        q_length, k_length = _lengths(p) if lengths is None else (lengths, lengths)
        p = replace(p, q_length=q_length, k_length=k_length)
    return p


def as_half_pairs(scheme: Any, q: Tensor, k: Tensor, v: Tensor, weights: Weights) -> Any:
    """Return scheme, q, k, v, with polar pairs as half pairs, whose heads are twice as wide."""
    scheme = one_scheme(scheme)
    if scheme.rotary is None or scheme.rotary.pairs != "polar":
        return scheme, q, k, v
    v = pad(v, (0, q.shape[-1]))  # kernels need values as wide; `attention` cuts them
    q, k = polar_pairs(q, k, weights["rope.delta"])
    return replace(scheme, rotary=replace(scheme.rotary, pairs="half")), q, k, v


def one_scheme(scheme: Any) -> Scheme:
    if not isinstance(scheme, Scheme | Layers):
        from longitude.core.text import as_scheme  # deferred: most calls pass a Scheme

        scheme = as_scheme(scheme)
    if isinstance(scheme, Layers):
        raise UserError(
            f"attention runs one layer, but got {shown(scheme)} for {len(scheme)} layers: pass "
            f"scheme.layer(index)."
        )
    return scheme


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
            raise UserError(f"{name} must be (batch, heads, tokens, size), but got {got}.")
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
    types = {(x.dtype, x.device) for x in (q, k, v)}
    if len(types) > 1 or not q.is_floating_point():
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UserError(
            f"q, k and v must share one floating-point dtype and device, but got {got}: "
            f"convert them."
        )


def _positions(name: str, pos: Any, x: Tensor) -> Pos:
    """Return positions as a range of step 1, or a tensor (b|1, n) of int64 or float64."""
    if isinstance(pos, range) and len(pos) == x.shape[2] and (pos.step == 1 or not pos):
        return pos if pos else range(0)
    pos = as_tensor(pos) if isinstance(pos, range) else pos
    if not isinstance(pos, Tensor) or pos.is_complex() or pos.dtype == torch.bool:
        got = pos.dtype if isinstance(pos, Tensor) else shown(pos)
        raise UserError(f"{name} must be a range or a tensor of numbers, but got {got}.")
    rows = torch.atleast_2d(pos).to(x.device)
    if rows.dim() != 2 or rows.shape[1] != x.shape[2] or rows.shape[0] not in (1, x.shape[0]):
        raise UserError(
            f"{name} must hold positions (n) or (batch, n), but got {tuple(pos.shape)} for "
            f"{x.shape[0]} × {x.shape[2]} tokens."
        )
    if not rows.is_floating_point():
        return rows.to(torch.int64)
    unreadable = rows.is_meta or (rows.is_cuda and torch.cuda.is_current_stream_capturing())
    if not unreadable and not bool(rows.isfinite().all()):
        raise UserError(f"{name} holds nan or infinity: give finite positions.")
    return rows.to(torch.float64)


def _check_numbers(scale: Any, dropout: Any, softcap: Any) -> None:
    if scale is not None and not _is_number(scale):
        raise UserError(f"scale must be a finite number, but got {shown(scale)}: 1/√d is usual.")
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"dropout must lie in [0, 1), but got {shown(dropout)}: 0 is none.")
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise UserError(
            f"softcap must be a number above zero, but got {shown(softcap)}: leave it out for none."
        )


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def _check_hidden(q: Tensor, k: Tensor, key_padding: Any, sink_logits: Any) -> None:
    batch, heads, nk = *q.shape[:2], k.shape[2]
    if key_padding is not None and _described(key_padding) != f"({batch}, {nk}) of torch.bool":
        raise UserError(
            f"key_padding must be bool (batch, keys) = ({batch}, {nk}), but got "
            f"{_described(key_padding)}: True where a key is padding."
        )
    fits = isinstance(sink_logits, Tensor) and sink_logits.is_floating_point()
    if sink_logits is not None and not (fits and sink_logits.shape == (heads,)):
        got = _described(sink_logits)
        raise UserError(f"sink_logits must be one number per head, ({heads},), but got {got}.")


def _check_sums(scheme: Scheme, q: Tensor, k: Tensor, sums: Any) -> tuple[Tensor, Tensor] | None:
    """Return the forget sums of queries and of keys, which gated schemes need and others refuse."""
    if bool(scheme.bias and scheme.gated) != (sums is not None):
        given, takes = ("none were", "the") if sums is None else ("some were", "no")
        raise UserError(
            f"{scheme} takes {takes} forget_sums of its gates, but {given} given: "
            f"longitude.nn.PositionAttention computes them from a layer's input x."
        )
    rule = "forget_sums must be one number per head and token"
    return _pair(rule, sums, torch.is_floating_point, q.shape[:2], q, k)


def _pair(
    rule: str, given: Any, fits: Callable[[Tensor], bool], first: torch.Size, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the tensors of queries and of keys, if given; a single tensor serves both."""
    if given is None:
        return None
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    shapes = [(*first, x.shape[2]) for x in (q, k)]
    tensors = [x for x in pair if isinstance(x, Tensor) and fits(x)]
    if len(tensors) < len(pair) or [tuple(x.shape) for x in tensors] != shapes:
        raise UserError(
            f"{rule}, {shapes[0]} for queries and {shapes[1]} for keys, but got "
            f"{' and '.join(map(_described, pair))}: give a pair where they differ."
        )
    return pair[0].to(q.device), pair[1].to(q.device)


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _described(x: Any) -> str:
    return f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else shown(x)


def _check_length(length: Any, q: Tensor) -> Length | None:
    """Return the length as one number, or one for each sequence (b, 1)."""
    if length is None or (type(length) is int and length > 0):
        return length
    batch = q.shape[0]
    if isinstance(length, Tensor) or type(length) in (list, tuple):
        lengths = torch.as_tensor(length)
        if _is_integer(lengths) and lengths.numel() in (1, batch):
            return lengths.to(q.device, torch.int64).reshape(-1, 1).expand(batch, 1)
    raise UserError(
        f"length must be one number above zero, or one for each of {batch} sequences, but got "
        f"{_described(length)}."
    )


@lru_cache(maxsize=1024)
def _weight_shapes(
    part: HasWeights, heads: int, head_dim: int
) -> dict[str, tuple[int | None, ...]]:
    """Return the shape of each weight of a part; None for the model's width, unknown in a call."""
    rng = torch.Generator().manual_seed(0)  # validation must not advance the user's generator
    weights = [part.init(Dims(dim, heads, head_dim), rng) for dim in (16, 32)]
    return {
        name: tuple(
            a if a == b else None for a, b in zip(w.shape, weights[1][name].shape, strict=True)
        )
        for name, w in weights[0].items()
    }


def _check_weights(scheme: Scheme, weights: Weights, heads: int, head_dim: int) -> None:
    for part in filter(None, (scheme.rotary, *scheme.bias, *scheme.scale)):
        shapes, given = _weight_shapes(part, heads, head_dim), weights_of(part.name, weights)
        if missing := sorted(set(shapes) - set(given)):
            names = ", ".join(f"{part.name}.{m}" for m in missing)
            raise UserError(
                f"{part} is learned, but weights lack {names}: pass weights=scheme.init(Dims(…)) "
                f"or a checkpoint's own."
            )
        for name, shape in shapes.items():
            got = tuple(given[name].shape)
            if len(got) != len(shape) or any(
                s not in (None, n) for s, n in zip(shape, got, strict=True)
            ):
                expected = ", ".join("width" if n is None else str(n) for n in shape)
                raise UserError(
                    f"{part.name}.{name} must be ({expected}) for {part} with {heads} heads of "
                    f"{head_dim}, but got {got}: give weights of this scheme."
                )


def _scaled(p: AttentionInputs) -> Tensor:
    """Return q times every factor of site ④, rounded once."""
    counts = None
    if not p.scheme.causal or p.segments is not None:  # number of keys that each query sees
        (b, _, i, j), seen = p.grid(), p.mask()
        size = max(1, BLOCK_SCORES // max(1, p.q.shape[0] * p.k.shape[2]))
        counts = torch.cat([seen(b, rows, j).sum(-1) for rows in i.split(size, 2)], 2)[:, 0]
    factor = scale_factors(p.scheme, p.q_rows, counts, p.weights)[..., None]
    dtype = torch.promote_types(p.q.dtype, torch.float32)
    return (p.q.to(dtype) * factor.to(dtype)).to(p.q.dtype)


@lru_cache(maxsize=256)
def factors_fit_tables(scheme: Scheme, size: int) -> bool:
    """Whether rotary tables of q can carry the factors of ④: every dimension rotates, and factors
    follow from positions alone and are equal for all heads. A bias would read unscaled queries."""
    rotated = scheme.rotary is not None and scheme.rotary.dim(size) == size
    learned = any(part.init(Dims(size, 1, size), None) for part in scheme.scale)
    fit = scheme.scale and rotated and scheme.causal and not (scheme.bias or learned)
    return bool(fit) and scale_factors(scheme, torch.zeros(1, 1, dtype=torch.int64)).shape[1] == 1


def scale_factors(
    scheme: Scheme, q_pos: Tensor, counts: Tensor | None = None, weights: Weights | None = None
) -> Tensor:
    """Return the product of all factors of ④ (b|1, h|1, n) in float64. `counts` are numbers of
    visible keys, by default of positions from 0 on that the mask shows, evicted keys included."""
    if counts is None:
        intervals = [area.interval(q_pos) for area in scheme.areas()]
        counts = sum((stop - start for start, stop in intervals), torch.zeros_like(q_pos))
    factor = torch.ones((), dtype=torch.float64, device=q_pos.device)
    for part in scheme.scale:
        factor = factor * part.scale(q_pos, counts, weights_of(part.name, weights or {}))
    return factor


def _lengths(p: AttentionInputs) -> tuple[Length, Length]:
    """Return the default lengths for frequencies: each sequence's last position + 1."""
    if isinstance(p.k_pos, range) and isinstance(p.q_pos, range) and not p.hides:
        last = max(p.k_pos[-1], p.q_pos[-1]) + 1
        return last, last
    ends = p.k_rows.expand(p.k.shape[0], -1).ceil().to(torch.int64) + 1
    if p.key_padding is not None:
        ends = ends.masked_fill(p.key_padding, 1)
    if p.segments is None:
        last = ends.amax(1, keepdim=True)
        if not p.hides:
            last = torch.maximum(last, p.q_rows.ceil().to(torch.int64).amax(1, keepdim=True) + 1)
        return last, last
    q_ids, k_ids = p.segments
    return _greatest(q_ids, k_ids, ends), _greatest(k_ids, k_ids, ends)


def _greatest(at: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return for each token of `at` the largest of `values` over the tokens with the same id."""
    batch = torch.arange(ids.shape[0], device=ids.device)[:, None]
    keys = torch.cat([torch.stack([batch.expand_as(x), x], -1).flatten(0, 1) for x in (ids, at)])
    _, group_ids = keys.unique(dim=0, return_inverse=True)
    of_ids, of_at = group_ids.split([ids.numel(), at.numel()])
    greatest = values.new_zeros(keys.shape[0])
    return greatest.scatter_reduce(0, of_ids, values.flatten(), "amax")[of_at].view_as(at)
