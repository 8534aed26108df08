"""The suite `ranks`: what splitting a call over N ranks adds, on one device and without a network.

The ranks run one after the other on blocks of keys that are there already: what a ring of N devices
would compute in all, against one call over all tokens. One rank alone, with room for the blocks it
receives, shows the memory of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.suites.attention import Judge, attended, sizes
from benchmarks.suites.baselines import Qkv
from benchmarks.suites.case import Case, Way
from benchmarks.suites.rows import BASELINE, MERGED, OURS, Work
from benchmarks.suites.setup import Setup, machine, one_scheme
from longitude.core.scheme import Scheme
from longitude.ops.inputs import prepare
from longitude.ops.lse_merge import merging_for
from longitude.ops.ring import Ring
from longitude.ops.ring_blocks import forward_block
from longitude.ops.shards import Shard, runs

SCHEMES = {"RoPE": "rope()", "leaky ReRoPE": "rope(remap=leaky_rerope({w}, 8))"}
RANKS = (4, 8)
GOAL = {131072: 1 / 1.1}  # of one call's speed, by length
OPTIONS: dict[str, Any] = dict.fromkeys(
    ("key_padding", "segments", "length", "forget_sums", "sink_logits")
)


class Rank(NamedTuple):
    """One rank's tokens in zigzag order, and the positions of all ranks."""

    rank: int
    qkv: Qkv
    pos: Tensor
    shards: list[Shard]

    def run(self, scheme: Scheme, blocks: list[tuple[Tensor, Tensor]], copies: bool) -> Tensor:
        """This rank's output; a copy of each block stands for the one that a ring receives."""
        call = (scheme, *self.qkv, self.pos, self.pos, None)
        ring = Ring.of((None, self.rank), self.shards, prepare(*call), call, "auto", OPTIONS)
        merging = merging_for(self.qkv[0].shape[:3], self.qkv[2])  # type: ignore[arg-type]
        for step in range(len(self.shards)):
            if ring.holds(step):
                held = blocks[ring.owner(step)]
                held = tuple(x.clone() for x in held) if copies and step else held
                block = ring.inputs(step, {"q": ring.p.q}, held)
                forward_block(block, ring.runs(step), "auto", merging)
        return merging.result(None)[0]


def split(qkv: Qkv, count: int) -> list[Rank]:
    """The tokens of a call over ranks: rank r holds the pieces r and 2N - 1 - r of 2N."""
    pieces = torch.arange(qkv[0].shape[2]).chunk(2 * count)
    own = [torch.cat((pieces[r], pieces[-1 - r])) for r in range(count)]
    spans = [(float(at[0]), float(at[-1])) for at in own]
    shards = [
        Shard(len(at), len(at), x, x, at[None].to(qkv[0].device), runs(at[None]))
        for at, x in zip(own, spans, strict=True)
    ]
    own = [at.to(qkv[0].device) for at in own]  # where a model's positions are
    return [
        Rank(r, tuple(x[:, :, at] for x in qkv), at, shards)  # type: ignore[arg-type]
        for r, at in enumerate(own)
    ]


def in_turn(scheme: Scheme, ranks: list[Rank]) -> list[Tensor]:
    """Every rank, one after the other."""
    blocks = [rank.qkv[1:] for rank in ranks]
    return [rank.run(scheme, blocks, copies=False) for rank in ranks]


def cases(setup: Setup) -> Iterator[Case]:
    """All ranks against one call, and one rank alone, at each length."""
    for n in setup.lengths((32768, 131072), (1024,)):
        s = sizes(setup, n)
        judge = Judge(setup.qkv(s))
        divided = {count: split(judge.qkv, count) for count in RANKS}
        for name, text in SCHEMES.items():
            scheme = one_scheme(text.format(w=min(4096, n // 4)))
            goal = setup.goal({"error": MERGED} | ({"speed": GOAL[n]} if n in GOAL else {}))
            error = partial(judge.error, scheme)
            one = partial(attended, scheme, judge.qkv, {})
            ways = [Way("one call", one, BASELINE, error)]
            ways += [
                Way(f"{count} ranks in turn", partial(in_turn, scheme, ranks), OURS,
                    lambda out, ranks=ranks, error=error: error(_joined(out, ranks)), goal)
                for count, ranks in divided.items()
            ]  # fmt: skip
            sizes_of = f"{s}, {setup.written}"
            work = partial(Work, "ranks", sizes=sizes_of, tokens=n, machine=machine(setup.device))
            yield Case(work(name, baseline="one call"), ways, judge.qkv)
            for count, ranks in divided.items():
                blocks = [rank.qkv[1:] for rank in ranks]
                alone = partial(ranks[0].run, scheme, blocks, True)
                way = Way(f"one of {count} ranks", alone, BASELINE)
                yield Case(work(f"{name}, one of {count} ranks", baseline=way.name), [way],
                           ranks[0].qkv)  # fmt: skip


def _joined(out: list[Tensor], ranks: list[Rank]) -> Tensor:
    """The outputs of all ranks in the order of positions."""
    return torch.cat(out, 2)[:, :, torch.cat([rank.pos for rank in ranks]).argsort()]
