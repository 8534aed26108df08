"""FlexAttention: terms and masks that no ready-made kernel supports, compiled for the GPU.

Each pass is one flex call with the bias as its score modification and its areas as its block mask;
passes merge by their log-sum-exp, which flex differentiates. On CPU it runs uncompiled,
materialises the scores and has no backward: that is for tests. Where a long call's bias becomes
constant with distance, flex runs the near keys and plain kernels the far ones (`bands.far_tiles`).

`create_block_mask` evaluates every pair at once. Here block masks are built in strips of query
blocks, each reduced to which of its blocks contain any visible pair and which contain only visible
pairs: memory stays linear in the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from longitude.core.part import Term
from longitude.core.region import Area, visible
from longitude.ops.gpu_operators import hopper_forward
from longitude.ops.inputs import AttentionInputs
from longitude.ops.lse_merge import (
    OPERATORS,
    TileBatch,
    TileOutput,
    in_groups,
    merging_for,
    stacked,
)
from longitude.ops.passes import Pass, Windows, accum_dtype, make_passes
from longitude.ops.plan import Kernel, Plan, Step
from longitude.parts.distance_bias import ByDistance, term_type

# every scheme is compiled separately; beyond its default limit of 8 dynamo would give up
RECOMPILES = 1024
BLOCK = 128
STRIP_PAIRS = 2**24  # pairs evaluated at once
SCRATCH = 2**29  # bytes for products of queries and vectors, unless one key head needs more


@torch.compiler.disable
def outside_graph(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function that `torch.compile` must not trace."""
    return function(*args)


def run(p: AttentionInputs, plan: Plan | None = None) -> Tensor:
    """Compute attention pass by pass, and the tiles of the plan by their kernels."""
    far = [] if plan is None else [step for step in plan.steps if step.tiles]
    if far:
        return _with_far_tiles(p, far)
    dtype, modify = accum_dtype(p.v), _score_mod(p, [*p.terms().values()])
    out, lse = None, None
    for each_pass in make_passes(p):
        more, more_lse = (x.to(dtype) for x in _flex(p, each_pass, each_pass.areas, modify))
        if out is None or lse is None:
            out, lse = more, more_lse
            continue
        neither = torch.isneginf(more_lse) & torch.isneginf(lse)  # both are zeros: any weight does
        weight = torch.sigmoid(torch.where(neither, 0.0, more_lse - lse))
        out = out + weight[..., None] * (more - out)
        lse = torch.logaddexp(lse, more_lse)
    assert out is not None and lse is not None
    if p.sink_logits is not None:
        out = out * torch.sigmoid(lse - p.sink_logits.to(dtype)[:, None])[..., None]
    return out.to(p.v.dtype)


