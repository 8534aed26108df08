"""The loss at all lengths from one reading at the greatest, against a forward for each length.

    python -m benchmarks.lengths MODEL --lengths 256,512,1024,2048 [--scheme "…"] [--device cuda]

A forward a length, with all its logits, is what the evaluation scripts of YaRN (jquesnelle/yarn,
eval/perplexity.py) do. The baseline is the least that a forward can cost: the last token's logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import longitude.hf as lh
from benchmarks.side_by_side import compare, show
from longitude.eval.perplexity import losses

BASELINE = "one forward, one logit"


def main() -> None:
    args = options().parse_args()
    model, tokenizer = lh.load(args.model, device=args.device, dtype=args.dtype)
    assert tokenizer is not None
    text = "\n".join(topics[name] for name in sorted(topics))
    read = tokenizer(text, verbose=False).input_ids[: max(args.lengths) + 1]
    ids = torch.tensor(read).to(model.device)
    if len(ids) <= max(args.lengths):
        raise SystemExit(f"the text has {len(ids)} tokens: use lengths below that.")
    patch = lh.patched(model, args.scheme, length=len(ids)) if args.scheme else nullcontext()
    with patch:
        rows = compare(ways(model, ids, args.lengths), BASELINE, args.rounds, {}, ids.is_cuda)
    what = f"{args.model} {args.scheme} at {', '.join(f'{n:,}' for n in args.lengths)}"
    show(f"loss on {ids.device.type}: {what}", rows, BASELINE, args.json)


def ways(model: Any, ids: Tensor, lengths: list[int]) -> dict[str, Callable[[], object]]:
    """Each gives the mean loss at every length, but for the two that are here to compare with."""
    whole = ids[None, :-1]

    @torch.no_grad()
    def forward(**options: Any) -> None:
        model(whole, use_cache=False, **options)

    def once() -> list[float]:
        found = losses(model, ids)
        return [float(found[:n].mean()) for n in lengths]

    @torch.no_grad()
    def each() -> list[float]:
        rows = [ids[None, : n + 1] for n in lengths]
        return [float(model(row, labels=row, use_cache=False).loss) for row in rows]

    return {
        BASELINE: lambda: forward(logits_to_keep=1),
        "one forward, all logits": forward,
        "all lengths at once": once,
        "a forward for each length": each,
    }


def options() -> argparse.ArgumentParser:
    def sizes(text: str) -> list[int]:
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="tiny-rope")
    parser.add_argument("--lengths", type=sizes, default=[256, 512, 1024, 2048])
    parser.add_argument("--scheme", default="", help="patched with it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
