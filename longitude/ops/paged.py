"""Attention over a paged cache of pre-RoPE keys, as servers keep it: blocks of tokens, anywhere.

A batch holds the new tokens of several sequences one after another. Sequence r has the queries
`query_start[r]` … `query_start[r + 1]` - 1, which are its last tokens, and token p of it lies in
block `block_table[r, p // block_size]` of the cache at offset p mod block_size (Kwon et al. 2023,
"PagedAttention").

Sequences with a few queries run in one launch of the decoding kernel, which reads keys in place and
rotates them (`ops.decode`). For other sequences, keys and values are gathered and run as ordinary
attention. The choice follows from scheme, shapes and numbers, once for all layers of a step
(`PagedPlan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Dims, Weights
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops import decode
from longitude.ops.attention import attention
from longitude.ops.inputs import scale_factors

Ints = Sequence[int] | Int[Tensor, " _"]  # on the host: reading a device's synchronizes with it


class Gathered(NamedTuple):
    """A sequence whose keys are gathered: its queries, and the positions of queries and keys."""

    sequence: int
    tokens: slice
    q_pos: range
    k_pos: range


@dataclass(frozen=True, eq=False)
class Decoded:
    """The sequences that the kernel runs; those with fewer queries repeat their last one."""

    plan: decode.DecodePlan
    sequences: Tensor | slice
    tokens: Tensor | slice  # their queries, equally many per sequence
    factors: Tensor | None  # of site ④ for each query, unless the plan includes them


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """How a step of a batch runs, and why the kernel is not used, if it is not."""

    gathered: tuple[Gathered, ...]
    decoded: Decoded | None = None
    declined: str | None = None


def paged_attention(
    scheme: Scheme,
    q: Float[Tensor, "tokens h d"],
    key_cache: Float[Tensor, "blocks block_size hkv d"],
    value_cache: Float[Tensor, "blocks block_size hkv dv"],
    block_table: Int[Tensor, "b _"],
    query_start: Ints,
    seq_lens: Ints,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    weights: Weights | None = None,
    length: int | None = None,
    plan: PagedPlan | None = None,
    out: Float[Tensor, "tokens h dv"] | None = None,
) -> Float[Tensor, "tokens h dv"]:
    """Attention of each sequence's last tokens over all of its cached ones. No gradients.

    Args:
        query_start: where each sequence's queries begin, and where the last one's end (b + 1).
        seq_lens: number of tokens of each sequence, the new ones included.
        length: total length for length-dependent frequencies; by default each sequence's own.
        plan: result of `plan_paged` for the same arguments, where layers of one scheme share it.
        out: output tensor to write to; tokens that belong to no sequence are left unchanged.
    """
    caches = (key_cache, value_cache)
    if plan is None:
        plan = plan_paged(scheme, q, *caches, block_table, query_start, seq_lens,
                          softcap=softcap, length=length)  # fmt: skip
    if out is None:
        out = q.new_zeros(*q.shape[:2], value_cache.shape[3])
    scale = scheme.softmax_scale(q.shape[2]) if scale is None else scale
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "length": length}
    with torch.no_grad():
        if plan.decoded is not None:
            _decode(scheme, q, caches, block_table, plan.decoded, scale, sink_logits, out)
        for r, tokens, q_pos, k_pos in plan.gathered:
            k, v = (gather(x, block_table[r], k_pos) for x in caches)
            queries = q[tokens].transpose(0, 1)[None]
            attended = attention(scheme, queries, k, v, q_pos, k_pos, weights, **options)
            out[tokens] = attended[0].transpose(0, 1)
    return out


def plan_paged(
    scheme: Scheme, q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor,
    query_start: Ints, seq_lens: Ints, *, softcap: float | None = None, length: int | None = None,
) -> PagedPlan:  # fmt: skip
    """Plan a batch; of the tensors only shapes, types and the device matter."""
    starts, lens = _host(query_start), _host(seq_lens)
    _check(q, key_cache, value_cache, block_table, starts, lens)
    counts = [b - a for a, b in pairwise(starts)]
    k, v = (x.transpose(1, 2) for x in (key_cache, value_cache))
    why = _not_paged(scheme, q, (k, v), softcap, length)
    few = [r for r, n in enumerate(counts) if 0 < n <= decode.MAX_QUERIES and why is None]
    decoded = _plan_decode(scheme, q, k, v, starts, lens, few, length or 1) if few else None
    gathered = []
    for r, (start, stop) in enumerate(pairwise(starts)):
        if start < stop and (decoded is None or r not in few):
            q_pos = range(lens[r] - stop + start, lens[r])
            seen = [area.interval_of(q_pos[0])[0] for area in scheme.areas()]
            k_pos = range(max(0, min([q_pos[0], *seen])), lens[r])  # skips keys that no query sees
            gathered.append(Gathered(r, slice(start, stop), q_pos, k_pos))
    return PagedPlan(tuple(gathered), decoded, why)


def _not_paged(
    scheme: Scheme, q: Tensor, caches: tuple[Tensor, Tensor], softcap: float | None,
    length: int | None,
) -> str | None:  # fmt: skip
    """Return why the kernel can't decode from this cache, or None."""
    rope, dims = scheme.rotary, Dims(q.shape[1] * q.shape[2], q.shape[1], q.shape[2])
    if softcap is not None:
        return "it has no soft-capping"
    if rope is not None and rope.frequencies.by_length and length is None:
        return "frequencies by length need one length for all sequences"
    if scheme.scale and (not scheme.causal or any(part.init(dims, None) for part in scheme.scale)):
        return "the factors of queries must follow from their positions"
    if any(x.stride(-1) != 1 for x in caches):
        return "the last dimension of the cache must be contiguous"
    return decode.unsupported_reason(scheme, q[:1].transpose(0, 1)[None], *caches)


