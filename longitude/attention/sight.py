"""The pieces that a few queries see, as tensors that a kernel reads: no table as long as the cache.

Cut a piece into blocks, and x_k(j) = x_k(the block's first) + the same few steps in every block. So
one small table turns the keys of all blocks, and the block's own angle goes to the query instead:
θ·x_q - θ·x_k(first). That angle is a product of whole numbers, x_k times the share of a turn that
one step makes in units of 2⁻⁶⁴, of which only what is past whole turns is kept: exact at any
position. Blocks begin at multiples of their length, and never reach across a wrap of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.attention.pieces import Line, Pieces, Places, Seen, Which, pieces
from longitude.part import Frequencies, Region
from longitude.parts.rotary.rope import Rope
from longitude.parts.rotary.tables import cos_sin
from longitude.parts.rotary.turn import Pairs, turn
from longitude.scheme import Scheme

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
    """How the keys of a piece turn: to x = ⌊(p mod modulo) / floor⌋ / divide, at frequencies."""

    frequencies: Frequencies | None = None
    modulo: int = FARTHEST
    floor: int = 1
    divide: float = math.inf  # where keys stand still, or are turned already


class Frames(NamedTuple):
    """For each way: what one step is of a whole turn (f half), in units of 2⁻⁶⁴, and the tables
    (f block half) of the steps in a block."""

    turns: Tensor
    cos: Tensor
    sin: Tensor


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
    nq, most, numbers = len(at[0]), 0, []
    for r in range(rows):
        before = 0
        for which, own in found.items():
            way = ways[which]
            count, rest = _numbers(own.get(r), nq, way, block)
            numbers.append([before, count, distinct.index(way), *rest])
            before += count
        most = max(most, before)
    ints = torch.tensor(numbers, dtype=torch.int32).view(rows, -1)
    frames = _frames(rope, distinct, block, head)
    tables = _queries(rope, head, found, at).view(torch.int32).expand(rows, -1)
    packed = torch.cat([ints, tables], 1).to(head.device, non_blocking=True)
    floats = packed.view(torch.float32)[:, ints.shape[1] :]
    turns = distinct != (Way(),)
    return Sight(packed, floats, frames, len(found), nq, most, turns)


def _way(which: Which) -> Way:
    if which.region is None or which.turned or which.region.k.divide == math.inf:
        return Way()
    k, frequencies = which.region.k, which.region.frequencies
    if k.floor:
        return Way(frequencies, FARTHEST, int(k.divide), 1.0)
    return Way(frequencies, k.modulo or FARTHEST, 1, float(k.divide))


def _numbers(seen: Seen | None, nq: int, way: Way, block: int) -> tuple[int, list[int]]:
    """How many blocks a piece has, and what tells where each lies; see `decode`."""
    if seen is None:
        return 0, [0, 0, 1, 1, 1, 1, 1, 0, 0, *[0] * 2 * nq]
    low, high = seen.span
    # a block is as many whole groups as fit, or a part of one group
    span = block if way.floor > block else block // way.floor * way.floor
    chunk = way.floor if way.floor > block else way.modulo
    per_chunk = -(-chunk // span)
    first, last = (p // chunk * per_chunk + p % chunk // span for p in (low, high - 1))
    geometry = [first, seen.offset, span, chunk, per_chunk, way.modulo, way.floor, low, high]
    return last - first + 1, [*geometry, *(x for pair in seen.bounds for x in pair)]


def _queries(rope: Rope | None, head: Head, found: Pieces, at: Places) -> Tensor:
    """The tables (b|1, pieces·queries·2·half) that turn queries to their place in each region.

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
    angle = torch.stack(where, 1)[..., None] * inv
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


@lru_cache(maxsize=64)
def _frames(rope: Rope | None, ways: tuple[Way, ...], block: int, head: Head) -> Frames:
    """Made once: they depend on no position."""
    half = 0 if rope is None else rope.dim(head.size) // 2
    turns = torch.zeros(len(ways), half, dtype=torch.int64)
    cos, sin = torch.ones(len(ways), block, half), torch.zeros(len(ways), block, half)
    with torch.inference_mode(False):
        for n, way in enumerate(ways):
            if rope is None or way.divide == math.inf:
                continue
            frequencies = way.frequencies or rope.frequencies
            inv = frequencies.inv_freq(rope.dim(head.size), rope.base, head.length)
            turns[n] = _fixed(inv / (2 * math.pi * way.divide))
            steps = torch.arange(block, dtype=torch.float64)[None] // way.floor / way.divide
            region, sizes = Region(frequencies=way.frequencies), (head.size, head.length)
            made = cos_sin(rope, region, "k", steps, *sizes, dtype=cos.dtype, device=cos.device)
            cos[n], sin[n] = (t[0, 0] for t in made)
        return Frames(*(t.to(head.device) for t in (turns, cos, sin)))


def _fixed(turns: Tensor) -> Tensor:
    """Parts of a turn in units of 2⁻⁶⁴, as whole numbers from -2⁶³ up to 2⁶³."""
    return ((turns - (turns + 0.5).floor()) * 2.0**64).to(torch.int64)


def looked_at(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv m d"],
    v: Float[Tensor, "b hkv m dv"],
    seen: Sight,
    pairs: Pairs = "half",
    scale: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Attention as a sight tells it, in plain torch and float64: every key turned by its own θ·x.

    This is the twin of `triton.decode`, without its blocks.
    """
    b, h, nq, d = q.shape
    wide = [x.double() for x in (q, k.repeat_interleave(h // k.shape[1], 1))]
    scores = torch.full((b, h, nq, k.shape[2]), -torch.inf, dtype=torch.float64, device=q.device)
    for r in range(b):
        ints = seen.ints[r % len(seen.ints)][: seen.pieces * (FIELDS + 2 * nq)]
        tables = seen.floats[r % len(seen.floats)].view(seen.pieces, nq, 2, -1)
        for one, own in zip(ints.view(seen.pieces, -1).tolist(), tables.double(), strict=True):
            frame, offset, modulo, floor, low, high = (one[n] for n in (2, 4, 8, 9, 10, 11))
            at = torch.arange(low, high, device=q.device)
            turns = (at % modulo // floor)[:, None] * seen.frames.turns[frame]  # overflows rightly
            angle = turns.double() * (2 * math.pi / 2**64)
            here = slice(low + offset, high + offset)
            turned = turn(wide[1][r : r + 1, :, here], *_as(angle.cos(), angle.sin()), pairs)
            query = turn(wide[0][r : r + 1], *_as(own[:, 0], own[:, 1]), pairs)
            bounds = torch.tensor(one[FIELDS:], device=q.device).view(nq, 2, 1)
            hidden = (at < bounds[:, 0]) | (at >= bounds[:, 1])
            product = (query @ turned.mT)[0] * (d**-0.5 if scale is None else scale)
            scores[r, :, :, here] = torch.where(hidden, scores[r, :, :, here], product)
    if sink_logits is not None:
        sink = sink_logits.double().view(1, h, 1, 1).expand(b, h, nq, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return (weights @ v.double().repeat_interleave(h // k.shape[1], 1)).to(q.dtype)


def _as(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (n half) as `turn` takes them."""
    return cos[None, None], sin[None, None]
