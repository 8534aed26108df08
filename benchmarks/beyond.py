"""Loss of a real checkpoint inside and beyond its window, under each training-free method.

    python -m benchmarks.beyond MODEL [--lengths 8192,16384,32768] [--window 8192] [--device cuda]
    python -m benchmarks.beyond MODEL --lengths 600 --gap 32000     # half a text far away
    python -m benchmarks.beyond tiny-alibi --lengths 256,1024 --schemes "ntk_alibi(4)"

The text is Python's documentation topics, sorted and joined by newlines. Each length has two
numbers: the mean loss of all tokens, and that of the last 1,024 (or of the last half, if fewer).
`--gap` shifts the second half of each text by so many positions, at the cost of a short text.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import longitude.hf as lh

TAIL, AT_ONCE = 1024, 2048  # tokens


def schemes(window: int, factor: int) -> dict[str, str | None]:
    """Return the methods for a model with this window, read at `factor` times its length."""
    half, group = window // 2, 2 * factor
    return {
        "none": None,
        "linear": f"rope(frequencies=linear({factor}))",
        "NTK": f"rope(frequencies=ntk({factor}))",
        "YaRN": f"rope(frequencies=yarn({factor}, original={window}))",
        "dynamic NTK": f"rope(frequencies=dynamic_ntk({window}))",
        "ReRoPE": f"rope(remap=rerope({half}))",
        "leaky ReRoPE": f"rope(remap=leaky_rerope({half}, {group}))",
        "Self-Extend": f"rope(remap=self_extend({group}, {window // 8}))",
        "dual chunk": f"rope(remap=dual_chunk({3 * window // 4}, {window // 8}))",
        "sinks": f"rope(remap=streaming(4, {half - 4}))",
    }


def main() -> None:
    args = options().parse_args()
    model, tokenizer = lh.load(args.model, device=args.device, dtype=args.dtype)
    assert tokenizer is not None
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text).input_ids[: max(args.lengths) + 1])
    factor = max(2, -(-(max(args.lengths) + args.gap) // args.window))
    ways = {s.strip(): s.strip() for s in args.schemes.split(";") if s.strip()}
    ways = {"none": None, **ways} if ways else schemes(args.window, factor)
    table = Table("way", *(f"{n:,}" for n in args.lengths), "s", title=args.model)
    for name, scheme in ways.items():
        start = time.perf_counter()
        with lh.patched(model, scheme) if scheme else nullcontext():
            cells = [cell(model, ids[: n + 1].to(model.device), args.gap) for n in args.lengths]
        table.add_row(scheme or name, *cells, f"{time.perf_counter() - start:.0f}")
        print(name, scheme, *cells, flush=True)
    Console(width=140).print(table)


def cell(model: Any, ids: Tensor, gap: int) -> str:
    """Return both means as text, or a dash if a learned table is too short."""
    try:
        values = losses(model, ids, gap)
    except IndexError:
        return "–"
    return f"{values.mean():.3f} ({values[-min(TAIL, len(values) // 2) :].mean():.3f})"


@torch.no_grad()
def losses(model: Any, ids: Tensor, gap: int) -> Tensor:
    """Return the loss of every token but the first; only AT_ONCE logits exist at a time."""
    options: dict[str, Any] = {}
    if gap:
        pos = torch.arange(len(ids) - 1, device=ids.device)
        pos = (pos + gap * (pos >= len(pos) // 2))[None]
        options = {"position_ids": pos, "attention_mask": torch.ones_like(pos)}
    hidden = model.base_model(ids[None, :-1], use_cache=False, **options).last_hidden_state[0]
    parts = zip(hidden.split(AT_ONCE), ids[1:].split(AT_ONCE), strict=True)
    head = model.get_output_embeddings()
    pieces = [F.cross_entropy(head(h).float(), y, reduction="none") for h, y in parts]
    return torch.cat(pieces).double().cpu()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument(
        "--lengths", type=lambda t: [int(n) for n in t.split(",")], default=[8192, 16384, 32768]
    )
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--gap", type=int, default=0)
    parser.add_argument(
        "--schemes",
        default="",
        help="measure these schemes instead of the defaults, separated by ;",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser


if __name__ == "__main__":
    main()
