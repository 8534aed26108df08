"""Attention over the ranks of a process group, each with its own tokens, in any order.

Ring (Liu et al. 2023, arXiv:2310.01889): pre-RoPE keys and their values travel from rank to rank as
blocks, and each rank merges its queries' attention to each block by log-sum-exp, as a single
process merges tiles. Positions are known beforehand, so rotations, windows, biases, padding and
packed documents work as in a single process, and a block travels no further than the last rank that
sees any of it: a window is a halo of one hop, a causal block never goes back to earlier tokens. The
next block arrives while the current one is processed. Memory per rank is linear in its own tokens.

The backward sends keys and values around once more. Each block's gradients come from its own
backward with the merged output and log-sum-exp. Those of keys and values, in float32 at least,
travel with their block and return home from the last rank that saw it. Gradients of learned weights
and sinks are this rank's share, which data-parallel training sums over ranks.

split="heads" exchanges tokens for heads instead (`head_split`). split="keys" is decoding: every
rank has the same queries and its own keys, and only outputs travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longitude.core.part import Weights
from longitude.core.region import Area
from longitude.core.validate import UserError
from longitude.ops.axes import has_axes
from longitude.ops.head_split import by_heads, check_heads
from longitude.ops.inputs import AttentionInputs, as_half_pairs, cut_tokens, one_scheme, prepare
from longitude.ops.lse_merge import MergeOneByOne, TileOutput, merging_for, sink_gradients
from longitude.ops.passes import accum_dtype
from longitude.ops.ring_blocks import Merged, backward_block, forward_block, zeros_for
from longitude.ops.shards import (
    Message,
    Runs,
    Shard,
    agree,
    all_gather,
    hidden_keys,
    joined,
    process_group,
    runs,
    transfer,
)

BACKENDS = ("auto", "eager")
KEYS, GRADIENTS, HOME = 0, 8, 16  # tags of messages


def attention_over(
    group: Any, split: str, call: tuple[Any, ...], backend: str, options: dict[str, Any]
) -> Tensor:
    """Run `attention` on this rank, together with the calls of the group's other ranks."""
    given = _checked(group, split, call, backend, options)
    device = call[1].device if isinstance(call[1], Tensor) else torch.device("cpu")
    shards = agree(given, split, options["length"], group, device)
    assert isinstance(given, AttentionInputs)
    width = call[3].shape[-1]
    if split == "heads":
        return by_heads(group, shards, given, call, backend, options)[..., :width]
    if split != "keys" and not any(s.keys for s in shards):
        return given.zeros()[..., :width]
    group = process_group(group)
    rank = dist.get_rank(group) if len(shards) > 1 else 0
    ring = Ring.of((group, rank), shards, given, call, backend, options)
    if split == "keys":
        return _by_keys(ring, given)[..., :width]
    p, sums = ring.p, given.forget_sums or (None, None)
    tensors = (p.q, given.k, given.v, p.sink_logits, *sums, *p.weights.values())
    return _Ring.apply(ring, *tensors)[..., :width]  # type: ignore[index]


def _checked(
    group: Any, split: Any, call: tuple[Any, ...], backend: str, options: dict[str, Any]
) -> AttentionInputs | UserError:
    """Return this rank's validated inputs, or the error that they raise."""
    try:
        p, size = prepare(*call, **options), dist.get_world_size(process_group(group))
        if split not in ("tokens", "heads", "keys"):
            raise UserError(f"split is tokens, heads or keys, but got {split!r}: use one of them.")
        if p.dropout:
            raise UserError("dropout can't be merged across ranks: use dropout=0.")
        rope = one_scheme(call[0]).rotary
        if rope is not None and rope.axes is not None:
            if not rope.axes.temporal or any(map(has_axes, call[4:6])):
                raise UserError(
                    "several positions per token are supported in a single process only: give "
                    "every token one, or omit group."
                )
        if split != "heads" and backend not in BACKENDS:
            raise UserError(
                f"{backend} can't run over a group, since it returns no log-sum-exp to merge by: "
                f"use backend='auto' or 'eager'."
            )
        if split == "keys" and p.needs_grad:
            raise UserError("split='keys' serves decoding, without gradients: use torch.no_grad().")
        if split == "heads":
            check_heads(p, size)
        return p
    except UserError as error:
        return error


