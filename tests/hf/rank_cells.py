"""A tiny model over the ranks of a group, begun by `test_ranks.py`: how far its logits are from
those of one process, and whether it generates the same tokens.

Usage: python -m tests.hf.rank_cells FOLDER COUNT
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import longitude.hf as lh
from longitude import UserError, gather_shards, shard, shard_positions
from longitude.hf.probe import replaced
from longitude.hf.ranks import ranks_of
from tests.hf.tiny import decoder, shared
from tests.processes import ranks

SCHEMES = (
    "rope(remap=leaky_rerope(16, 4))",
    "rope() + window(24, sinks=2)",
    "rope(frequencies=dynamic_ntk(original=64)) + logn(16)",
    "rope(remap=dual_chunk(24, 8))",
)
CELLS = [
    *(("llama", scheme) for scheme in (*SCHEMES, "alibi()")),
    ("gemma2", SCHEMES[0]),  # windows in every other layer, and a soft cap
]


def cells(count: int) -> list[tuple[str, str]]:
    """All of them over two ranks; more ranks change how tokens are held, not what a layer does."""
    return CELLS if count == 2 else CELLS[-1:]


def logits(model: Any, scheme: str, ids: Any, group: Any) -> float:
    """The greatest difference of this rank's logits from those of one process."""
    n = ids.shape[1]
    with torch.no_grad():
        with lh.patched(model, scheme, force=True, check=False):
            want = model(ids).logits
        with lh.patched(model, scheme, force=True, group=group):
            pos = shard_positions(n, group, "zigzag")
            own = shard(ids, group, order="zigzag")
            got = gather_shards(model(own, position_ids=pos[None]).logits, pos, group)
    return float((got - want).abs().max())


def generated(model: Any, scheme: str, prompt: dict[str, Any], group: Any) -> bool:
    """Whether all ranks generate the tokens that one process does."""
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    with lh.patched(model, scheme, force=True, check=False):
        want = model.generate(**prompt, **how)
    with lh.patched(model, scheme, force=True, check=False, group=group):
        got = model.generate(**prompt, **how)
    return bool(torch.equal(want, got))


def prompts(rows: int, n: int, padded: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(n)
    ids = torch.randint(3, 97, (rows, n), generator=rng)
    mask = torch.ones_like(ids)
    if padded:
        ids[-1, :padded], mask[-1, :padded] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = {"long": prompts(1, 90), "padded": prompts(2, 61, padded=40), "short": prompts(1, 3)}


def gathers(model: Any, group: Any) -> dict[str, int]:
    """How often all ranks tell each other something: in a forward of four layers, in one split by
    heads, and in a prompt with two steps of decoding after it."""
    counts: Counter[str] = Counter()
    gather, phase = dist.all_gather, ""

    def counted(*args: Any, **more: Any) -> Any:
        counts[phase] += 1
        return gather(*args, **more)

    ids, pos = prompts(1, 90)["input_ids"], shard_positions(90, group, "zigzag")
    with torch.no_grad(), lh.patched(model, SCHEMES[0], check=False, group=group):
        with replaced(dist, "all_gather", counted):
            for phase in ("tokens", "heads"):
                ranks_of(model).split = phase  # type: ignore[union-attr]
                model(ids[:, pos], position_ids=pos[None])
            phase, ranks_of(model).split = "generate", "tokens"  # type: ignore[union-attr]
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=-1)
    return dict(counts)


def disagreements(model: Any, group: Any) -> dict[str, str]:
    """What every rank says where the last one has something of its own."""
    odd = dist.get_rank(group) == dist.get_world_size(group) - 1
    plain, pos, said = "rope()", shard_positions(64, group), {}
    own = prompts(1, 64)["input_ids"][:, pos]
    model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)  # the layers before it need no gradients
    for name in ("schemes", "dtypes", "gradients", "batches"):
        scheme = SCHEMES[0] if odd and name == "schemes" else plain
        scheme = f"layers({plain}, {plain}, {plain}, {scheme})"
        rows = own.expand(2 if odd and name == "batches" else 1, -1)
        one = copy.deepcopy(model).double() if odd and name == "dtypes" else model
        needed = torch.set_grad_enabled(not (odd and name == "gradients"))
        try:
            with lh.patched(one, scheme, check=False, group=group), needed:
                one(rows, position_ids=pos[None])
        except UserError as why:
            said[name] = str(why)
    model.requires_grad_(True)
    return said


def mistakes(model: Any, group: Any) -> dict[str, str]:
    """The sentences of calls that can't be run over a group."""
    ids, scheme = prompts(1, 16)["input_ids"], SCHEMES[0]
    calls: dict[str, Callable[[], Any]] = {
        "no positions": lambda: model(ids),
        "static cache": lambda: model.generate(
            ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0
        ),
        "overlap": lambda: model(ids, position_ids=torch.arange(16)[None]),
    }
    said = {}
    for name, call in calls.items():
        try:
            with torch.no_grad(), lh.patched(model, scheme, check=False, group=group):
                call()
        except UserError as why:
            said[name] = str(why)
    small = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97)
    for name, other in (("hybrid", decoder("qwen3_next")), ("learned", GPT2LMHeadModel(small))):
        try:
            with lh.patched(other, "rope()", force=True, check=False, group=group):
                pass
        except UserError as why:
            said[name] = str(why)
    return said


def main(folder: str, count: int) -> None:
    with ranks(count) as group:
        found: dict[str, Any] = {"logits": {}, "generate": {}}
        for name, scheme in cells(count):
            model, cell, ids = (
                decoder(name).eval(),
                f"{name}: {scheme}",
                prompts(2, 75)["input_ids"],
            )
            found["logits"][cell] = logits(model, scheme, ids, group)
            for kind, prompt in PROMPTS.items():
                found["generate"][f"{cell}, {kind}"] = generated(model, scheme, prompt, group)
        found["mistakes"] = mistakes(shared("llama"), group)
        if count == 2:  # which divides its heads
            found["gathers"] = gathers(shared("llama"), group)
        found["disagreements"] = disagreements(decoder("llama").eval(), group)
        (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
