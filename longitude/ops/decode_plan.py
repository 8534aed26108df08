"""The pieces that a few queries see, as tensors that a kernel reads: no table as long as the cache.

Cut a piece into blocks, and x_k(j) = x_k(first block) + blocks since + steps in its own block, each
of them the same wherever a piece lies. So one small table turns the keys of all blocks, a second
one, with a row a block, turns the query to meet them, and both are made once, in float64; only the
query's own place, θ·x_q - θ·x_k(first block), is new at every step. Blocks begin at multiples of
their length, and never reach across a wrap of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.core.part import Frequencies, Region
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops.kv_segments import Line, Pieces, Places, Seen, Which, pieces
from longitude.parts.rope import Pairs, Rope, apply_rotary
from longitude.parts.rotary_tables import Memo, Tables, cos_sin

FARTHEST = 2**30  # positions of a kernel are 32 bits wide
FIELDS = 12  # whole numbers of a piece, before the bounds of its queries


class Head(NamedTuple):
    """What tables are made for."""

    size: int
    length: int
    dtype: torch.dtype
    device: torch.device


T = TypeVar("T")


class Latest(Generic[T]):
    """What `make` gave last for each of a few schemes: every layer of a step asks for the same."""

    def __init__(self, make: Callable[..., T], limit: int = 16) -> None:
        self.make, self.limit = make, limit
        self.kept: dict[str, tuple[tuple[Any, ...], T]] = {}

    def __call__(self, scheme: Scheme, *rest: Any) -> T:
        asked = (scheme, *rest)
        last = self.kept.get(scheme.written)
        if last is None or last[0] != asked:
            self.kept.pop(scheme.written, None)
            last = self.kept[scheme.written] = asked, self.make(*asked)
            if len(self.kept) > self.limit:
                self.kept.pop(next(iter(self.kept)))
        return last[1]


class Way(NamedTuple):
    """How the keys of a piece turn: to x = ⌊(p mod modulo) / floor⌋ / divide, at frequencies.

    Blocks are numbered from position 0 on; those of one wrap, or of one large group, make a chunk.
    """

    frequencies: Frequencies | None = None
    modulo: int | None = None
    floor: int = 1
    divide: float = math.inf  # where keys stand still, or are turned already

    def span(self, block: int) -> int:
        """Positions of a block: as many whole groups as fit, or a part of one."""
        return block if self.floor > block else block // self.floor * self.floor

    def chunk(self, block: int) -> int:
        """Positions of a chunk."""
        return self.floor if self.floor > block else self.modulo or FARTHEST

    def per_chunk(self, block: int) -> int:
        """Blocks of a chunk."""
        return -(-self.chunk(block) // self.span(block))

    def lead(self, first: int, block: int) -> int:
        """Where a piece's first block stands in the table of blocks."""
        return first % self.per_chunk(block) if self.modulo or self.floor > block else 0

    def start(self, number: Any, block: int) -> Any:
        """The position where a block begins; one, or a tensor of them."""
        per = self.per_chunk(block)
        return number // per * self.chunk(block) + number % per * self.span(block)

    def place(self, p: Any) -> Any:
        """x of a position, or of a tensor of them."""
        return (p % self.modulo if self.modulo else p) // self.floor / self.divide

    def base(self, first: int, block: int) -> float:
        """x where the table of blocks begins, for a piece with this first block."""
        if self.modulo:
            return 0.0
        return self.place(self.start(first - self.lead(first, block), block))


class Frames(NamedTuple):
    """For each way, tables (f n half) of the steps in a block, and of blocks."""

    steps: Tables
    starts: Tables


class Sight(NamedTuple):
    """What a kernel reads: for each sequence, or one for all, rows of whole numbers and then of
    the queries' tables, which share their memory."""

    ints: Tensor
    floats: Tensor
    frames: Frames
    pieces: int
    queries: int
    blocks: int  # of the sequence that has most
    turns: bool  # whether any keys do

    def renew(self, later: Sight) -> None:
        """Become a later step, in place: for a captured graph, which reads this one's memory."""
        same = self.frames.starts[0] is later.frames.starts[0] and self.turns == later.turns
        if not same or (self.ints.shape, self.pieces) != (later.ints.shape, later.pieces):
            raise UserError(
                f"a later step of {later.pieces} pieces does not fit the memory of one of "
                f"{self.pieces}, or turns by other tables: capture the graph anew."
            )
        self.ints.copy_(later.ints)


