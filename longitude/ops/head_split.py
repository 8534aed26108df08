"""Tokens exchanged for heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Each rank runs plain attention, by any backend, over all tokens for its share of the heads. It sends
less than the ring where there are many heads; the number of ranks must divide the numbers of heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longitude.core.part import Pos
from longitude.core.validate import UserError
from longitude.ops.inputs import AttentionInputs, weights_of
from longitude.ops.shards import Shard, agree, hidden_keys, joined, process_group, transfer


def check_division(heads: int, key_heads: int, size: int) -> None:
    """Raise unless the number of ranks divides the numbers of heads."""
    if heads % size or key_heads % size:
        raise UserError(
            f"{heads} query heads and {key_heads} key heads can't be split over {size} ranks: "
            f"split by tokens, or start a number of ranks that divides both."
        )


def sends_less(heads: int, key_heads: int, size: int, bytes: int) -> bool:
    """Whether each rank sends less than in the ring, forward and backward, with elements of so many
    bytes: its share of queries, keys, values and outputs, and then of their gradients, instead of
    all keys and values, twice, and their gradients in float32 at least."""
    return 2 * bytes * (heads + key_heads) / size < (2 * bytes + max(bytes, 4)) * key_heads


def check_heads(p: AttentionInputs, size: int) -> None:
    check_division(p.q.shape[1], p.k.shape[1], size)
    learned = [part for part in p.scheme.scale if weights_of(part.name, p.weights)]
    if p.scheme.bias or learned or "rope.delta" in p.weights:
        raise UserError(
            f"{p.scheme} has parameters per head, which split='heads' would assign to the wrong "
            f"heads: use split='tokens'."
        )


class _Exchange(torch.autograd.Function):
    """Exchange tokens for heads: (b h n d) becomes (b h/N n' d) with all n' tokens, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, counts: list[int], to_heads: bool) -> Tensor:
        ctx.rest = (group, counts, to_heads)
        rank, size = dist.get_rank(group), len(counts)
        pieces = [p.contiguous() for p in (x.chunk(size, 1) if to_heads else x.split(counts, 2))]
        sizes, heads = counts if to_heads else [counts[rank]] * size, pieces[rank].shape[1]
        received = [x.new_empty(x.shape[0], heads, n, x.shape[3]) for n in sizes]
        received[rank] = pieces[rank]
        others = [r for r in range(size) if r != rank]
        sends = [(r, [pieces[r]], 0) for r in others]
        transfer(group, sends, [(r, [received[r]], 0) for r in others])()
        return torch.cat(received, 2 if to_heads else 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group, counts, to_heads = ctx.rest
        return _Exchange.apply(grads[0], group, counts, not to_heads), None, None, None


def by_heads(
    group: Any, shards: list[Shard], given: AttentionInputs, call: tuple[Any, ...], backend: str,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Run plain attention over all tokens for this rank's share of the heads."""
    from longitude.ops.attention import attention  # deferred: it imports this module

    scheme, q, k, v, _, _, weights = call
    segments = None if given.segments is None else (given.segments[0],) * 2
    queries_as_keys = replace(
        given, k=given.q, v=given.q, k_pos=given.q_pos, key_padding=None, segments=segments
    )
    queries, group = agree(queries_as_keys, "queries", None, group, q.device), process_group(group)
    options, heads_per_rank = options | hidden_keys(shards, given), q.shape[1] // len(shards)
    if given.sink_logits is not None:
        options["sink_logits"] = given.sink_logits.split(heads_per_rank)[dist.get_rank(group)]
    if options["segments"] is not None:
        of_queries = torch.cat([s.segments for s in queries], 1)  # type: ignore[misc]
        options["segments"] = (of_queries, options["segments"][1])
    hides = options["key_padding"] is not None or options["segments"] is not None
    (q_order, q_pos), (k_order, k_pos) = (
        _in_order(joined([s.pos for s in of_ranks], q.device), not hides)
        for of_ranks in (queries, shards)
    )
    counts = [[s.keys for s in of_ranks] for of_ranks in (queries, shards, shards)]
    q, k, v = (_Exchange.apply(x, group, n, True) for x, n in zip((q, k, v), counts, strict=True))
    q, k, v = q[:, :, q_order], k[:, :, k_order], v[:, :, k_order]
    out = attention(scheme, q, k, v, q_pos, k_pos, weights, backend=backend, **options)  # type: ignore[arg-type]
    inverse = q_order if isinstance(q_order, slice) else q_order.argsort()
    return _Exchange.apply(out[:, :, inverse], group, counts[0], False)  # type: ignore[return-value]


def _in_order(pos: Tensor, may: bool) -> tuple[slice | Tensor, Pos]:
    """Sort positions into a range where possible; return the order, and the positions in it."""
    if may and pos.shape[0] == 1 and pos.shape[1] and not pos.is_floating_point():
        order = pos[0].argsort()
        first = int(pos[0, order[0]])
        if bool((pos[0, order] == first + torch.arange(len(order), device=pos.device)).all()):
            return order, range(first, first + len(order))
    return slice(None), pos
