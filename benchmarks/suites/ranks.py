"""The suite `ranks`: the overhead of splitting a call over N ranks, on one device, no network.

The ranks run one after the other on blocks of keys that are already in memory. Together they do
what a ring of N devices computes; the baseline is one call over all tokens. One rank is also run
alone, with a copy of each block that it would receive, to show the memory of a rank.
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
    """One rank's tokens in zigzag order, with their positions, and the shards of all ranks."""

    rank: int
    qkv: Qkv
    pos: Tensor
    shards: list[Shard]

    def run(self, scheme: Scheme, blocks: list[tuple[Tensor, Tensor]], copies: bool) -> Tensor:
        """Return this rank's output; `copies` copies the blocks that a ring would receive."""
        call = (scheme, *self.qkv, self.pos, self.pos, None)
        ring = Ring.of((None, self.rank), self.shards, prepare(*call), call, "auto", OPTIONS)
        merging = merging_for(self.qkv[0].shape[:3], self.qkv[2])  # type: ignore[arg-type]
        for step in range(len(self.shards)):
            if ring.holds(step):
                kv = blocks[ring.owner(step)]
                kv = tuple(x.clone() for x in kv) if copies and step else kv
                block = ring.inputs(step, {"q": ring.p.q}, kv)
                forward_block(block, ring.runs(step), "auto", merging)
        return merging.result(None)[0]


def split(qkv: Qkv, count: int) -> list[Rank]:
    """Split the tokens of a call over N ranks: rank r holds pieces r and 2N - 1 - r of 2N."""
    pieces = torch.arange(qkv[0].shape[2]).chunk(2 * count)
    positions = [torch.cat((pieces[r], pieces[-1 - r])) for r in range(count)]
    spans = [(float(pos[0]), float(pos[-1])) for pos in positions]
    shards = [
        Shard(len(pos), len(pos), x, x, pos[None].to(qkv[0].device), runs(pos[None]))
        for pos, x in zip(positions, spans, strict=True)
    ]
    positions = [pos.to(qkv[0].device) for pos in positions]  # on the device, as in a model
    return [
        Rank(r, tuple(x[:, :, pos] for x in qkv), pos, shards)  # type: ignore[arg-type]
        for r, pos in enumerate(positions)
    ]


def in_turn(scheme: Scheme, ranks: list[Rank]) -> list[Tensor]:
    """Run all ranks one after the other; return their outputs."""
    blocks = [rank.qkv[1:] for rank in ranks]
    return [rank.run(scheme, blocks, copies=False) for rank in ranks]


def cases(setup: Setup) -> Iterator[Case]:
    """Yield all ranks against one call, and one rank alone, at each length."""
    for n in setup.lengths((32768, 131072), (1024,)):
        s = sizes(setup, n)
        judge = Judge(setup.qkv(s))
        divided = {count: split(judge.qkv, count) for count in RANKS}
        for name, text in SCHEMES.items():
            scheme = one_scheme(text.format(w=min(4096, n // 4)))
            goal = setup.goal({"error": MERGED} | ({"speed": GOAL[n]} if n in GOAL else {}))
            error = partial(judge.error, scheme)
            one_call = partial(attended, scheme, judge.qkv, {})
            ways = [Way("one call", one_call, BASELINE, error)]
            ways += [
                Way(f"{count} ranks in turn", partial(in_turn, scheme, ranks), OURS,
                    lambda out, ranks=ranks, error=error: error(_joined(out, ranks)), goal)
                for count, ranks in divided.items()
            ]  # fmt: skip
            sizes_text = f"{s}, {setup.written}"
            work = partial(Work, "ranks", sizes=sizes_text, tokens=n, machine=machine(setup.device))
            yield Case(work(name, baseline="one call"), ways, judge.qkv)
            for count, ranks in divided.items():
                blocks = [rank.qkv[1:] for rank in ranks]
                one_rank = partial(ranks[0].run, scheme, blocks, True)
                way = Way(f"one of {count} ranks", one_rank, BASELINE)
                yield Case(work(f"{name}, one of {count} ranks", baseline=way.name), [way],
                           ranks[0].qkv)  # fmt: skip


def _joined(out: list[Tensor], ranks: list[Rank]) -> Tensor:
    """Concatenate the outputs of all ranks in the order of positions."""
    return torch.cat(out, 2)[:, :, torch.cat([rank.pos for rank in ranks]).argsort()]
