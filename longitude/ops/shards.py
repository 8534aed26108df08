"""The tokens of a group's ranks: which rank holds which positions, agreed on before any work.

Every rank of a call sends the others a few numbers that describe its inputs; ranks that disagree
raise the same error. Positions, with padding and segments, are sent only where they are not ranges:
24 bytes per token and row, small beside its keys. Nothing is pickled. The layers of a model's
forward share all this, and agree once (`LayerGroup`).

`shard` cuts a sequence into one part for each rank and `gather_shards` puts it together again. The
work of causal attention grows along the sequence: in zigzag order rank r of N holds the pieces r
and 2N - 1 - r of 2N, which balances the work of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longitude.core.part import Pos, as_rows, as_tensor
from longitude.core.validate import UserError
from longitude.ops.inputs import AttentionInputs

Order = Literal["contiguous", "zigzag"]
MAX_RUNS = 16  # of contiguous positions; with more, positions are treated as arbitrary
# what must be equal on all ranks, and its name in errors
SAME = {
    "scheme": "schemes", "dtype": "dtypes", "heads": "batches, heads or head sizes",
    "options": "options", "gradients": "needs of gradients",
}  # fmt: skip
FIELDS = (
    "accepted", *SAME, "queries", "keys", "q_low", "q_high", "k_low", "k_high", "is_range",
    "real", "padding", "segments",
)  # fmt: skip


class Run(NamedTuple):
    """Tokens of one document at contiguous positions."""

    tokens: slice
    pos: range
    segment: int = 0


Runs = list[Run] | None  # None: too many


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's tokens, as every rank knows them."""

    queries: int
    keys: int
    q_span: tuple[float, float]  # least and greatest position
    k_span: tuple[float, float]
    pos: Pos = range(0)  # of the keys
    runs: Runs = None  # of keys that are not padding, if these form a few runs
    padding: Tensor | None = None
    segments: Tensor | None = None


def shard_positions(n: int, group: Any, order: Order = "contiguous") -> Tensor:
    """Return the positions that this rank holds of a sequence of n tokens; without a group, all."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if order not in ("contiguous", "zigzag"):
        raise UserError(f"order is contiguous or zigzag, but got {order!r}: use one of them.")
    pieces = size if order == "contiguous" else 2 * size
    pieces_held = (rank,) if order == "contiguous" else (rank, pieces - 1 - rank)
    ends = [n * i // pieces for i in range(pieces + 1)]
    return torch.cat([torch.arange(ends[i], ends[i + 1]) for i in pieces_held])


def shard(x: Tensor, group: Any, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """Return this rank's part of a tensor that every rank has, cut along its tokens."""
    return x.index_select(dim, shard_positions(x.shape[dim], group, order).to(x.device))


def gather_shards(x: Tensor, pos: Pos, group: Any, dim: int = 1) -> Tensor:
    """Gather the tokens of all ranks by position, on every rank, without gradients."""
    x = x.detach().movedim(dim, 0)
    mine = as_tensor(pos, x.device).flatten().to(torch.float64)
    if group is None:
        return x[mine.argsort()].movedim(0, dim)
    counts = [int(row[0]) for row in all_gather(mine.new_tensor([len(mine)]), group)]
    most = max(counts)
    filled = [torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])]) for t in (x, mine)]
    gathered = [all_gather(t, group) for t in filled]
    tokens, at = (torch.cat([t[:n] for t, n in zip(ts, counts, strict=True)]) for ts in gathered)
    return tokens[at.argsort()].movedim(0, dim)


def all_gather(x: Tensor, group: Any) -> list[Tensor]:
    """Gather every rank's tensor; all have the same shape."""
    x = x.contiguous()
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    with answered():
        dist.all_gather(gathered, x, group=group)
    return gathered


class RankLost(UserError):
    """A rank of the group has ended: the others can't go on without it."""


