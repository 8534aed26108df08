"""Four processes that run every scheme of the agreement grid over their ranks, begun by
`test_ring.py`. Each writes its cells' greatest difference from one process, or the sentence that
refused a cell; the sentences of wrong calls; and the bytes that it sent.

Usage: python -m tests.ops.ring_cells FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longitude import UserError, attention
from longitude.core.part import as_tensor
from longitude.ops import ring
from longitude.ops.shards import gather_shards, shard, shard_positions
from tests.grid import HEADS, TOKENS, Layer, positions, rows, schemes, tokens
from tests.processes import ranks

RANKS = 4
UNEQUAL = (17, 0, 5, 18)
Call = dict[str, Any]  # the tensors of a call over all tokens, and which rank holds which


def split_by(sizes: tuple[int, ...]) -> list[Tensor]:
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def any_order() -> list[Tensor]:
    rng = torch.Generator().manual_seed(5)
    return list(torch.randperm(TOKENS, generator=rng).split(list(UNEQUAL)))


def zigzag() -> list[Tensor]:
    parts = torch.arange(TOKENS).chunk(2 * RANKS)
    return [torch.cat([parts[r], parts[2 * RANKS - 1 - r]]) for r in range(RANKS)]


def whole(scheme: Any, kv_heads: int, x: Tensor, pos: Any, **options: Any) -> Call:
    layer = Layer(scheme, kv_heads)
    q, k, v = layer.qkv(x, pos)
    gates = layer.gates(x, pos)
    call = {"q": q, "k": k, "v": v, "pos": pos, "weights": layer.weights, "options": options}
    return call | {"sums": None if gates is None else gates.cumsum(-1)}


def packed(scheme: Any) -> Call:
    """A row of three documents, and a row of one document after padding."""
    sizes, short = (23, 5, TOKENS - 28), 25
    pad = TOKENS - short
    alone = rows(positions(scheme, short))
    pos = torch.stack(
        [
            rows(*(positions(scheme, n) for n in sizes)),
            torch.cat([alone[:1].expand(pad) * 0, alone]),
        ]
    )
    hidden = torch.zeros(2, TOKENS, dtype=torch.bool)
    hidden[1, :pad] = True
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    ids = torch.stack([ids, torch.ones_like(ids)])
    return whole(scheme, 2, tokens(batch=2), pos, segments=ids, key_padding=hidden)


def documents(scheme: Any) -> Call:
    """Three documents, and padding inside the last one, in the same places of all rows."""
    sizes = (23, 5, TOKENS - 28)
    pos = rows(*(positions(scheme, n) for n in sizes))[None]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(sizes)])
    hidden = (torch.arange(TOKENS) // 3 == 11).expand(2, -1)
    return whole(scheme, 2, tokens(batch=2), pos, segments=ids.expand(2, -1), key_padding=hidden)


def plain(scheme: Any, kv_heads: int = 2) -> Call:
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    return whole(scheme, kv_heads, tokens(batch=2), positions(scheme, TOKENS), sink_logits=sinks)


def all_heads(scheme: Any) -> Call:
    return plain(scheme, HEADS)


class Way(NamedTuple):
    make: Callable[[Any], Call]
    held: list[Tensor]  # the tokens of each rank
    split: str = "tokens"
    gradients: bool = True


WAYS = {
    "unequal": Way(plain, split_by(UNEQUAL)),
    "zigzag": Way(plain, zigzag(), gradients=False),
    "packed and padded": Way(packed, any_order()),
    "documents": Way(documents, split_by(UNEQUAL), gradients=False),
    "heads": Way(all_heads, split_by(UNEQUAL), "heads", gradients=False),
    "keys": Way(plain, split_by(UNEQUAL), "keys", gradients=False),
}


def run_call(call: Call, held: Tensor | None, **over: Any) -> list[Tensor]:
    """The output of some tokens (all without `held`) and the gradients of all that is learned."""
    pos, options = call["pos"], dict(call["options"])
    take = slice(None) if held is None else held
    q, k, v = (call[n][:, :, take].detach().requires_grad_() for n in "qkv")
    learned = {n: w.detach().requires_grad_() for n, w in call["weights"].items()}
    if held is not None:
        pos = as_tensor(pos)[..., held]
        contiguous = pos.dim() == 1 and len(pos) and bool((pos.diff() == 1).all())
        contiguous = contiguous and not pos.is_floating_point()
        pos = range(int(pos[0]), int(pos[-1]) + 1) if contiguous else pos
    for name in ("key_padding", "segments"):
        if name in options:
            options[name] = options[name][:, take]
    leaves = [q, k, v, *learned.values()]
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"].clone().requires_grad_()
        leaves.append(options["sink_logits"])
    if call["sums"] is not None:
        options["forget_sums"] = call["sums"][:, :, take].detach().requires_grad_()
        leaves.insert(3, options["forget_sums"])
    out = attention(call["scheme"], q, k, v, pos, pos, learned, **options, **over)
    rng = torch.Generator().manual_seed(2)
    weight = torch.randn(call["q"].shape, generator=rng, dtype=torch.float64)[:, :, take]
    if not out.requires_grad:
        return [out]
    (out * weight).sum().backward()
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def difference(call: Call, want: list[Tensor], way: Way, group: Any) -> float:
    """The greatest difference of this rank's output and gradients from those of one process."""
    held = way.held[dist.get_rank(group)]
    if way.split == "keys":
        return decoded(call, held, group)
    with torch.set_grad_enabled(way.gradients):
        got = run_call(call, held, group=group, split=way.split)
    by_token = 4 + (call["sums"] is not None)
    errors = [0.0]
    for n, (mine, full) in enumerate(zip(got, want, strict=False)):
        if n < by_token:
            full = full[:, :, held]
        else:
            dist.all_reduce(mine, group=group)  # each rank has its share of these
        errors.append(float((mine - full).abs().max()) if full.numel() else 0.0)
    return max(errors)


