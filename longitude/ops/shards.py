"""The tokens of a group's ranks: which rank holds which positions, agreed on before any work.

Every rank of a call tells the others in a few numbers what it was given; ranks that disagree raise
the same sentence. Positions follow only where they are no ranges, with padding and segments: 24
bytes per token and row, small beside its keys. Nothing is pickled. The layers of a model's forward
share all this, and agree once (`LayerGroup`).

`shard` cuts a sequence into one part for each rank and `gather_shards` puts it together again. The
work of causal attention grows along the sequence: in zigzag order rank r of N holds the pieces r
and 2N - 1 - r of 2N, which is as much work for each rank.
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
MAX_RUNS = 16  # of contiguous positions; more are treated as any positions
# what all ranks must have in common
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
    """One rank's tokens, as every rank knows them."""

    queries: int
    keys: int
    q_span: tuple[float, float]  # least and greatest position
    k_span: tuple[float, float]
    pos: Pos = range(0)  # of the keys
    runs: Runs = None  # keys that are no padding, if they are a few runs
    padding: Tensor | None = None
    segments: Tensor | None = None


def shard_positions(n: int, group: Any, order: Order = "contiguous") -> Tensor:
    """The positions that this rank holds of a sequence of n tokens; without a group, all."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if order not in ("contiguous", "zigzag"):
        raise UserError(f"order is contiguous or zigzag, but got {order!r}: use one of them.")
    pieces = size if order == "contiguous" else 2 * size
    own = (rank,) if order == "contiguous" else (rank, pieces - 1 - rank)
    ends = [n * i // pieces for i in range(pieces + 1)]
    return torch.cat([torch.arange(ends[i], ends[i + 1]) for i in own])


def shard(x: Tensor, group: Any, dim: int = 1, order: Order = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank has, cut along its tokens."""
    return x.index_select(dim, shard_positions(x.shape[dim], group, order).to(x.device))


def gather_shards(x: Tensor, pos: Pos, group: Any, dim: int = 1) -> Tensor:
    """The tokens of all ranks in the order of their positions, on every rank, without gradients."""
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
    """Every rank's tensor; all have one shape."""
    x = x.contiguous()
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    with answered():
        dist.all_gather(every, x, group=group)
    return every


class RankLost(UserError):
    """A rank of the group has ended: the others can't go on without it."""


@contextmanager
def answered() -> Iterator[None]:
    """A rank that died ends the others with a sentence."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).split("\n")[0][:200]
        raise RankLost(
            f"a rank of the group does not answer ({why}): start all ranks again; what keeps "
            f"checkpoints or rows continues from its last."
        ) from error


Message = tuple[int, Sequence[Tensor], int]  # a rank of the group, tensors, a tag


def transfer(
    group: Any, sends: Sequence[Message], receives: Sequence[Message]
) -> Callable[[], None]:
    """Begin to send and to receive into tensors; the function returned waits for all of it."""
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
    layer, on the schemes of all. Decoding takes the positions of cached keys as they are: ranks
    agreed on them when they were cached, and masks evict different ones from different layers."""

    group: Any
    schemes: str = ""  # of all layers; empty: that of the call
    learns: bool = False  # whether any layer needs gradients
    agreed: dict[str, list[Shard]] = field(default_factory=dict)  # by how attention is split


def process_group(group: Any) -> Any:
    """The group whose ranks send and receive."""
    return group.group if isinstance(group, LayerGroup) else group


def agree(
    given: AttentionInputs | UserError, split: str, length: Any, group: Any, device: torch.device
) -> list[Shard]:
    """The shards of all ranks, or this one's alone in a forward that decodes; raises on every rank
    where they disagree."""
    layers = group if isinstance(group, LayerGroup) else LayerGroup(group)
    decodes = split == "keys" and layers is group
    if split not in layers.agreed:
        options = f"{split} {length}"
        layers.agreed[split] = _exchanged(given, options, layers, device, not decodes)
    if isinstance(given, UserError):
        raise given  # as every rank does: it follows from what they agreed on
    if not decodes:
        return layers.agreed[split]
    # spans tell how far keys travel, and these stay; and how long texts are, which a cache knows
    sizes, none = (given.q.shape[2], given.k.shape[2]), (0.0, 0.0)
    hides = (given.key_padding, given.segments and given.segments[1])
    return [Shard(*sizes, none, none, given.k_pos, runs(given.k_pos, *hides), *hides)]


