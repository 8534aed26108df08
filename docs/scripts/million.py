"""Loss, kept context and memory of a very long text under a scheme, prefilled in chunks.

python docs/scripts/million.py MODEL SCHEME FOLDER... [--lengths 32768,131072,1048576]

Kept context is measured as in `longitude extend` (longitude/eval/tasks/kept_context.py) except for
the order: the text begins with the evidence of all documents, one filler follows, and each target
continues the same cache. So two forwards over a million tokens measure all documents.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import longitude.hf as lh
from longitude.eval.prefill import Head, forward, lm_head, logit_chunk, prefill
from longitude.eval.stats import ratio
from longitude.eval.tasks.kept_context import KEY_GAIN

EVIDENCE, TARGET, PIECE = 3072, 1024, 65_536  # tokens


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("scheme")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--lengths", default="32768,131072,1048576")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    model, tokenizer = lh.load(args.model, device=args.device)
    assert tokenizer is not None
    files = (file for folder in args.folders for file in sorted(folder.iterdir()))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    documents = ids[: args.documents * (EVIDENCE + TARGET)].view(args.documents, -1)
    evidence, targets = documents.split((EVIDENCE, TARGET), 1)
    filler = ids[documents.numel() :]
    decoy = filler[-evidence.numel() :].view_as(evidence)
    needed = max(lengths) - evidence.numel() - TARGET
    if needed > len(filler) - decoy.numel():
        raise SystemExit(f"{max(lengths):,} tokens take more text than these {len(ids):,} tokens.")

    adjacent = [
        torch.stack([after(model, start, target[None])[0][0] for start, target in pairs])
        for pairs in (zip(decoy, targets, strict=True), zip(evidence, targets, strict=True))
    ]
    gain = adjacent[0] - adjacent[1]
    keys = gain > KEY_GAIN
    print(f"{int(keys.sum())} key tokens of {len(targets)} documents", flush=True)
    with lh.patched(model, args.scheme):
        for length in lengths:
            between = filler[: length - evidence.numel() - TARGET]
            began = time.monotonic()
            informed, losses = after(
                model, torch.cat([evidence.flatten(), between]), targets, args.chunk
            )
            seconds = time.monotonic() - began
            uninformed, _ = after(model, torch.cat([decoy.flatten(), between]), targets, args.chunk)
            kept = ratio(
                [
                    (float(far[mask].sum()), float(base[mask].sum()))
                    for far, base, mask in zip(uninformed - informed, gain, keys, strict=True)
                ]
            )
            by_piece = ", ".join(f"{piece.mean():.2f}" for piece in losses.split(PIECE))
            print(
                f"{length:,} tokens in {seconds:.0f} s: kept {kept.mean:.1%} (95 % CI "
                f"{kept.low:.1%} to {kept.high:.1%}), loss of the targets {informed.mean():.3f}, "
                f"without their evidence {uninformed.mean():.3f}; by {PIECE:,}: {by_piece}",
                flush=True,
            )
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def after(
    model: nn.Module, start: Tensor, targets: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses of each target's tokens (but for its first) as it continues a text, and the
    losses of the text itself."""
    head, cache, text_losses = lm_head(model), None, []
    for out in prefill(model, start[None], chunk=chunk, keep_cache=True, head=head):
        text_losses.append(scores(model, head, out.hidden[0], start[out.first + 1 :]))
        cache = out.cache
    target_losses = []
    for target in targets:
        out = forward(
            model, target[None, :-1].to(model.device), head, cache=cache, first=len(start)
        )
        target_losses.append(scores(model, head, out.hidden[0], target[1:]))
        out.cache.crop(-(len(target) - 1))
    return torch.stack(target_losses), torch.cat(text_losses)


def scores(model: nn.Module, head: Head, hidden: Tensor, following: Tensor) -> Tensor:
    """Return the loss of the tokens that follow the hidden states."""
    following = following[: len(hidden)].to(hidden.device)
    parts = zip(hidden.split(logit_chunk(model)), following.split(logit_chunk(model)), strict=False)
    return torch.cat(
        [F.cross_entropy(head(x[: len(y)]), y, reduction="none").double().cpu() for x, y in parts]
    )


if __name__ == "__main__":
    main()