def _flex(
    p: AttentionInputs, one: Pass, areas: tuple[Area, ...], modify: Callable[..., Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the output of a pass restricted to some areas, and its log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest

    if isinstance(p.q_pos, range) and isinstance(p.k_pos, range) and not p.hides:
        mask = _of_ranges(areas, p.q_pos, p.k_pos, p.q.device)
    else:
        batch = p.q.shape[0] if p.hides else max(p.q_rows.shape[0], p.k_rows.shape[0])
        mask = _from_pairs(p.mask(areas), batch, p.q.shape[2], p.k.shape[2], p.q.device)
    q, k = one.rotated()
    options = {}
    if p.q.is_cuda and any(term_type(part) is ByDistance for part in p.scheme.bias):
        # float32 tables are prefetched like keys: three tiles of both exceed shared memory
        options["kernel_options"] = {"fwd_num_stages": 2}
    out, aux = compiled_flex(p.q.is_cuda)(
        *(x.contiguous() for x in (q, k, p.v)),
        score_mod=modify,
        block_mask=mask,
        scale=p.scale,
        enable_gqa=p.q.shape[1] != p.k.shape[1],
        return_aux=AuxRequest(lse=True),
        **options,
    )
    return out, aux.lse


def _with_far_tiles(p: AttentionInputs, far: list[Step]) -> Tensor:
    """Run a bias that becomes constant: near keys by flex, far ones as plain tiles, with as many
    heads at a time as keep their products with vectors within `SCRATCH`."""
    (term,), key_heads = p.terms().values(), p.k.shape[1]
    term, group = _behind(term, p), p.q.shape[1] // key_heads
    limit = SCRATCH // (p.q.shape[0] * group * p.q.shape[2] * term.query_bytes)
    at_once = next(n for n in range(key_heads, 0, -1) if key_heads % n == 0 and n <= max(1, limit))
    if at_once == key_heads:
        return _near_and_far(p, term, far)
    out = None
    for first in range(0, key_heads, at_once):
        keys = slice(first, first + at_once)
        heads = slice(keys.start * group, keys.stop * group)
        sinks = None if p.sink_logits is None else p.sink_logits[heads]
        part = replace(p, q=p.q[:, heads], k=p.k[:, keys], v=p.v[:, keys], sink_logits=sinks)
        part_out = _near_and_far(part, term.for_heads(heads), far)
        out = part_out.new_empty(*p.q.shape[:3], part_out.shape[3]) if out is None else out
        out[:, heads] = part_out
    assert out is not None
    return out


def _near_and_far(p: AttentionInputs, term: Any, far: list[Step]) -> Tensor:
    """Run the far tiles, with a vector added to q and a number per query to the LSE; then flex."""
    (part,), merging = p.scheme.bias, merging_for(p.q.shape[:3], p.v)
    flat = part.flat_beyond
    assert flat is not None and isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    for step in far:
        (t,) = step.tiles
        ahead = p.q_pos[t.top] < p.k_pos[t.left]
        numbers, key_vectors = term.far(ahead)
        q = p.q if key_vectors is None else p.q + (key_vectors / p.scale).to(p.q.dtype)[:, None]
        operator = OPERATORS[step.kernel]
        if step.kernel is Kernel.HOPPER:  # outputs rounded before merging would be less exact
            operator = operator._replace(forward=partial(hopper_forward, wide=True))
        tile = TileBatch(operator, 0, t, [t.top], [t.left], 0, 0)
        result = in_groups(tile.operator, *tile.arguments(q, p.k, p.v, p.scale))
        (numbers,) = stacked([Windows(numbers[..., None], [t.top], t.height)], tile.flipped)
        lse = result.lse + numbers.to(result.lse.dtype).view(result.lse.shape)
        merging.add(TileOutput(result.out[None], lse[None], [t.top], tile.flipped))
    (near_pass,) = make_passes(p)
    near = tuple(area & Area(lo=1 - flat, hi=flat) for area in near_pass.areas)
    out, lse = _flex(p, near_pass, near, _score_mod(p, [term]))
    merging.add(TileOutput(out[None, :, :, None], lse[None, :, :, None], [0]))
    return merging.result(p.sink_logits)[0]  # type: ignore[no-any-return]


def _score_mod(p: AttentionInputs, terms: list[Term]) -> Callable[..., Tensor] | None:
    """Return a function that adds every term to a score, then soft-caps it; None if unneeded."""
    terms, softcap = [_as_lookup(term, p) for term in terms], p.softcap
    if not terms and not softcap:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for term in terms:
            score = score + term(b, h, i, j).to(score.dtype)
        return softcap * torch.tanh(score / softcap) if softcap else score

    # flex counts a function's arguments, which a run-time type checker's wrapper would hide
    return lambda score, b, h, i, j: modify(score, b, h, i, j)


def _as_lookup(term: Term, p: AttentionInputs) -> Term:
    """Turn a term of the distance alone into a table look-up. It is cheap per score, and its
    gradient is spread over all distances, not a few weights that GPU threads would queue for."""
    (q, k), term = (p.q_pos, p.k_pos), _behind(term, p)
    getattr(term, "rows", None)  # computes a term's cached products here, not in every score
    if not (isinstance(q, range) and isinstance(k, range)):
        return term
    if not isinstance(term, ByDistance) or term.cheap:
        return term
    table, last = term.table(p.q.shape[1], q, k), p.k.shape[2] - 1
    return lambda b, h, i, j: table[h, i - j + last]


def _behind(term: Any, p: AttentionInputs) -> Any:
    """Drop the vectors that only keys ahead of their queries use, if the call is causal."""
    causal = all(area.lo is not None and area.lo >= 0 for area in p.scheme.areas())
    contiguous = isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    return term.behind() if causal and contiguous and hasattr(term, "behind") else term


@lru_cache(maxsize=2)
def compiled_flex(cuda: bool) -> Callable[..., Any]:
    """Return flex_attention, compiled on a GPU: as one full graph or with an error, never silently
    uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    if not cuda:
        return flex_attention
    import torch._dynamo.config as config

    compiled = torch.compile(flex_attention, fullgraph=True)
    limits = {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": 8 * RECOMPILES}

    def patient(*args: Any, **kwargs: Any) -> Any:
        with config.patch(limits):
            return compiled(*args, **kwargs)

    return patient


@lru_cache(maxsize=32)
def _of_ranges(areas: tuple[Area, ...], q: range, k: range, device: torch.device) -> Any:
    """Return the block mask of areas over ranges, memoised for all layers and calls."""
    # offsets are data, not code, so that other positions need no other compilation
    q0, k0 = (torch.tensor(pos.start, device=device) for pos in (q, k))
    return _from_pairs(lambda b, i, j: visible(areas, i + q0, j + k0), 1, len(q), len(k), device)


def _from_pairs(
    seen: Callable[..., Tensor], batch: int, nq: int, nk: int, device: torch.device
) -> Any:
    """Build a block mask, one strip of query blocks at a time."""
    from torch.nn.attention.flex_attention import BlockMask

    cols = -(-nk // BLOCK)
    rows = torch.arange(-(-nq // BLOCK) * BLOCK, device=device)[None, :, None]
    b = torch.arange(batch, device=device)[:, None, None]
    j = torch.arange(cols * BLOCK, device=device)[None, None, :]
    any_visible, all_visible = [], []  # by block (batch, rows, cols)
    for i in rows.split(max(1, STRIP_PAIRS // (batch * cols * BLOCK * BLOCK)) * BLOCK, 1):
        shown = seen(b, i.clamp(max=nq - 1), j.clamp(max=nk - 1))
        shown = (shown & (i < nq) & (j < nk)).expand(batch, i.shape[1], j.shape[2])
        shown = shown.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
        any_visible.append(shown.any(4).any(2))
        all_visible.append(shown.all(4).all(2))
    full = torch.cat(all_visible, 1)
    return BlockMask.from_kv_blocks(
        *_ordered(torch.cat(any_visible, 1) & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        # flex counts a function's arguments, which a run-time type checker's wrapper would hide
        mask_mod=lambda b, h, i, j: seen(b, i, j),
        seq_lengths=(nq, nk),
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and its columns, those first: (b 1 rows [cols])."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