@contextmanager
def answered() -> Iterator[None]:
    """Turn the failure of another rank into a `RankLost` error."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).split("\n")[0][:200]
        raise RankLost(
            f"a rank of the group does not answer ({why}): start all ranks again; runs that "
            f"save checkpoints or rows resume from the last one."
        ) from error


Message = tuple[int, Sequence[Tensor], int]  # a rank of the group, tensors, a tag


def transfer(
    group: Any, sends: Sequence[Message], receives: Sequence[Message]
) -> Callable[[], None]:
    """Start sending and receiving tensors; the returned function waits for all of them."""
    ops = [
        dist.P2POp(op, x, dist.get_global_rank(group, rank), group, tag + n)
        for op, messages in ((dist.isend, sends), (dist.irecv, receives))
        for rank, tensors, tag in messages
        for n, x in enumerate(tensors)
        if x.numel()
    ]
    with answered():
        works = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> None:
        with answered():
            for work in works:
                work.wait()

    return wait


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """A group for all layers of one forward, whose tokens are the same: ranks agree at the first
    layer, on the schemes of all. Decoding does not exchange the positions of cached keys: ranks
    agreed on them when they were cached, and masks evict different ones in different layers."""

    group: Any
    schemes: str = ""  # of all layers; empty: that of the call
    learns: bool = False  # whether any layer needs gradients
    agreed: dict[str, list[Shard]] = field(default_factory=dict)  # by the kind of split


def process_group(group: Any) -> Any:
    """Return the process group whose ranks send and receive."""
    return group.group if isinstance(group, LayerGroup) else group


def agree(
    given: AttentionInputs | UserError, split: str, length: Any, group: Any, device: torch.device
) -> list[Shard]:
    """Return the shards of all ranks, or this one's alone in a forward that decodes; raise on every
    rank if they disagree."""
    layers = group if isinstance(group, LayerGroup) else LayerGroup(group)
    decodes = split == "keys" and layers is group
    if split not in layers.agreed:
        options = f"{split} {length}"
        layers.agreed[split] = _exchanged(given, options, layers, device, not decodes)
    if isinstance(given, UserError):
        raise given  # all ranks raise it: it follows from what they agreed on
    if not decodes:
        return layers.agreed[split]
    # spans give how far keys travel (these stay) and the lengths of texts (the cache knows them)
    sizes, no_span = (given.q.shape[2], given.k.shape[2]), (0.0, 0.0)
    hides = (given.key_padding, given.segments and given.segments[1])
    return [Shard(*sizes, no_span, no_span, given.k_pos, runs(given.k_pos, *hides), *hides)]


def _exchanged(
    given: AttentionInputs | UserError, options: str, layers: LayerGroup, device: torch.device,
    positions: bool,
) -> list[Shard]:  # fmt: skip
    """Exchange the descriptions of all ranks' inputs, and their positions if needed."""
    numbers, schemes, group = [0.0] * len(FIELDS), layers.schemes, layers.group
    if isinstance(given, AttentionInputs):
        schemes = schemes or str(given.scheme)
        numbers = _described(given, schemes, options, layers.learns or given.needs_grad)
    header = torch.tensor(numbers, dtype=torch.float64, device=device)
    rows = [dict(zip(FIELDS, row.tolist(), strict=True)) for row in all_gather(header, group)]
    if isinstance(given, UserError):
        raise given
    for rank, row in enumerate(rows):
        if not row["accepted"]:
            raise UserError(f"rank {rank} rejected its inputs: see the error on that rank.")
        for name, words in SAME.items():
            if row[name] != rows[0][name]:
                raise UserError(
                    f"rank 0 and rank {rank} call attention with different {words} (this rank "
                    f"has {schemes} in {given.q.dtype}): give every rank the same."
                )
    shards = [
        Shard(int(r["queries"]), int(r["keys"]), (r["q_low"], r["q_high"]),
              (r["k_low"], r["k_high"]))
        for r in rows
    ]  # fmt: skip
    if positions:
        shards = _with_positions(given, shards, rows, group)
        check_overlaps(shards)
    return shards


def _described(p: AttentionInputs, schemes: str, options: str, learns: bool) -> list[float]:
    """Describe a call to the other ranks, in the order of FIELDS."""
    spans = [
        (0.0, 0.0) if not x.shape[2] else (float(pos[0]), float(pos[-1]))
        if isinstance(pos, range) else (float(pos.min()), float(pos.max()))
        for x, pos in ((p.q, p.q_pos), (p.k, p.k_pos))
    ]  # fmt: skip
    real = isinstance(p.k_pos, Tensor) and p.k_pos.is_floating_point()
    heads = (p.q.shape[:2], p.q.shape[3], p.k.shape[1], p.v.shape[3])
    settings = (p.scale, p.softcap, p.sink_logits is not None, options)
    return [
        1.0, *map(_number, (schemes, p.q.dtype, heads, settings)), float(learns),
        float(p.q.shape[2]), float(p.k.shape[2]), *spans[0], *spans[1],
        float(isinstance(p.k_pos, range) or not p.k.shape[2]), float(real),
        float(p.key_padding is not None), float(p.segments is not None),
    ]  # fmt: skip


def _number(value: Any) -> float:
    """Hash a value to an integer that float64 can hold: equal for equal texts."""
    return float(int.from_bytes(sha256(str(value).encode()).digest()[:6], "big"))


