"""A very long text under a scheme, through the cache in chunks: loss, kept context, memory.

python docs/scripts/million.py MODEL SCHEME FOLDER... [--lengths 32768,131072,1048576]

Kept context is that of `longitude extend` (longitude/eval/tasks/kept_context.py) but for its order:
the evidence of all documents stands at the beginning, one filler follows, and each target continues
the same cache. So two forwards over a million tokens measure all documents.
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
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    model, tokenizer = lh.load(given.model, device=given.device)
    assert tokenizer is not None
    files = (file for folder in given.folders for file in sorted(folder.iterdir()))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    documents = ids[: given.documents * (EVIDENCE + TARGET)].view(given.documents, -1)
    evidence, targets = documents.split((EVIDENCE, TARGET), 1)
    filler = ids[documents.numel() :]
    other = filler[-evidence.numel() :].view_as(evidence)
    room = max(lengths) - evidence.numel() - TARGET
    if room > len(filler) - other.numel():
        raise SystemExit(f"{max(lengths):,} tokens take more text than these {len(ids):,} tokens.")

    near = [
        torch.stack([after(model, start, target[None])[0][0] for start, target in pairs])
        for pairs in (zip(other, targets, strict=True), zip(evidence, targets, strict=True))
    ]
    gain = near[0] - near[1]
    keys = gain > KEY_GAIN
    print(f"{int(keys.sum())} key tokens of {len(targets)} documents", flush=True)
    with lh.patched(model, given.scheme):
        for length in lengths:
            between = filler[: length - evidence.numel() - TARGET]
            began = time.monotonic()
            told, losses = after(
                model, torch.cat([evidence.flatten(), between]), targets, given.chunk
            )
            seconds = time.monotonic() - began
            untold, _ = after(model, torch.cat([other.flatten(), between]), targets, given.chunk)
            kept = ratio(
                [
                    (float(far[mask].sum()), float(base[mask].sum()))
                    for far, base, mask in zip(untold - told, gain, keys, strict=True)
                ]
            )
            by_piece = ", ".join(f"{piece.mean():.2f}" for piece in losses.split(PIECE))
            print(
                f"{length:,} tokens in {seconds:.0f} s: kept {kept.mean:.1%} (95 % CI "
                f"{kept.low:.1%} to {kept.high:.1%}), loss of the targets {told.mean():.3f}, "
                f"without their evidence {untold.mean():.3f}; by {PIECE:,}: {by_piece}",
                flush=True,
            )
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def after(
    model: nn.Module, start: Tensor, targets: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """The losses of each target's tokens right after a text, but for its first one, and the losses
    of the text itself."""
    head, cache, found = lm_head(model), None, []
    for out in prefill(model, start[None], chunk=chunk, keep_cache=True, head=head):
        found.append(scores(model, head, out.hidden[0], start[out.first + 1 :]))
        cache = out.cache
    each = []
    for target in targets:
        out = forward(
            model, target[None, :-1].to(model.device), head, cache=cache, first=len(start)
        )
        each.append(scores(model, head, out.hidden[0], target[1:]))
        out.cache.crop(-(len(target) - 1))
    return torch.stack(each), torch.cat(found)


def scores(model: nn.Module, head: Head, hidden: Tensor, following: Tensor) -> Tensor:
    """The loss of the tokens that follow some hidden states."""
    following = following[: len(hidden)].to(hidden.device)
    parts = zip(hidden.split(logit_chunk(model)), following.split(logit_chunk(model)), strict=False)
    return torch.cat(
        [F.cross_entropy(head(x[: len(y)]), y, reduction="none").double().cpu() for x, y in parts]
    )


if __name__ == "__main__":
    main()
