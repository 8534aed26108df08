"""Attention over a paged cache of pre-RoPE keys, as servers keep it: blocks of tokens, anywhere.

A batch holds the new tokens of several sequences one after another. Sequence r has the queries
`query_start[r]` … `query_start[r + 1]` - 1, which are its last tokens, and token p of it lies in
block `block_table[r, p // block_size]` of the cache at place p mod block_size (Kwon et al. 2023,
"PagedAttention"). A sequence's keys and values are gathered and run as any other attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Weights
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops.attention import attention

Ints = Sequence[int] | Int[Tensor, " _"]  # on the host: reading a device's would wait for it


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
    out: Float[Tensor, "tokens h dv"] | None = None,
) -> Float[Tensor, "tokens h dv"]:
    """Attention of each sequence's last tokens over all of its cached ones. No gradients.

    Args:
        query_start: where each sequence's queries begin, and where the last one's end (b + 1).
        seq_lens: tokens of each sequence, the new ones included.
        length: what length-dependent frequencies take for the total length; by default each
            sequence's own.
        out: written to where given; tokens that belong to no sequence are left as they are.
    """
    starts, lens = _host(query_start), _host(seq_lens)
    _check(q, key_cache, value_cache, block_table, starts, lens)
    if out is None:
        out = q.new_zeros(*q.shape[:2], value_cache.shape[3])
    options = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits, "length": length}
    with torch.no_grad():
        for r, seq_len in enumerate(lens):
            rows = slice(starts[r], starts[r + 1])
            n = rows.stop - rows.start
            if n:
                q_pos = range(seq_len - n, seq_len)
                k_pos = range(_first_seen(scheme, q_pos[0]), seq_len)
                k, v = (gather(x, block_table[r], k_pos) for x in (key_cache, value_cache))
                one = q[rows].transpose(0, 1)[None]
                own = attention(scheme, one, k, v, q_pos, k_pos, weights, **options)
                out[rows] = own[0].transpose(0, 1)
    return out


def gather(
    cache: Float[Tensor, "blocks block_size hkv d"], blocks: Int[Tensor, " _"], tokens: range
) -> Float[Tensor, "1 hkv n d"]:
    """These tokens of a sequence, whose blocks are given, one after another."""
    size = cache.shape[1]
    first = tokens.start // size
    some = cache[blocks[first : -(-tokens.stop // size)]].flatten(0, 1)
    return some[tokens.start - first * size :][: len(tokens)].transpose(0, 1)[None]


def _first_seen(scheme: Scheme, first: int) -> int:
    """The first token that a query at `first`, or a later one, sees: others need not be read."""
    start = min((int(area.interval(torch.tensor(first))[0]) for area in scheme.areas()), default=0)
    return min(start, first)


def _host(numbers: Ints) -> list[int]:
    return numbers.tolist() if isinstance(numbers, Tensor) else list(numbers)


def _check(
    q: Any, key_cache: Any, value_cache: Any, block_table: Any, starts: list[int], lens: list[int]
) -> None:
    """A sentence for tensors and numbers that do not fit together."""
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