def _with_positions(
    p: AttentionInputs, shards: list[Shard], rows: list[dict[str, float]], group: Any
) -> list[Shard]:
    """Add positions to the shards, and padding and segments if any rank has them."""
    padded, packed = (any(r[name] for r in rows) for name in ("padding", "segments"))
    if all(r["is_range"] for r in rows) and not padded and not packed:
        every = [range(int(s.k_span[0]), int(s.k_span[0]) + s.keys) for s in shards]
        return [replace(s, pos=x, runs=runs(x)) for s, x in zip(shards, every, strict=True)]
    b, n = p.k.shape[0], p.k.shape[2]
    mine = torch.zeros(3, b, max(s.keys for s in shards), dtype=torch.float64, device=p.k.device)
    for own, x in zip(mine, (p.k_rows, p.key_padding, p.segments and p.segments[1]), strict=True):
        if x is not None:
            own[:, :n] = x
    dtype = torch.float64 if any(r["real"] for r in rows) else torch.int64
    gathered = torch.stack(all_gather(mine, group))
    on_host = gathered.cpu()  # once, since each copy synchronizes with the device

    def of(x: Tensor, keys: int, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        pos, padding, segments = x[:, :, :keys]
        hidden = padding.bool() if padded else None
        return pos[:rows].to(dtype), hidden, segments.long() if packed else None

    completed = []
    for s, every, host in zip(shards, gathered, on_host, strict=True):
        rows_differ = not bool((host[0] == host[0, :1]).all())
        size = (s.keys, b if rows_differ else 1)
        pos, padding, segments = of(every, *size)
        fields = {"pos": pos, "padding": padding, "segments": segments}
        completed.append(replace(s, **fields, runs=runs(*of(host, *size))))
    return completed


def runs(pos: Pos, padding: Tensor | None = None, segments: Tensor | None = None) -> Runs:
    """Return the tokens that are not padding as a few runs, if rows are equal; None otherwise."""
    if isinstance(pos, range) and padding is None and segments is None:
        return [Run(slice(0, len(pos)), pos)] if pos else []
    columns = [as_rows(pos), *(x for x in (padding, segments) if x is not None)]
    if columns[0].shape[0] != 1 or columns[0].is_floating_point():
        return None
    columns = [x.cpu() for x in columns]
    if not all(bool((x == x[:1]).all()) for x in columns):
        return None
    at = columns[0][0]
    token = torch.arange(len(at)) if padding is None else (~columns[1][0]).nonzero().flatten()
    segment = torch.zeros_like(at) if segments is None else columns[-1][0]
    steps = torch.stack([token, at[token], segment[token]]).diff()
    ends = ((steps != torch.tensor([[1], [1], [0]])).any(0).nonzero().flatten() + 1).tolist()
    if len(ends) >= MAX_RUNS:
        return None
    results = []
    for a, b in pairwise([0, *ends, len(token)]):
        if a < b:
            first, start = int(token[a]), int(at[token[a]])
            pos = range(start, start + b - a)
            results.append(Run(slice(first, first + b - a), pos, int(segment[first])))
    return results


def check_overlaps(shards: list[Shard]) -> None:
    """Raise where two ranks hold one position of one document."""
    hidden = shards[0].padding is not None or shards[0].segments is not None
    if not hidden and all(s.runs is not None for s in shards):
        spans = [(at.start, at.stop, r) for r, s in enumerate(shards) for _, at, _ in s.runs or ()]
        for (_, stop, a), (start, _, b) in pairwise(sorted(spans)):
            if start < stop and a != b:
                raise _overlap(a, b, start)
        return
    by_row = [x for s in shards for x in (as_rows(s.pos), s.padding, s.segments) if x is not None]
    for row in range(max(map(len, by_row))):
        tokens = [_row(s, row, r) for r, s in enumerate(shards)]
        pos, segment, rank = (torch.cat(x) for x in zip(*tokens, strict=True))
        order = pos.argsort(stable=True)
        order = order[segment[order].argsort(stable=True)]
        pos, segment, rank = pos[order], segment[order], rank[order]
        same = (pos.diff() == 0) & (segment.diff() == 0) & (rank.diff() != 0)
        if bool(same.any()):
            at = int(same.nonzero()[0])
            raise _overlap(int(rank[at]), int(rank[at + 1]), pos[at].item())


def joined(positions: list[Pos], device: torch.device) -> Tensor:
    """Concatenate the positions of all ranks (b|1, n)."""
    rows = [as_rows(pos).to(device) for pos in positions]
    most = max(x.shape[0] for x in rows)
    return torch.cat([x.expand(most, -1) for x in rows], 1)


def hidden_keys(shards: list[Shard], given: AttentionInputs) -> dict[str, Any]:
    """Return the options `key_padding` and `segments` of a call over the keys of all ranks."""
    options: dict[str, Any] = {}
    if shards[0].padding is not None:
        options["key_padding"] = torch.cat([s.padding for s in shards], 1)  # type: ignore[misc]
    if shards[0].segments is not None:
        every = torch.cat([s.segments for s in shards], 1)  # type: ignore[misc]
        unsegmented = every.new_zeros(given.q.shape[0], given.q.shape[2])
        options["segments"] = (unsegmented if given.segments is None else given.segments[0], every)
    return options


def _row(s: Shard, row: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return position, segment and rank of the keys in one row that are not padding."""
    pos = as_rows(s.pos)
    pos = pos[row if pos.shape[0] > 1 else 0]
    real = torch.ones_like(pos, dtype=torch.bool) if s.padding is None else ~s.padding[row]
    segment = torch.zeros_like(pos) if s.segments is None else s.segments[row]
    return pos[real], segment[real], torch.full_like(segment[real], rank)


def _overlap(a: int, b: int, position: float) -> UserError:
    return UserError(
        f"ranks {a} and {b} both hold a key at position {position}: give every rank positions of "
        f"its own, and packed documents their segments."
    )