def _exchanged(
    given: AttentionInputs | UserError, options: str, layers: LayerGroup, device: torch.device,
    positions: bool,
) -> list[Shard]:  # fmt: skip
    """What every rank was given, with its positions if they are wanted."""
    own, schemes, group = [0.0] * len(FIELDS), layers.schemes, layers.group
    if isinstance(given, AttentionInputs):
        schemes = schemes or str(given.scheme)
        own = _described(given, schemes, options, layers.learns or given.needs_grad)
    header = torch.tensor(own, dtype=torch.float64, device=device)
    rows = [dict(zip(FIELDS, row.tolist(), strict=True)) for row in all_gather(header, group)]
    if isinstance(given, UserError):
        raise given
    for rank, row in enumerate(rows):
        if not row["accepted"]:
            raise UserError(f"rank {rank} was given what it can't run: its own message says why.")
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
    """What the other ranks must know of a call, in the order of FIELDS."""
    spans = [
        (0.0, 0.0) if not x.shape[2] else (float(pos[0]), float(pos[-1]))
        if isinstance(pos, range) else (float(pos.min()), float(pos.max()))
        for x, pos in ((p.q, p.q_pos), (p.k, p.k_pos))
    ]  # fmt: skip
    real = isinstance(p.k_pos, Tensor) and p.k_pos.is_floating_point()
    heads = (p.q.shape[:2], p.q.shape[3], p.k.shape[1], p.v.shape[3])
    given = (p.scale, p.softcap, p.sink_logits is not None, options)
    return [
        1.0, *map(_number, (schemes, p.q.dtype, heads, given)), float(learns),
        float(p.q.shape[2]), float(p.k.shape[2]), *spans[0], *spans[1],
        float(isinstance(p.k_pos, range) or not p.k.shape[2]), float(real),
        float(p.key_padding is not None), float(p.segments is not None),
    ]  # fmt: skip


def _number(value: Any) -> float:
    """A value as a whole number that float64 holds: equal for equal texts."""
    return float(int.from_bytes(sha256(str(value).encode()).digest()[:6], "big"))


def _with_positions(
    p: AttentionInputs, shards: list[Shard], rows: list[dict[str, float]], group: Any
) -> list[Shard]:
    """The shards with their positions, and with padding and segments if any rank has some."""
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
    on_host = gathered.cpu()  # once: every look at a device's numbers waits for its work

    def of(x: Tensor, keys: int, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        pos, padding, segments = x[:, :, :keys]
        hidden = padding.bool() if padded else None
        return pos[:rows].to(dtype), hidden, segments.long() if packed else None

    found = []
    for s, every, host in zip(shards, gathered, on_host, strict=True):
        rows_differ = not bool((host[0] == host[0, :1]).all())
        size = (s.keys, b if rows_differ else 1)
        pos, padding, segments = of(every, *size)
        known = {"pos": pos, "padding": padding, "segments": segments}
        found.append(replace(s, **known, runs=runs(*of(host, *size))))
    return found


def runs(pos: Pos, padding: Tensor | None = None, segments: Tensor | None = None) -> Runs:
    """The tokens that are no padding as a few runs, if all rows have the same; None otherwise."""
    if isinstance(pos, range) and padding is None and segments is None:
        return [Run(slice(0, len(pos)), pos)] if pos else []
    given = [as_rows(pos), *(x for x in (padding, segments) if x is not None)]
    if given[0].shape[0] != 1 or given[0].is_floating_point():
        return None
    given = [x.cpu() for x in given]
    if not all(bool((x == x[:1]).all()) for x in given):
        return None
    at = given[0][0]
    token = torch.arange(len(at)) if padding is None else (~given[1][0]).nonzero().flatten()
    segment = torch.zeros_like(at) if segments is None else given[-1][0]
    steps = torch.stack([token, at[token], segment[token]]).diff()
    ends = ((steps != torch.tensor([[1], [1], [0]])).any(0).nonzero().flatten() + 1).tolist()
    if len(ends) >= MAX_RUNS:
        return None
    found = []
    for a, b in pairwise([0, *ends, len(token)]):
        if a < b:
            first, start = int(token[a]), int(at[token[a]])
            pos = range(start, start + b - a)
            found.append(Run(slice(first, first + b - a), pos, int(segment[first])))
    return found


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
    """The positions of all ranks one after the other (b|1, n)."""
    rows = [as_rows(pos).to(device) for pos in positions]
    most = max(x.shape[0] for x in rows)
    return torch.cat([x.expand(most, -1) for x in rows], 1)


def hidden_keys(shards: list[Shard], given: AttentionInputs) -> dict[str, Any]:
    """The options `key_padding` and `segments` of a call over the keys of all ranks."""
    found: dict[str, Any] = {}
    if shards[0].padding is not None:
        found["key_padding"] = torch.cat([s.padding for s in shards], 1)  # type: ignore[misc]
    if shards[0].segments is not None:
        every = torch.cat([s.segments for s in shards], 1)  # type: ignore[misc]
        none = every.new_zeros(given.q.shape[0], given.q.shape[2])
        found["segments"] = (none if given.segments is None else given.segments[0], every)
    return found


def _row(s: Shard, row: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The position, the segment and the rank of the keys of one row that are no padding."""
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