@dataclass(frozen=True, eq=False)
class Ring:
    """This rank's call over the keys of all ranks, and how far each rank's block travels."""

    p: AttentionInputs  # k and v are placeholders: no rank holds all keys
    shards: list[Shard]
    group: Any
    backend: str
    rank: int
    hops: list[int]  # how many ranks beyond its own each block travels
    q_runs: Runs

    @classmethod
    def of(
        cls, place: tuple[Any, int], shards: list[Shard], given: AttentionInputs,
        call: tuple[Any, ...], backend: str, options: dict[str, Any],
    ) -> Ring:  # fmt: skip
        """Return the call of a rank; `place` is its group and number. What applies to the call as a
        whole follows from all positions: lengths, and factors of ④ that count keys."""
        scheme, q, *_ = as_half_pairs(call[0], *call[1:4], weights=call[6] or {})
        total, pos = sum(s.keys for s in shards), joined([s.pos for s in shards], q.device)
        kv = (given.k, given.v)
        k, v = (x.new_zeros(()).expand(*x.shape[:2], total, x.shape[3]) for x in kv)
        options = options | {"scale": given.scale} | hidden_keys(shards, given)
        if given.forget_sums is not None:
            own = given.forget_sums[0]
            options["forget_sums"] = (own, own.new_zeros(()).expand(*own.shape[:2], total))
        hides = options["key_padding"] is not None or options["segments"] is not None
        if options["length"] is None and pos.shape[0] == 1 and not hides:
            ends = [s.k_span[1] for s in shards if s.keys]
            ends += [s.q_span[1] for s in shards if s.queries]
            options["length"] = max(1, math.ceil(max(ends, default=0)) + 1)
        p = prepare(scheme, q, k, v, call[4], pos, call[6], **options)
        hops_by_rank = hops(shards, p.scheme.areas())
        own, documents = shards[place[1]], None if p.segments is None else p.segments[0]
        same = given.segments is None or given.segments[0] is given.segments[1]
        same = same and call[4] is call[5] and own.padding is None  # of queries and keys
        q_runs = own.runs if same else runs(p.q_pos, segments=documents)
        return cls(p, shards, place[0], backend, place[1], hops_by_rank, q_runs)

    def owner(self, step: int) -> int:
        """Return the rank whose block is here at a step."""
        return self.neighbour(-step)

    def runs(self, step: int) -> tuple[Runs, Runs]:
        """Return the positions of the queries and of the block that is here at a step."""
        return self.q_runs, self.shards[self.owner(step)].runs

    def holds(self, step: int) -> bool:
        """Whether a block is here at a step."""
        return step <= self.hops[self.owner(step)]

    def fixed(self, q: Tensor, sums: Tensor | None, weights: Iterable[Tensor]) -> Weights:
        """Return the tensors that stay on this rank, by name: queries, forget sums, weights."""
        named = dict(zip(self.p.weights, weights, strict=True))
        return {"q": q} | ({} if sums is None else {"sums": sums}) | named

    def inputs(self, step: int, fixed: Weights, held: Sequence[Tensor]) -> AttentionInputs:
        """Return the inputs of this rank's queries over the block that is here at a step."""
        owner, (k, v, *k_sums), q = self.owner(step), held, fixed["q"]
        shard, first = self.shards[owner], sum(s.keys for s in self.shards[:owner])
        segments = self.p.segments
        if segments is not None and shard.segments is not None:
            segments = (segments[0], shard.segments)
        return replace(
            self.p, q=q, k=k, v=v, segments=segments, key_padding=shard.padding,
            k_pos=shard.pos if isinstance(shard.pos, range) else shard.pos.to(q.device),
            k_length=cut_tokens(self.p.k_length, slice(first, first + shard.keys)),
            weights={name: fixed[name] for name in self.p.weights}, sink_logits=None,
            forget_sums=(fixed["sums"], k_sums[0]) if k_sums else None,
        )  # fmt: skip

    def empty_like(self, step: int, own: Sequence[Tensor], wide: bool = False) -> list[Tensor]:
        """Allocate the block of a step, or its gradients."""
        n = self.shards[self.owner(step)].keys
        return [
            x.new_zeros(*x.shape[:2], n, *x.shape[3:], dtype=accum_dtype(x) if wide else x.dtype)
            for x in own
        ]

    def next_keys(
        self, step: int, held: Sequence[Tensor], own: Sequence[Tensor]
    ) -> tuple[list[Tensor], Message, Message]:
        """Return buffers for the next block, and its messages to send and receive, maybe empty."""
        goes_on = step < self.hops[self.owner(step)]
        arriving = self.empty_like(step + 1, own) if self.holds(step + 1) else []
        send = (self.neighbour(1), held if goes_on else [], KEYS)
        return arriving, send, (self.neighbour(-1), arriving, KEYS)

    def gradients_on(
        self, step: int, made: list[Tensor], own: Sequence[Tensor]
    ) -> tuple[list[Tensor], Message, Message]:
        """Return buffers for the gradients of this step's block, and the messages that receive them
        and send those of the previous step on with their block, or home from its last rank."""
        before = self.owner(step - 1)
        last = step - 1 == self.hops[before]
        send = (before, made, HOME) if last else (self.neighbour(1), made, GRADIENTS)
        arriving = self.empty_like(step, own, wide=True) if step > 1 and self.holds(step) else []
        return arriving, send, (self.neighbour(-1), arriving, GRADIENTS)

    def home(self, step: int, own: Sequence[Tensor]) -> tuple[list[Tensor], Message]:
        """Return buffers and a message for the own block's gradients, at the step they arrive."""
        hops = self.hops[self.rank]
        arriving = self.empty_like(0, own, wide=True) if hops and step == hops + 1 else []
        return arriving, (self.neighbour(hops), arriving, HOME)

    def neighbour(self, hops: int) -> int:
        """Return the rank that is `hops` ranks further on."""
        return (self.rank + hops) % len(self.shards)


