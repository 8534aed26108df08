"""Whether llama.cpp itself, on an exported file, says what Hugging Face says under the scheme.

Both read the same tokens; compared are llama.cpp's 20 likeliest next tokens, the largest difference
of a log-probability behind each of the last tokens, at a length inside the trained window and at
one past it. Weights in blocks are not multiplied alike by the two, and the longer a text the more
that comes to; so for those the same difference is taken of the file as it was, at the same length
or where its window ends, and the export may show 1.5 times of it.
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
from longitude.runtimes.target import Wanted

BOUND = 0.05  # nats: SmolLM2 in float32 differs by 0.0002
SLACK = 1.5  # times what weights in blocks make differ anyway: 0.4 nats for SmolLM2 in Q4_1
TOP = 20
PLACES = 8  # tokens one after another that a length is looked at behind
INSIDE = 512  # tokens inside the window, and as many past it, unless lengths are given
PROGRAM = Path(__file__).with_name("llama_cpp.py")


@dataclass(frozen=True)
class Compared:
    """The largest difference of a log-probability among the likeliest tokens, in nats."""

    length: int
    difference: float


@dataclass(frozen=True)
class Verified:
    """What a verification found; `untouched` is the file before the export, where that matters."""

    runtime: str
    rows: tuple[Compared, ...]
    untouched: tuple[Compared, ...] = ()

    def bound(self, row: Compared) -> float:
        """The largest difference at a row's length that is none of the export's doing."""
        alike = [own for own in self.untouched if own.length <= row.length]
        return max([BOUND, *(SLACK * own.difference for own in alike)])

    @property
    def holds(self) -> bool:
        """Whether llama.cpp computes the scheme."""
        return all(row.difference <= self.bound(row) for row in self.rows)

    def __str__(self) -> str:
        said = ", ".join(
            f"{r.difference:.4f} nats at {r.length:,} tokens (allowed: {self.bound(r):.3f})"
            for r in self.rows
        )
        verdict = "as the scheme asks" if self.holds else "another scheme"
        if self.untouched and not self.holds:  # a sharper softmax makes more of the same noise
            verdict = (
                "another scheme, or its blocks differ more under this one (a float32 file tells)"
            )
        return (
            f"{self.runtime} computes {verdict}: its top {TOP} log-probabilities differ from "
            f"Hugging Face by {said}."
        )


def verify(
    source: Path,
    target: Path,
    scheme: str | Scheme | Layers,
    wanted: Wanted,
    *,
    lengths: Sequence[int] | None = None,
) -> Verified:
    """Run an exported GGUF file in llama.cpp, and the one it was made from under the scheme.

    Args:
        source: the file before the export.
        target: the file that was written.
        lengths: in tokens; else one inside the window and one past it.
    """
    if find_spec("xllamacpp") is None:
        raise UserError(
            "--verify runs llama.cpp through the package xllamacpp: pip install longitude[verify]."
        )
    chosen = _lengths(wanted) if lengths is None else sorted(set(lengths))
    model, tokenizer = load(source, device="cpu", dtype="float32", quiet=True)
    ids = tokens(model, tokenizer, chosen[-1])
    drawn = int(ids[0]) if tokenizer is None else tokenizer("a")["input_ids"][-1]
    with patched(model, scheme, length=wanted.target, check=False):
        rows = _compared(model, target, ids, chosen, drawn)
    own = model.config.max_position_embeddings
    inside = sorted({min(n, own - 1) for n in chosen})  # its slot has to hold the next token, too
    blocks = any(t.kind != FLOAT32 for t in read_layout(source).tensors)
    untouched = _compared(model, source, ids, inside, drawn) if blocks else ()
    return Verified(f"llama.cpp (xllamacpp {version('xllamacpp')})", rows, untouched)


def _lengths(wanted: Wanted) -> list[int]:
    """One inside the window and, where the target leaves room, one past it."""
    step = min(INSIDE, wanted.original // 2)
    past = min(wanted.target - 1, wanted.original + step)
    return sorted({max(1, min(step, wanted.target - 1)), max(1, past)})


def tokens(model: nn.Module, tokenizer: Any, length: int) -> Int[Tensor, " n"]:
    """The tokens to read: Python's own manual, or random ones where there is no tokenizer."""
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
    ends = sorted({n - back for n in lengths for back in range(PLACES) if n > back})
    ours, theirs = _hugging_face(model, ids, ends), _llama_cpp(file, ids, ends, drawn)
    apart = {
        n: max(abs(ours[n][token].item() - said) for token, said in top)
        for n, top in zip(ends, theirs, strict=True)
    }
    return tuple(
        Compared(n, max(apart[end] for end in ends if n - PLACES < end <= n)) for n in lengths
    )


def _hugging_face(
    model: nn.Module, ids: Int[Tensor, " n"], lengths: Sequence[int]
) -> dict[int, Tensor]:
    """The log-probabilities behind the first so many tokens, for each length."""
    head, found = lm_head(model), {}
    for read in prefill(model, ids[None, : max(lengths)], head=head):
        for n in lengths:
            if read.first < n <= read.first + read.hidden.shape[1]:
                at = n - 1 - read.first
                found[n] = head(read.hidden[:, at : at + 1])[0, 0].log_softmax(-1)
    return found


def _llama_cpp(
    file: Path, ids: Int[Tensor, " n"], lengths: Sequence[int], drawn: int
) -> list[list[tuple[int, float]]]:
    asked = {
        "file": str(file),
        "ids": ids.tolist(),
        "lengths": list(lengths),
        "top": TOP,
        "drawn": drawn,
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, str(PROGRAM)]
    ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    try:
        if ran.returncode == 0:
            found = json.loads(ran.stdout.splitlines()[-1])
            return [[(token, said) for token, said in top] for top in found]
    except (ValueError, IndexError):
        pass
    said = [line for line in ran.stderr.splitlines() if line.strip()] or ["no word"]
    raise UserError(f"llama.cpp can't run {file} ({short(_cause(said), 120)}): convert it again.")


def _cause(lines: Sequence[str]) -> str:
    """The line that says why: llama.cpp's first error, or else the last line of all."""
    return next((line for line in lines if "error" in line.lower()), lines[-1])