@torch.no_grad()
def decoded(call: Call, held: Tensor, group: Any) -> float:
    """The last three queries on every rank, the keys spread over them."""
    pos = as_tensor(call["pos"])
    sums, options, last = call["sums"], dict(call["options"]), slice(TOKENS - 3, None)
    q, k, v, own = call["q"][:, :, last], call["k"], call["v"], pos[held]
    args = (call["scheme"], q)
    gated: list[dict[str, Any]] = [
        {} if sums is None else {"forget_sums": (sums[..., last], sums[..., take])}
        for take in (slice(None), held)
    ]
    if call["scheme"].rotary and call["scheme"].rotary.frequencies.by_length:
        options["length"] = TOKENS
    want = attention(*args, k, v, pos[last], pos, call["weights"], backend="eager", **options,
                     **gated[0])  # fmt: skip
    got = attention(*args, k[:, :, held], v[:, :, held], pos[last], own, call["weights"],
                    group=group, split="keys", **options, **gated[1])  # fmt: skip
    return float((got - want).abs().max())


def cells(group: Any) -> Iterator[tuple[str, str, float | str]]:
    """Every scheme, every way to hold its tokens; those that attend alike are one."""
    distinct = {(s.positions, s.rotary, s.bias, s.scale, s.mask): n for n, s in schemes().items()}
    for name, scheme in schemes().items():
        if name not in distinct.values():
            continue
        reference: dict[Any, list[Tensor]] = {}
        makers = dict.fromkeys(how.make for how in WAYS.values())
        calls = {make: make(scheme) | {"scheme": scheme} for make in makers}
        for way, how in WAYS.items():
            call = calls[how.make]
            if name == "su_rerope":  # gradients take the same way for every scheme
                how = how._replace(gradients=True)
            if how.split != "keys" and how.make not in reference:
                reference[how.make] = by_one(call, how.gradients or how.make is plain)
            try:
                yield name, way, difference(call, reference.get(how.make, []), how, group)
            except UserError as why:
                yield name, way, str(why)


def by_one(call: Call, gradients: bool) -> list[Tensor]:
    """What one process computes: the first, for all of them."""
    if dist.get_rank() == 0:
        with torch.set_grad_enabled(gradients):
            found = [x.contiguous() for x in run_call(call, None, backend="eager")]
    else:
        learned = call["weights"].values()
        sinks = call["options"].get("sink_logits")
        sums = [] if call["sums"] is None else [call["sums"]]
        like = [call["q"], call["q"], call["k"], call["v"], *sums, *learned]
        like += [] if sinks is None else [sinks]
        found = [x.new_empty(x.shape) for x in (like if gradients else like[:1])]
    for x in found:
        dist.broadcast(x, 0)
    return found