def hops(shards: list[Shard], areas: tuple[Area, ...]) -> list[int]:
    """Return how many hops each rank's keys travel: to the last rank that may see any of them."""

    def sees(rank: int, owner: int) -> bool:
        a, b = shards[rank], shards[owner]
        both = bool(a.queries and b.keys)
        return both and any(area.reaches(a.q_span, b.k_span) for area in areas)

    size = len(shards)
    return [
        max((s for s in range(1, size) if sees((owner + s) % size, owner)), default=0)
        for owner in range(size)
    ]


def _add(totals: list[Tensor], more: list[Tensor]) -> None:
    """Add to the leading totals, in place."""
    for total, x in zip(totals, more, strict=False):
        total += x


def _leaf(x: Tensor) -> Tensor:
    """Detach a tensor into a leaf that accumulates gradients."""
    return x.detach().requires_grad_(x.is_floating_point())


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
                sums: Tensor | None, k_sums: Tensor | None,
                *weights: Tensor) -> Tensor:  # fmt: skip
        own = [x.contiguous() for x in (k, v, k_sums) if x is not None]
        fixed = ring.fixed(q, sums, weights)
        merging, held = merging_for(q.shape[:3], v), own  # type: ignore[arg-type]
        ctx.extras = {}
        for step in range(len(ring.shards)):
            arriving, send, receive = ring.next_keys(step, held, own)
            wait = transfer(ring.group, [send], [receive])
            if ring.holds(step):
                block = ring.inputs(step, fixed, held)
                ctx.extras[step] = forward_block(block, ring.runs(step), ring.backend, merging)
            wait()
            held = arriving
        out, lse = merging.result(sinks)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, sinks, sums, k_sums, out, lse, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        ring: Ring = ctx.ring
        q, k, v, sinks, sums, k_sums, out, lse, *weights = ctx.saved_tensors
        grad, size = grad_outputs[0].contiguous(), len(ring.shards)
        own = [x.contiguous() for x in (k, v, k_sums) if x is not None]
        fixed = ring.fixed(q, sums, weights)
        totals = [zeros_for(x) for x in (*fixed.values(), *own)]
        merged = Merged(grad, out, lse, (grad * out).sum(-1, dtype=lse.dtype))
        held, block_grads = own, []  # a block, and the gradients of the previous one
        for step in range(size + 1):
            arriving, keys, next_keys = ring.next_keys(step, held, own)
            partial, sent, received = ring.gradients_on(step, block_grads, own)
            returned, last = ring.home(step, own)
            wait = transfer(ring.group, [keys, sent], [next_keys, received, last])
            grads_here: list[Tensor] = []
            if ring.holds(step):
                stay, here = {name: _leaf(x) for name, x in fixed.items()}, [*map(_leaf, held)]
                options = (ring.runs(step), ring.backend, ctx.extras[step])
                leaves = [*stay.values(), *here]
                grads_here = backward_block(ring.inputs(step, stay, here), *options, merged, leaves)
            wait()
            block_grads = grads_here[len(fixed) :]
            _add(block_grads, partial)
            _add(totals, grads_here if step == 0 else grads_here[: len(fixed)])
            _add(totals[len(fixed) :], returned)
            held, block_grads = arriving, block_grads if step else []
        named = fixed | dict(zip(("k", "v", "k_sums"), own, strict=False))
        grads = {
            name: g.to(x.dtype) if x.is_floating_point() else None
            for (name, x), g in zip(named.items(), totals, strict=True)
        }
        d_sinks = None if sinks is None else sink_gradients(sinks, grad, out, lse)
        dq, dk, dv = (grads[name] for name in ("q", "k", "v"))
        d_weights = [grads[name] for name in ring.p.weights]
        return None, dq, dk, dv, d_sinks, grads.get("sums"), grads.get("k_sums"), *d_weights


def _by_keys(ring: Ring, given: AttentionInputs) -> Tensor:
    """Attend with equal queries on all ranks to the keys of all. Outputs and log-sum-exps go to all
    ranks and are merged in rank order, so that every rank has the same bits."""
    p, (of_q, *of_k) = ring.p, given.forget_sums or (None,)
    local, merged = (MergeOneByOne(p.q.shape[:3], given.v) for _ in range(2))  # type: ignore[arg-type]
    fixed = ring.fixed(p.q, of_q, p.weights.values())
    block = ring.inputs(0, fixed, (given.k, given.v, *of_k))
    forward_block(block, ring.runs(0), ring.backend, local)
    packed = torch.cat([local.out, local.lse[..., None]], -1)
    for part in all_gather(packed, ring.group):
        merged.add(TileOutput(part[None, :, :, None, :, :-1], part[None, :, :, None, :, -1], [0]))
    return merged.result(p.sink_logits)[0]
