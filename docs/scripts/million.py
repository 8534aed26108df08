"""Losses of one very long text under a scheme, through the cache in chunks, and its memory.

python docs/scripts/million.py MODEL SCHEME FOLDER [--chunk 16384] [--device cuda]

Prints the mean loss of every 65,536 tokens, and that of the last 4,096 with less and with all of
the text before them.
"""

import argparse
import time
from pathlib import Path

import torch

import longitude.hf as lh
from longitude.eval.perplexity import losses, tail_losses

PIECE, LAST = 65_536, 4096  # tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("scheme")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    model, tokenizer = lh.load(given.model, device=given.device)
    assert tokenizer is not None
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(given.folder.iterdir()))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])[: 2**20]
    with lh.patched(model, given.scheme):
        for context in (n for n in (8192, 32768, 131072) if LAST < n < len(ids)):
            last = tail_losses(model, ids[-context:], LAST, chunk=given.chunk).mean()
            print(f"the last {LAST:,} of {context:,} tokens: {last:.3f}", flush=True)
        began = time.monotonic()
        found = losses(model, ids, chunk=given.chunk)
    by_piece = ", ".join(f"{piece.mean():.2f}" for piece in found.split(PIECE))
    print(f"{len(ids):,} tokens in {time.monotonic() - began:.0f} s; by {PIECE:,}: {by_piece}")
    print(f"the last {LAST:,} of all: {found[-LAST:].mean():.3f}")
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
