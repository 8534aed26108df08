"""Whether llama.cpp itself, on an exported file, computes what Hugging Face does under the scheme.

Both read the same tokens. Compared are llama.cpp's 20 likeliest next tokens: the largest difference
of a log-probability after each of the last tokens, at a length inside the trained window and at one
past it. The two do not multiply quantised weights alike, and the difference grows with the text; so
for those the same difference is measured on the file before the export, at the same length or where
its window ends, and the export may show 1.5 times as much.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, short
from longitude.eval.prefill import lm_head, prefill, text_config
from longitude.hf.gguf_reader import FLOAT32, read_layout
from longitude.hf.loading import load
from longitude.hf.patch import patched
from longitude.runtimes.target import Target

BOUND = 0.05  # nats: SmolLM2 in float32 differs by 0.0002
SLACK = 1.5  # times what quantised weights make differ anyway: 0.4 nats for SmolLM2 in Q4_1
TOP = 20
TOKENS_COMPARED = 8  # consecutive tokens at each length
INSIDE = 512  # tokens inside the window, and as many past it
PROGRAM = Path(__file__).with_name("llama_cpp_process.py")


@dataclass(frozen=True)
class Verified:
    """The outcome: by length in tokens, the largest difference of a log-probability among the
    likeliest tokens, in nats. `baseline` is the quantised file before the export."""

    runtime: str
    rows: Mapping[int, float]
    baseline: Mapping[int, float] = field(default_factory=dict)

    def bound(self, length: int) -> float:
        """The largest difference at a length that the export does not cause."""
        before = [SLACK * size for own, size in self.baseline.items() if own <= length]
        return max([BOUND, *before])

    @property
    def holds(self) -> bool:
        """Whether llama.cpp computes the scheme."""
        return all(size <= self.bound(length) for length, size in self.rows.items())

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{size:.4f} nats at {length:,} tokens (allowed: {self.bound(length):.3f})"
            for length, size in self.rows.items()
        )
        verdict = "the scheme" if self.holds else "another scheme"
        if self.baseline and not self.holds:  # a sharper softmax amplifies the same noise
            verdict += ", or quantisation differs more under this one (a float32 file tells)"
        return (
            f"{self.runtime} computes {verdict}: its top {TOP} log-probabilities differ from "
            f"Hugging Face by {sizes}."
        )


def verify(source: Path, exported: Path, scheme: str | Scheme | Layers, target: Target) -> Verified:
    """Run an exported GGUF file in llama.cpp, and its source under the scheme: at a length inside
    the window and, if the target allows, at one past it."""
    if find_spec("xllamacpp") is None:
        raise UserError(
            "--verify runs llama.cpp through the package xllamacpp: pip install longitude[verify]."
        )
    step = min(INSIDE, target.original // 2)
    longest = target.length - 1  # a slot has to hold the next token, too
    lengths = sorted({max(1, min(n, longest)) for n in (step, target.original + step)})
    model, tokenizer = load(source, device="cpu", dtype="float32", quiet=True)
    ids = tokens(model, tokenizer, lengths[-1])
    drawn = int(ids[0]) if tokenizer is None else tokenizer("a")["input_ids"][-1]
    with patched(model, scheme, length=target.length, check=False):
        rows = _compared(model, exported, ids, lengths, drawn)
    own = model.config.max_position_embeddings
    inside = sorted({min(n, own - 1) for n in lengths})
    quantised = any(t.kind != FLOAT32 for t in read_layout(source).tensors)
    baseline = _compared(model, source, ids, inside, drawn) if quantised else {}
    return Verified(f"llama.cpp (xllamacpp {version('xllamacpp')})", rows, baseline)


def tokens(model: nn.Module, tokenizer: Any, length: int) -> Int[Tensor, " n"]:
    """The tokens to read: Python's own manual, or random ones if there is no tokenizer."""
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return torch.randint(text_config(model).vocab_size, (length,), generator=rng)
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text[: 8 * length], verbose=False)["input_ids"])
    return ids.repeat(-(-length // len(ids)))[:length]


def _compared(
    model: nn.Module, file: Path, ids: Int[Tensor, " n"], lengths: Sequence[int], drawn: int
) -> dict[int, float]:
    ends = sorted({n - back for n in lengths for back in range(TOKENS_COMPARED) if n > back})
    theirs, head, sizes = llama_cpp(file, ids, ends, drawn), lm_head(model), {}
    for read in prefill(model, ids[None, : max(ends)], head=head):
        for n, top in zip(ends, theirs, strict=True):
            if read.first < n <= read.first + read.hidden.shape[1]:
                at = n - 1 - read.first
                ours = head(read.hidden[:, at : at + 1])[0, 0].log_softmax(-1)
                sizes[n] = max(abs(ours[token].item() - logprob) for token, logprob in top)
    return {n: max(sizes[e] for e in ends if n - TOKENS_COMPARED < e <= n) for n in lengths}


def llama_cpp(
    file: Path, ids: Int[Tensor, " n"], lengths: Sequence[int], drawn: int
) -> list[list[tuple[int, float]]]:
    """llama.cpp's likeliest tokens, with log-probabilities, after the first so many tokens."""
    question = {
        "file": str(file),
        "ids": ids.tolist(),
        "lengths": list(lengths),
        "top": TOP,
        "drawn": drawn,
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, str(PROGRAM)]
    ran = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True)
    if ran.returncode == 0:
        with suppress(ValueError, IndexError):
            return json.loads(ran.stdout.splitlines()[-1])
    lines = [line for line in ran.stderr.splitlines() if line.strip()] or ["no message"]
    cause = next((line for line in lines if "error" in line.lower()), lines[-1])
    raise UserError(f"llama.cpp can't run {file} ({short(cause, 120)}): convert it again.")