def sight(
    scheme: Scheme, head: Head, lines: Sequence[Line], at: Places, block: int
) -> Sight | None:
    """What queries at these places see of lines, for a kernel that takes `block` keys at once.

    None where keys are turned as a region wants them that they do not lie in, or too far out.
    """
    ends = [run.pos + run.n for line in lines for run in line]
    starts = [run.pos for line in lines for run in line]
    if max(ends, default=0) > FARTHEST or min(starts, default=0) < 0:
        return None
    found, rows = pieces(scheme, lines, at), max(len(lines), len(at))
    return None if found is None else _sight(scheme.rotary, head, found, at, rows, block)


def _sight(
    rope: Rope | None, head: Head, found: Pieces, at: Places, rows: int, block: int
) -> Sight:
    found = found or {Which(None, True, 0, 0): {}}
    ways = {which: _way(which) for which in found}
    distinct = tuple(dict.fromkeys(ways.values()))
    nq, most, farthest = len(at[0]), 0, 0
    numbers: list[list[int]] = []
    for r in range(rows):
        before = 0
        for which, own in found.items():
            count, rest = _numbers(own.get(r), nq, ways[which], block)
            numbers.append([before, count, distinct.index(ways[which]), *rest])
            before += count
            farthest = max(farthest, count + ways[which].lead(rest[0], block))
        most = max(most, before)
    ints = torch.tensor(numbers, dtype=torch.int32).view(rows, -1)
    bases = [ways[w].base(n[3], block) for n, w in zip(numbers, [*found] * rows, strict=True)]
    origins = torch.tensor(bases, dtype=torch.float64).view(rows, -1)
    tables = _queries(rope, head, found, at, origins).view(torch.int32)
    # what stands before the tables fills whole 16 bytes, as kernels like their memory
    gap = ints.new_zeros(rows, -ints.shape[1] % 4)
    packed = torch.cat([ints, gap, tables], 1).to(head.device, non_blocking=True)
    floats = packed.view(torch.float32)[:, ints.shape[1] + gap.shape[1] :]
    rounded = max(64, 1 << (farthest - 1).bit_length())  # a longer cache seldom wants a longer one
    frames = Frames(*(_tables(rope, distinct, block, head, n) for n in (0, rounded)))
    return Sight(packed, floats, frames, len(found), nq, most, distinct != (Way(),))


def _way(which: Which) -> Way:
    if which.region is None or which.turned or which.region.k.divide == math.inf:
        return Way()
    k, frequencies = which.region.k, which.region.frequencies
    if k.floor:
        return Way(frequencies, None, int(k.divide), 1.0)
    return Way(frequencies, k.modulo, 1, float(k.divide))


