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
from collections.abc import Sequence
from dataclasses import dataclass
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
INSIDE = 512  # tokens inside the window, and as many past it, unless lengths are given
PROGRAM = Path(__file__).with_name("llama_cpp_process.py")


@dataclass(frozen=True)
class Compared:
    """The largest difference of a log-probability among the likeliest tokens, in nats."""

    length: int
    difference: float


@dataclass(frozen=True)
class Verified:
    """The outcome; `baseline` is the quantised file before the export."""

    runtime: str
    rows: tuple[Compared, ...]
    baseline: tuple[Compared, ...] = ()

    def bound(self, row: Compared) -> float:
        """The largest difference at a row's length that the export does not cause."""
        before = [own.difference for own in self.baseline if own.length <= row.length]
        return max([BOUND, *(SLACK * size for size in before)])

    @property
    def holds(self) -> bool:
        """Whether llama.cpp computes the scheme."""
        return all(row.difference <= self.bound(row) for row in self.rows)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{r.difference:.4f} nats at {r.length:,} tokens (allowed: {self.bound(r):.3f})"
            for r in self.rows
        )
        verdict = "the scheme" if self.holds else "another scheme"
        if self.baseline and not self.holds:  # a sharper softmax amplifies the same noise
            verdict += ", or quantisation differs more under this one (a float32 file tells)"
        return (
            f"{self.runtime} computes {verdict}: its top {TOP} log-probabilities differ from "
            f"Hugging Face by {sizes}."
        )


def verify(
    source: Path,
    exported: Path,
    scheme: str | Scheme | Layers,
    target: Target,
    *,
    lengths: Sequence[int] | None = None,
) -> Verified:
    """Run an exported GGUF file in llama.cpp, and its source under the scheme.

    Args:
        source: the file before the export.
        exported: the file that was written.
        lengths: in tokens; by default one inside the window and, if the target allows, one past it.
    """
    if find_spec("xllamacpp") is None:
        raise UserError(
            "--verify runs llama.cpp through the package xllamacpp: pip install longitude[verify]."
        )
    if lengths is None:
        step = min(INSIDE, target.original // 2)
        past = min(target.length - 1, target.original + step)
        lengths = (max(1, min(step, target.length - 1)), max(1, past))
    lengths = sorted(set(lengths))
    model, tokenizer = load(source, device="cpu", dtype="float32", quiet=True)
    ids = tokens(model, tokenizer, lengths[-1])
    drawn = int(ids[0]) if tokenizer is None else tokenizer("a")["input_ids"][-1]
    with patched(model, scheme, length=target.length, check=False):
        rows = _compared(model, exported, ids, lengths, drawn)
    own = model.config.max_position_embeddings
    inside = sorted({min(n, own - 1) for n in lengths})  # its slot has to hold the next token, too
    quantised = any(t.kind != FLOAT32 for t in read_layout(source).tensors)
    baseline = _compared(model, source, ids, inside, drawn) if quantised else ()
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
) -> tuple[Compared, ...]:
    ends = sorted({n - back for n in lengths for back in range(TOKENS_COMPARED) if n > back})
    ours, theirs = _hugging_face(model, ids, ends), llama_cpp(file, ids, ends, drawn)
    sizes = {
        n: max(abs(ours[n][token].item() - logprob) for token, logprob in top)
        for n, top in zip(ends, theirs, strict=True)
    }
    return tuple(
        Compared(n, max(sizes[end] for end in ends if n - TOKENS_COMPARED < end <= n))
        for n in lengths
    )


def _hugging_face(
    model: nn.Module, ids: Int[Tensor, " n"], lengths: Sequence[int]
) -> dict[int, Tensor]:
    """The log-probabilities after the first so many tokens, for each length."""
    head, found = lm_head(model), {}
    for read in prefill(model, ids[None, : max(lengths)], head=head):
        for n in lengths:
            if read.first < n <= read.first + read.hidden.shape[1]:
                at = n - 1 - read.first
                found[n] = head(read.hidden[:, at : at + 1])[0, 0].log_softmax(-1)
    return found


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
    try:
        if ran.returncode == 0:
            found = json.loads(ran.stdout.splitlines()[-1])
            return [[(token, logprob) for token, logprob in top] for top in found]
    except (ValueError, IndexError):
        pass
    lines = [line for line in ran.stderr.splitlines() if line.strip()] or ["no message"]
    cause = next((line for line in lines if "error" in line.lower()), lines[-1])
    raise UserError(f"llama.cpp can't run {file} ({short(cause, 120)}): convert it again.")
