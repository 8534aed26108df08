"""The tiny checkpoints in stock transformers: loss and passkeys, inside and past the window.

    python -m benchmarks.assets [--excerpts 32] [--passkeys 40]

The text is the lab's test text: files of the standard library that training never saw. tiny-learned
is measured at its window only, since it has no positions past its table.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import longitude.hf as lh
from longitude.eval.perplexity import tail, token_losses
from longitude.eval.tasks.passkey import passkey, retrieved
from longitude.training.data import excerpts, gather

NAMES = ("tiny-rope", "tiny-alibi", "tiny-learned")
LENGTHS = (256, 1024, 2048)
TAIL = 128


@torch.no_grad()
def main() -> None:
    args = options().parse_args()
    text = excerpts(gather(), max(LENGTHS) + 1, args.excerpts, seed=0)
    table = Table("checkpoint", "bytes", f"loss of the last {TAIL}", "passkeys retrieved")
    for name in NAMES:
        model, tokenizer = lh.load(name, dtype="float32", quiet=True)
        for n in LENGTHS if name != "tiny-learned" else LENGTHS[:1]:
            losses = token_losses(lambda x, m=model: m(x).logits, text[:, -n - 1 :])
            share = told(model, tokenizer, n, args.passkeys)
            table.add_row(name, f"{n:,}", f"{tail(losses, TAIL):.3f}", f"{share:.2f}")
    Console().print(table)


def told(model: Any, tokenizer: Any, length: int, count: int) -> float:
    """Return the share of short-form passkeys that greedy decoding retrieves."""
    questions = [
        passkey(length, rng=random.Random(f"{length}-{i}"), form="short") for i in range(count)
    ]
    right = 0
    for question in questions:
        ids = tokenizer(question.prompt, return_tensors="pt", verbose=False)
        out = model.generate(**ids, max_new_tokens=len(question.answer), do_sample=False)
        right += retrieved(question, tokenizer.decode(out[0, ids.input_ids.shape[1] :]))
    return right / count


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--excerpts", type=int, default=32)
    parser.add_argument("--passkeys", type=int, default=40)
    return parser


if __name__ == "__main__":
    main()
