"""The KV cache: keys with their positions, evicted by the mask.

There is no eviction policy to choose: a key is dropped when the scheme's mask hides it from every
later query. `length` is what length-dependent frequencies depend on, fixed for the cache's life.

Eviction waits for the next tokens, so that those just added still see all they may, and it keeps
`slack` tokens more than the mask requires: assisted decoding adds candidates and removes them with
`crop`, and dropping one key per step would copy all of them each time.

A few queries run by one kernel where it is available (`ops.decode`), over pre-RoPE keys that are
rotated as they are read. Elsewhere keys are rotated in place if the rotation stays valid
(`rotated_keys`), and any other scheme runs as ordinary attention over all keys.

With several positions per token (`rope(axes=…)`) a key is rotated once by the remainder that one
position leaves, and cached with that one (`ops.axes`); the rest works as for text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.cache.kv_buffer import Buffer, append_positions, select_positions, to_host
from longitude.cache.rotated_keys import RotatedKeys, latest_step, one_if_equal, run_step
from longitude.core.part import Dims, Pos, Region, Weights, as_rows, by_rows
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops import axes, decode
from longitude.ops.attention import attention
from longitude.ops.inputs import (
    cut_tokens,
    factors_fit_tables,
    one_scheme,
    prepare,
    scale_factors,
    weights_of,
)
from longitude.ops.lse_merge import operator_for
from longitude.ops.passes import Latest
from longitude.parts.rope import Rope, apply_rotary
from longitude.parts.rotary_tables import cos_sin

MAX_SEPARATE = 8  # queries that run one by one, as when assisted decoding verifies candidates


class Cached(NamedTuple):
    """The cached tokens that the new queries may see."""

    k: Tensor
    v: Tensor
    pos: Pos
    padding: Tensor | None


class Cache:
    """Keys and values of one layer under a scheme."""

    def __init__(self, scheme: Scheme, length: int | Tensor | None = None, slack: int = 64) -> None:
        scheme = one_scheme(scheme)
        if not scheme.causal:
            raise UserError(
                f"a cache serves decoding, but {scheme} is bidirectional: use a causal scheme."
            )
        self._axes = None  # the rotary part with several positions per token, if any
        if scheme.rotary and scheme.rotary.axes:
            if scheme.rotary.axes.weights(Dims(8, 1, 8), 8, 10.0, torch.Generator()):
                raise UserError(
                    f"a cache keeps rotated keys, and {scheme.rotary.axes} is learned head by "
                    f"head: run it without a cache."
                )
            self._axes, scheme = scheme.rotary, axes.without_axes(scheme)
        rope = scheme.rotary
        if rope and rope.frequencies.by_length and length is None:
            raise UserError(
                f"{rope.frequencies} depends on the total length: give Cache(scheme, length=…), "
                f"prompt plus tokens to generate, fixed for the cache's lifetime."
            )
        self.scheme, self.length, self.slack = scheme, length, slack
        self._evicts = scheme.forgets
        self._rotates = self._one_frame = False
        if rope is not None:
            # the rotation of a key must not change with the call
            static = not rope.frequencies.by_length or isinstance(length, int)
            plain = rope.decay is None and rope.pairs != "polar"  # those cache keys in another form
            self._rotates = static and plain and not scheme.bias
            # every key keeps one frame
            self._one_frame = not rope.remap and not by_rows(rope.frequencies)
        self.reset()

    def reset(self) -> None:
        """Drop everything."""
        self.seen = 0  # tokens ever added
        length = self.length if isinstance(self.length, int) else 1
        self.keys, self.values = RotatedKeys(self.scheme.rotary, length), Buffer(2)
        self._padding, self._sums = Buffer(1), Buffer(2)
        self._at = Buffer(2)  # positions per axis (b axes n), if tokens have several
        self._pos: Pos = range(0)
        self._order: Pos = range(0)  # index of each cached token among all ever added
        self._checked = 0  # tokens added when eviction was last considered
        self._min_crop = 0  # shorter crops would need evicted keys
        self.slot: Tensor | None = None  # column that a captured graph writes, noted by `advance`
        self.planned: tuple[Tensor, decode.DecodePlan] | None = None  # its queries and plan

    def __len__(self) -> int:
        """Cached tokens."""
        return len(self.values)

    @property
    def positions(self) -> Pos:
        """Positions of the cached tokens."""
        return self._pos

    @property
    def nbytes(self) -> int:
        """Memory allocated for keys and values, spare capacity included."""
        return self.keys.buffer.nbytes + self.values.nbytes

    def update(
        self,
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n dv"],
        pos: Pos,
        padding: Bool[Tensor, "b n"] | None = None,
    ) -> Cached:
        """Add the keys and values of new tokens; return all that their queries may see."""
        self.add(k, v, pos, padding)
        keys, positions = self.keys.pre_rope(share=True), self._pos
        if self._axes is not None and len(self._at):
            at = self._at.view().transpose(0, 1)
            keys = axes.rotate_left(self._axes, keys, at, positions, inverse=True)
            positions = torch.cat([as_rows(positions, k.device).expand_as(at[0])[None], at])
        return Cached(keys, self.values.view(), positions, self._hidden())

    def add(
        self,
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n dv"],
        pos: Pos,
        padding: Bool[Tensor, "b n"] | None = None,
        log_gates: Float[Tensor, "b hq n"] | None = None,
    ) -> None:
        """Add the keys and values of new tokens, whose queries may then `attend`; `log_gates` are
        the logarithms of their forget gates, for schemes that have them."""
        if self.slot is not None:
            self.keys.buffer.write(k, self.slot)
            return self.values.write(v, self.slot)
        new = k.shape[2]
        if (len(pos) if isinstance(pos, range) else pos.shape[-1]) != new:
            raise UserError(f"{new} keys came with {pos} for positions: give one per key.")
        if self._evicts and self.seen - self._checked > self.slack:
            self._evict()
        if self._axes is not None:
            k, pos = self._one_position(self._axes, k, pos, padding)
        if padding is not None and not len(self._padding):
            self._padding.append(padding.new_zeros(k.shape[0], len(self)))
        if padding is not None or len(self._padding):
            unpadded = torch.zeros(k.shape[0], new, dtype=torch.bool, device=k.device)
            self._padding.append(unpadded if padding is None else padding)
        self._note(pos, new, k.device, padding)
        self.keys.buffer.append(k)
        self.values.append(v)
        if log_gates is not None:
            sums = log_gates.cumsum(-1)
            self._sums.append(sums + self._sums.view()[..., -1:] if len(self._sums) else sums)

    def _note(
        self, pos: Pos, new: int, device: torch.device, padding: Tensor | None = None
    ) -> None:
        """Record the positions of tokens whose keys and values come next."""
        self._pos = append_positions(self._pos, pos, device)
        self._order = append_positions(self._order, range(self.seen, self.seen + new))
        self.keys.note(pos, padding)
        self.seen += new

    @property
    def next_position(self) -> int | None:
        """The position of the next token if a CUDA graph can run its step, else None: its key and
        value must fit into the allocated memory, and only the plan may change from step to step."""
        lines, buffers = self.keys.lines, (self.keys.buffer, self.values)
        if lines is None or len(lines) > 1 or not lines[0]:
            return None
        if not all(buffer.has_room for buffer in buffers):
            return None
        size = self.keys.buffer.stored.shape[-1]
        scales = self.scheme.scale and not factors_fit_tables(self.scheme, size)
        more = len(self._padding) or len(self._sums) or self._axes or scales
        evicts = self._evicts and self.seen - self._checked > self.slack
        if more or evicts or not self._rotates or not decode.supports(self.scheme):
            return None
        return lines[0][-1].pos + lines[0][-1].n

    @property
    def where(self) -> tuple[Any, ...]:
        """The memory locations of keys and values."""
        both = (self.keys.buffer.storage, self.values.storage)
        return tuple((x.data_ptr(), x.shape, x.stride()) for x in both if x is not None)

    def advance(self, pos: range) -> None:
        """Record tokens whose keys and values are written to `slot`."""
        self._note(pos, len(pos), self.keys.buffer.stored.device)
        for buffer in (self.keys.buffer, self.values):
            buffer.size += len(pos)

    @property
    def state(self) -> list[Any]:
        """Objects of which at least one is replaced by any change of the cache."""
        return [self.keys.lines, self.keys.buffer.storage, self.values.storage]

    def plan_next(self, q: Tensor, position: int) -> decode.DecodePlan | None:
        """Return the decoding kernel's plan for the query of the next token, at this position, or
        None if it can't run it."""
        lines = tuple(self.keys.lines_with(range(position, position + 1)) or ((),))
        k, v, at = self.keys.buffer.stored, self.values.stored, ((position,),)
        return decode.plan_for(self.scheme, q, k, v, self.keys.length, lines, at)

    def attend(
        self,
        q: Float[Tensor, "b hq nq d"],
        q_pos: Pos,
        weights: Weights | None = None,
        **options: Any,
    ) -> Float[Tensor, "b hq nq dv"]:
        """Attention of the tokens just added over all cached ones.

        `options` are those of `longitude.attention`; padding and the length are the cache's own.
        """
        options |= {"length": self.length, "key_padding": self._hidden()}
        if len(self._sums):
            sums = self._sums.view()
            options |= {"forget_sums": (sums[..., sums.shape[-1] - q.shape[2] :], sums)}
        scheme, keys = self.scheme, self.keys
        if self._axes is not None and len(self._at):  # as `add` did for these tokens' keys
            at, one = axes.split(self._axes, "q_pos", q_pos, q)
            q_pos = cut_tokens(self._pos, slice(-q.shape[2], None)) if one is None else one
            q = axes.rotate_left(self._axes, q, at, q_pos, gain=True)
        k, v = keys.buffer.stored, self.values.stored
        alone = options.get("group") is None  # over a group, keys stay pre-RoPE
        if alone and self._rotates and keys.lines is not None and q.shape[0] == v.shape[0]:
            grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            at = None if grads else _query_positions(q, q_pos, options)
            if at is not None and (out := self._decode(q, q_pos, at, weights, options)):
                return out[0] if len(out) == 1 else torch.cat(out, 2)
            # if the kernel decodes after these queries, keys stay pre-RoPE
            many = q.shape[2] > decode.MAX_QUERIES and not keys.any_rotated()
            later = many and decode.unsupported_reason(scheme, q[:, :, :1], k, v) is None
            if self._one_frame and not grads and not later:
                # keys are rotated once and stay so; attention then runs without rotation
                rope = scheme.rotary
                assert rope is not None
                tables = cos_sin(rope, Region(), "q", q_pos, *keys.table_spec(k))
                q, scheme = apply_rotary(q, *tables, rope.pairs), replace(scheme, rotary=None)
                keys.rotate_all(Region())
                k, v = keys.buffer.view(), self.values.view()
                return attention(scheme, q, k, v, q_pos, self._pos, weights, **options)
        k, v = keys.pre_rope(), self.values.view()
        return attention(scheme, q, k, v, q_pos, self._pos, weights, **options)

    def _one_position(
        self, rope: Rope, k: Tensor, pos: Pos, padding: Tensor | None
    ) -> tuple[Tensor, Pos]:
        """Return new keys, rotated by what one position leaves of several, and that position."""
        if rope.axes and rope.axes.temporal and not (axes.has_axes(pos) or len(self._at)):
            return k, pos
        at, order = axes.split(rope, "pos", pos, k)
        if order is None:
            last = as_rows(self._pos, k.device)[:, -1:] if len(self) else None
            with_axes = replace(self.scheme, rotary=rope)
            order = axes.order(with_axes, at, padding, last, first=self.seen)
        if len(self._at) < len(self):  # text precedes the first image
            before = as_rows(self._pos, k.device).double()[:, None]
            self._at.append(before.expand(k.shape[0], len(at), -1))
        self._at.append(at.double().transpose(0, 1).expand(k.shape[0], -1, -1))
        return axes.rotate_left(rope, k, at, order), order

    def _decode(
        self, q: Tensor, q_pos: Pos, at: decode.QueryPositions, weights: Weights | None,
        options: dict[str, Any],
    ) -> list[Tensor]:  # fmt: skip
        """Run a few queries by the decoding kernel, or one by one over keys rotated in place;
        return [] if neither is possible or a masked call is faster."""
        scheme, keys, sinks = self.scheme, self.keys, options.get("sink_logits")
        lines, size, scale = keys.lines or [()], q.shape[-1], options.get("scale")
        k, v = keys.buffer.stored, self.values.stored  # a plan limits reads to the columns in use
        plan = decode.plan_for(scheme, q, k, v, keys.length, tuple(lines), at)
        operator = operator_for(q) if plan is None and size == v.shape[-1] else None
        if plan is None:
            few = q.shape[2] == 1 or (q.shape[2] <= MAX_SEPARATE and keys.any_rotated())
            many_rows = self._one_frame and q.is_cuda and len(lines) > MAX_SEPARATE
            if many_rows or not few or operator is None or q.shape[1] % v.shape[1]:
                return []
        scale = scheme.softmax_scale(size) if scale is None else scale
        if scheme.scale and not (plan and plan.scaled):
            q = self._scaled(q, q_pos, weights, scale)
        if plan is not None:
            self.planned = None if self.slot is None else (q, plan)
            return [decode.run_kernel(scheme, q, k, v, plan, scale, sinks)]
        assert operator is not None
        outs, v = [], self.values.view()
        for n, positions in enumerate(zip(*at, strict=True)):
            query_pos = one_if_equal(positions)
            step = latest_step(scheme, keys.table_spec(k), keys.lines or [()], query_pos)
            query = q if q.shape[2] == 1 else q[:, :, n : n + 1]
            outs.append(run_step(step, operator, query, keys.apply(step), v, scale, sinks))
        return outs

    def _scaled(self, q: Tensor, q_pos: Pos, weights: Weights | None, scale: float) -> Tensor:
        """Multiply a few queries by the factors of ④."""
        scheme = self.scheme
        learned = any(weights_of(part.name, weights or {}) for part in scheme.scale)
        if isinstance(q_pos, range) and scheme.causal and not learned:
            capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
            make = query_factors.make if capturing else query_factors
            return (q * make(scheme, q_pos, q.dtype, q.device)).to(q.dtype)
        options = {"scale": scale, "segments": None, "length": self.keys.length}
        k, v = self.keys.buffer.view(), self.values.view()
        return prepare(scheme, q, k, v, q_pos, self._pos, weights, **options).q

    def crop(self, seen: int) -> None:
        """Drop all but the first `seen` tokens ever added."""
        if not 0 <= seen <= self.seen:
            raise UserError(f"a cache that has seen {self.seen} tokens can't be cropped to {seen}.")
        if seen < self._min_crop:
            raise UserError(
                f"this cache can't go back to its first {seen} tokens, because what these could "
                f"see has been evicted: crop to {self._min_crop} or more, or give a larger slack."
            )
        self._select((as_rows(self._order)[0] < seen).nonzero()[:, 0])
        self.seen, self._checked = seen, min(self._checked, seen)

    def reorder(self, rows: Tensor) -> None:
        """Replace each sequence r by sequence rows[r], for beam search."""
        self._map_batch(lambda x: x.index_select(0, rows.to(x.device)))

    def select(self, rows: Tensor) -> None:
        """Keep these sequences: indices, or True for each one to keep."""
        self.reorder(rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows)

    def repeat(self, times: int) -> None:
        """Repeat each sequence `times` times, copies next to each other."""
        self._map_batch(lambda x: x.repeat_interleave(times, 0))

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to the batch dimension of everything that has one."""
        for buffer in (self.keys, self.values, self._padding, self._sums, self._at):
            buffer.map_batch(change)
        if isinstance(self._pos, Tensor) and self._pos.shape[0] > 1:
            self._pos = change(self._pos)
        if isinstance(self.length, Tensor) and self.length.dim():
            self.length = change(self.length)

    def _hidden(self) -> Tensor | None:
        return self._padding.view() if len(self._padding) else None

    def _evict(self) -> None:
        """Drop the columns that no query after the last `slack` tokens can see in any row."""
        self._checked = self.seen
        before = len(self) - self.slack
        if before <= 0:
            return
        pos = as_rows(self._pos)[:, :before]
        now = pos.amax(1, keepdim=True) + 1
        keep = torch.zeros_like(pos, dtype=torch.bool)
        for area in self.scheme.areas():
            keep |= area.ever(now, pos)
        if len(self._padding):
            keep = keep & ~self._padding.view()[:, :before].to(pos.device)
        keep = keep.any(0)
        if not bool(keep.all()):
            last = torch.arange(before, len(self), device=pos.device)
            self._select(torch.cat([keep.nonzero()[:, 0], last]))
            self._min_crop = self.seen - self.slack

    def _select(self, index: Tensor) -> None:
        """Keep these columns."""
        for buffer in (self.keys, self.values, self._padding, self._sums, self._at):
            buffer.select(index)
        self._pos = select_positions(self._pos, index)
        self._order = select_positions(self._order, index)


@Latest  # reused by the other layers of a step
@torch.no_grad()
def query_factors(
    scheme: Scheme, pos: range, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "1 h n 1"]:
    """Return the factors of ④ for queries at these positions, in float32 at least."""
    with torch.inference_mode(False):  # they may later be used outside it
        factors = scale_factors(scheme, as_rows(pos, device))
        return factors.to(torch.promote_types(dtype, torch.float32))[..., None]


def _query_positions(
    q: Tensor, q_pos: Pos, options: dict[str, Any]
) -> tuple[tuple[int, ...], ...] | None:
    """Return the positions of the queries, one row for all sequences or one each; None if the
    softmax is not over q·k alone, or if there are many queries."""
    if options.get("softcap") or options.get("dropout") or options.get("segments") is not None:
        return None
    if options.get("backend", "auto") != "auto" or q.shape[2] > decode.MAX_QUERIES:
        return None
    if isinstance(q_pos, range):
        return (tuple(q_pos),)
    rows = torch.atleast_2d(to_host(q_pos))
    return None if rows.is_floating_point() else one_if_equal(tuple(map(tuple, rows.tolist())))