def mistakes(group: Any) -> Iterator[tuple[str, str]]:
    """Calls that must end in a sentence on every rank, before any work."""
    rank = dist.get_rank(group)
    own = range(8 * rank, 8 * rank + 8)
    x = torch.randn(1, 4, 8, 16, dtype=torch.float64)
    few = x[:, :2]
    packed = torch.zeros(1, 8, dtype=torch.int64)
    same, odd = torch.arange(8), rank == 2
    calls: dict[str, Callable[[], Tensor]] = {
        "schemes": lambda: run_group("alibi()" if odd else "rope()", x, own, group),
        "dtypes": lambda: run_group("rope()", x.float() if odd else x, own, group),
        "heads": lambda: run_group("rope()", x[:, :2] if odd else x, own, group),
        "gradients": lambda: run_group(
            "rope()", x.clone().requires_grad_() if odd else x, own, group
        ),
        "ranges overlap": lambda: run_group("rope()", x, range(6 * rank, 6 * rank + 8), group),
        "positions overlap": lambda: run_group("rope()", x, same, group),
        "segments overlap": lambda: run_group("rope()", x, same, group, segments=packed),
        "one rank": lambda: run_group("rope()", x, own[:5] if odd else own, group),
        "heads don't divide": lambda: run_group("rope()", few, own, group, split="heads"),
        "heads have terms": lambda: run_group("alibi()", x, own, group, split="heads"),
        "flex": lambda: run_group("rope()", x, own, group, backend="flex"),
        "dropout": lambda: run_group("rope()", x, own, group, dropout=0.1),
        "split": lambda: run_group("rope()", x, own, group, split="rows"),
        "keys with gradients": lambda: run_group(
            "rope()", x.clone().requires_grad_(), own, group, split="keys"
        ),
    }
    for name, call in calls.items():
        try:
            call()
            yield name, "nothing was refused"
        except UserError as why:
            yield name, str(why)


def run_group(scheme: str, x: Tensor, pos: Any, group: Any, **options: Any) -> Tensor:
    return attention(scheme, x, x, x, pos, pos, group=group, **options)


def traffic(group: Any) -> dict[str, list[int]]:
    """The bytes that this rank sends in a forward, and in a backward."""
    sent = [0, 0]

    def counted(over: Any, sends: Any, receives: Any) -> Any:
        sent[phase] += sum(x.nbytes for _, tensors, _ in sends for x in tensors)
        return transfer(over, sends, receives)

    transfer, ring.transfer, found = ring.transfer, counted, {}
    for name, (scheme, held) in TRAFFIC.items():
        pos, sent[:] = held[dist.get_rank(group)], (0, 0)
        x = torch.randn(2, HEADS, len(pos), 8).requires_grad_()
        kv = torch.randn(2, 2, len(pos), 8).requires_grad_()
        phase = 0
        out = attention(scheme, x, kv, kv, pos, pos, group=group)
        phase = 1
        out.sum().backward()
        found[name] = list(sent)
    ring.transfer = transfer
    return found


TRAFFIC = {
    "causal": ("rope()", split_by(UNEQUAL)),
    "bidirectional": ("rope() + bidirectional()", split_by(UNEQUAL)),
    "zigzag": ("rope(remap=leaky_rerope(6, 3))", zigzag()),
    "window": ("rope() + window(4)", split_by((10, 10, 10, 10))),
}


def helpers(group: Any) -> bool:
    """Whether what `shard` cuts is what `gather_shards` puts together."""
    x = torch.arange(2 * 11 * 3.0).view(2, 11, 3)
    return all(
        torch.equal(
            x, gather_shards(shard(x, group, 1, order), shard_positions(11, group, order), group)
        )
        for order in ("contiguous", "zigzag")
    )


def main(folder: str) -> None:
    with ranks(RANKS) as group:
        found = {
            "mistakes": list(mistakes(group)), "traffic": traffic(group),
            "helpers": helpers(group), "cells": list(cells(group)),
        }  # fmt: skip
        (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
