"""The loss at all lengths from one forward at the greatest, against one forward per length.

    python -m benchmarks.lengths MODEL --lengths 256,512,1024,2048 [--scheme "…"] [--device cuda]

One forward per length, with all its logits, is what YaRN's evaluation scripts do (jquesnelle/yarn,
eval/perplexity.py). The baseline is the cheapest forward there is: with the last token's logits.
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
    tokens = tokenizer(text, verbose=False).input_ids[: max(args.lengths) + 1]
    ids = torch.tensor(tokens).to(model.device)
    if len(ids) <= max(args.lengths):
        raise SystemExit(f"the text has {len(ids)} tokens: use lengths below that.")
    patch = lh.patched(model, args.scheme, length=len(ids)) if args.scheme else nullcontext()
    with patch:
        rows = compare(ways(model, ids, args.lengths), BASELINE, args.rounds, {}, ids.is_cuda)
    what = f"{args.model} {args.scheme} at {', '.join(f'{n:,}' for n in args.lengths)}"
    show(f"loss on {ids.device.type}: {what}", rows, BASELINE, args.json)


def ways(model: Any, ids: Tensor, lengths: list[int]) -> dict[str, Callable[[], object]]:
    """Return the methods for the loss at every length, and two single forwards to compare with."""
    inputs = ids[None, :-1]

    @torch.no_grad()
    def forward(**options: Any) -> None:
        model(inputs, use_cache=False, **options)

    def once() -> list[float]:
        token_losses = losses(model, ids)
        return [float(token_losses[:n].mean()) for n in lengths]

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