def _plan_decode(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, starts: list[int], lens: list[int],
    few: list[int], length: int,
) -> Decoded | None:  # fmt: skip
    """Plan these sequences for the kernel; None where positions are too large."""
    counts = [starts[r + 1] - starts[r] for r in few]
    nq = max(counts)
    rows = [[min(m, n - 1) for m in range(nq)] for n in counts]
    at = [tuple(lens[r] - n + m for m in own) for r, n, own in zip(few, counts, rows, strict=True)]
    tokens = [starts[r] + m for r, own in zip(few, rows, strict=True) for m in own]
    queries = q[:1].transpose(0, 1).expand(len(few), -1, nq, -1)
    plan = decode.plan_for(
        scheme, queries, k, v, length, [(decode.Run(0, 0, lens[r]),) for r in few], at
    )
    if plan is None:
        return None
    factors = None
    if scheme.scale and not plan.scaled:
        scales = scale_factors(scheme, torch.tensor(at))
        factors = scales.expand(len(few), -1, nq).transpose(1, 2).reshape(len(tokens), -1, 1)
        factors = factors.to(q.device, torch.promote_types(q.dtype, torch.float32))
    return Decoded(plan, _index(few, q.device), _index(tokens, q.device), factors)


def _index(numbers: list[int], device: torch.device) -> Tensor | slice:
    """Return an index for rows: a slice, which copies nothing, where they are consecutive."""
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers).to(device, non_blocking=True)


def _decode(
    scheme: Scheme, q: Tensor, caches: tuple[Tensor, Tensor], block_table: Tensor, own: Decoded,
    scale: float, sink_logits: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Run the queries of `own` by the kernel and write their outputs to `out`."""
    nq, rows = own.plan.queries, q[own.tokens]
    if own.factors is not None:
        rows = (rows.to(own.factors.dtype) * own.factors).to(q.dtype)
    queries = rows.unflatten(0, (-1, nq)).transpose(1, 2)
    k, v = (x.transpose(1, 2) for x in caches)
    in_place = nq == 1 and isinstance(own.tokens, slice) and out.is_contiguous()
    kwargs = {
        "block_table": block_table[own.sequences],
        "out": out[own.tokens][:, :, None] if in_place else None,
    }
    outputs = decode.run_kernel(scheme, queries, k, v, own.plan, scale, sink_logits, **kwargs)
    if not in_place:
        out[own.tokens] = outputs.transpose(1, 2).flatten(0, 1)


def gather(
    cache: Float[Tensor, "blocks block_size hkv d"], blocks: Int[Tensor, " _"], tokens: range
) -> Float[Tensor, "1 hkv n d"]:
    """Gather these tokens of a sequence from its blocks."""
    size = cache.shape[1]
    first = tokens.start // size
    gathered = cache[blocks[first : -(-tokens.stop // size)]].flatten(0, 1)
    return gathered[tokens.start - first * size :][: len(tokens)].transpose(0, 1)[None]


def _host(numbers: Ints) -> list[int]:
    return numbers.tolist() if isinstance(numbers, Tensor) else list(numbers)


def _check(
    q: Any, key_cache: Any, value_cache: Any, block_table: Any, starts: list[int], lens: list[int]
) -> None:
    """Raise for tensors and numbers that do not fit together."""
    shapes = [tuple(x.shape) for x in (q, key_cache, value_cache, block_table)]
    dims = [len(shape) for shape in shapes]
    if dims != [3, 4, 4, 2] or shapes[1][:3] != shapes[2][:3] or shapes[0][2] != shapes[1][3]:
        raise UserError(
            f"q, the key cache, the value cache and the block table do not fit together, but got "
            f"{', '.join(map(str, shapes))}: give (tokens, heads, d), (blocks, block size, key "
            f"heads, d) twice, and (sequences, blocks)."
        )
    counts = [b - a for a, b in pairwise(starts)]
    fits = (
        len(counts) == len(lens) == shapes[3][0] and starts[0] >= 0 and starts[-1] <= shapes[0][0]
    )
    if not fits or any(not 0 <= n <= seq_len for n, seq_len in zip(counts, lens, strict=True)):
        raise UserError(
            f"query_start and seq_lens do not fit {shapes[0][0]} tokens of {shapes[3][0]} "
            f"sequences, but got {starts} and {lens}: give ascending starts, the last one's end, "
            f"and lengths that include the new tokens."
        )
    if max(lens, default=0) > shapes[3][1] * shapes[1][1]:
        raise UserError(
            f"a sequence of {max(lens)} tokens does not fit a block table of {shapes[3][1]} blocks "
            f"of {shapes[1][1]} tokens."
        )