def _numbers(seen: Seen | None, nq: int, way: Way, block: int) -> tuple[int, list[int]]:
    """How many blocks a piece has, and what tells where each lies, as the kernel reads it."""
    if seen is None:
        return 0, [0, 0, 1, 1, 1, 0, 1, 0, 0, *[0] * 2 * nq]
    low, high = seen.span
    span, chunk, per_chunk = way.span(block), way.chunk(block), way.per_chunk(block)
    first, last = (p // chunk * per_chunk + p % chunk // span for p in (low, high - 1))
    wrap = per_chunk if way.modulo else FARTHEST
    where = [first, seen.offset, span, chunk, per_chunk, way.lead(first, block), wrap, low, high]
    return last - first + 1, [*where, *(x for pair in seen.bounds for x in pair)]


def _queries(rope: Rope | None, head: Head, found: Pieces, at: Places, origins: Tensor) -> Tensor:
    """The tables (b, pieces·queries·2·half) that turn queries to their place in each region.

    The same as `cos_sin` makes for each, in a tenth of its calls: they are made at every step.
    """
    places = torch.tensor(at)
    zero = torch.zeros(places.shape, dtype=torch.float64)
    # what a key's place adds for all alike is the query's to take, unless the key has it
    where = [
        zero if r is None else r.q(places) - (0 if turned else r.k.add) for r, turned, *_ in found
    ]
    each = tuple(r and (r.frequencies or (rope and rope.frequencies)) for r, *_ in found)
    inv, gain = _rates(rope, each, head.size, head.length)
    angle = (torch.stack(where, 1) - origins[..., None])[..., None] * inv
    return (torch.stack([angle.cos(), angle.sin()], 3) * gain).float().flatten(1)


@lru_cache(maxsize=64)
def _rates(
    rope: Rope | None, each: tuple[Frequencies | None, ...], size: int, length: int
) -> tuple[Tensor, Tensor]:
    """Inverse frequencies (pieces 1 half) and gains (pieces 1 1 1) of each piece."""
    if rope is None:
        return torch.zeros(len(each), 1, 0), torch.ones(len(each), 1, 1, 1)
    still = torch.zeros(rope.dim(size) // 2, dtype=torch.float64)
    with torch.inference_mode(False):
        inv = [f.inv_freq(rope.dim(size), rope.base, length) if f else still for f in each]
        gain = torch.tensor([f.gain(length) if f else 1.0 for f in each], dtype=torch.float64)
        return torch.stack(inv)[:, None], gain.view(-1, 1, 1, 1)


def _make(rope: Rope | None, ways: tuple[Way, ...], block: int, head: Head, blocks: int) -> Tables:
    """Tables (ways n half) of the steps in a block, or of this many blocks from the first on."""
    n, half = blocks or block, 0 if rope is None else rope.dim(head.size) // 2
    cos = torch.ones(len(ways), n, half, device=head.device)
    sin = torch.zeros_like(cos)
    for f, way in enumerate(ways):
        if rope is None or way.divide == math.inf:
            continue
        each = torch.arange(n, dtype=torch.float64)[None]
        made = cos_sin(
            rope, Region(frequencies=way.frequencies), "k",
            way.place(way.start(each, block) if blocks else each),
            head.size, head.length, dtype=cos.dtype, device=head.device,
        )  # fmt: skip
        cos[f], sin[f] = (t[0, 0] for t in made)
    return cos, sin


_tables = Memo(torch.inference_mode(False)(_make), limit=2**26)


def looked_at(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv m d"],
    v: Float[Tensor, "b hkv m dv"],
    seen: Sight,
    pairs: Pairs = "half",
    scale: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    key_padding: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Attention as a sight tells it, in plain torch and float64: the twin of `triton.decode`.

    Every key turns by its step in its block, then by its block.
    """
    b, h, nq, d = q.shape
    wide = [x.double() for x in (q, k.repeat_interleave(h // k.shape[1], 1))]
    scores = torch.full((b, h, nq, k.shape[2]), -torch.inf, dtype=torch.float64, device=q.device)
    for r in range(b):
        ints = seen.ints[r % len(seen.ints)][: seen.pieces * (FIELDS + 2 * nq)]
        tables = seen.floats[r % len(seen.floats)].view(seen.pieces, nq, 2, -1)
        for one, own in zip(ints.view(seen.pieces, -1).tolist(), tables.double(), strict=True):
            _, _, frame, first, offset, span, chunk, per, lead, wrap, low, high = one[:FIELDS]
            at = torch.arange(low, high, device=q.device)
            block = at // chunk * per + at % chunk // span - first + lead
            inner = [t[frame, at % chunk % span].double() for t in seen.frames.steps]
            outer = [t[frame, block % wrap].double() for t in seen.frames.starts]
            here = slice(low + offset, high + offset)
            turned = apply_rotary(wide[1][r : r + 1, :, here], *_as(*inner), pairs)
            turned = apply_rotary(turned, *_as(*outer), pairs)
            query = apply_rotary(wide[0][r : r + 1], *_as(own[:, 0], own[:, 1]), pairs)
            bounds = torch.tensor(one[FIELDS:], device=q.device).view(nq, 2, 1)
            hidden = (at < bounds[:, 0]) | (at >= bounds[:, 1])
            product = (query @ turned.mT)[0] * (d**-0.5 if scale is None else scale)
            scores[r, :, :, here] = torch.where(hidden, scores[r, :, :, here], product)
    if key_padding is not None:
        scores = scores.masked_fill(key_padding[:, None, None], -torch.inf)
    if sink_logits is not None:
        sink = sink_logits.double().view(1, h, 1, 1).expand(b, h, nq, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return (weights @ v.double().repeat_interleave(h // k.shape[1], 1)).to(q.dtype)


def _as(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (n half) as `turn` takes them."""
    return cos[None, None], sin[None, None]
