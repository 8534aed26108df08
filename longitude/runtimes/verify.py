"""Run a runtime on a model, and check that it computes what Hugging Face does under the scheme.

Both read the same tokens. The log-probabilities of the runtime's 20 most likely next tokens are
compared after each of the last tokens, at a length inside the trained window and at one past it;
the largest difference counts. llama.cpp and Hugging Face multiply quantised weights differently,
which grows with the text. So for those the same difference is measured on the file before the
export, at the same length or where its window ends, and the export may show 1.5 times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor, nn

from longitude.core.progress import TextResult
from longitude.core.validate import short
from longitude.eval.prefill import lm_head, prefill, text_config
from longitude.hf.gguf_reader import FLOAT32, read_layout
from longitude.hf.loading import load
from longitude.hf.patch import patched
from longitude.runtimes import Runner, Runtime, TopTokens
from longitude.runtimes.effective import Effective, difference, emulated
from longitude.runtimes.lint import explain
from longitude.runtimes.target import Target

BOUND = 0.05  # nats: SmolLM2 in float32 differs by 0.0002
SLACK = 1.5  # times the difference by quantised weights alone: 0.4 nats for SmolLM2 in Q4_1
TOP = 20
TOKENS_COMPARED = 8  # consecutive tokens at each length
INSIDE = 512  # tokens inside the window, and as many past it
LogProbs = dict[int, Float[Tensor, " vocabulary"]]  # of the next token, by tokens read


@dataclass(frozen=True)
class Verified:
    """The outcome in one runtime. `rows` maps lengths in tokens to the largest difference among the
    top tokens' log-probabilities, in nats; `baseline`, for the quantised file before the export."""

    runtime: str
    rows: Mapping[int, float] = field(default_factory=dict)
    baseline: Mapping[int, float] = field(default_factory=dict)
    skipped: str = ""  # why it was not run: it is not installed, or has no settings for the scheme
    stopped: str = ""  # its error message, if it could not run the model
    causes: tuple[str, ...] = ()  # the known issues behind a difference

    def bound(self, length: int) -> float:
        """The largest difference at a length that can have other causes than the export."""
        before = [SLACK * size for own, size in self.baseline.items() if own <= length]
        return max([BOUND, *before])

    @property
    def holds(self) -> bool:
        close = all(size <= self.bound(length) for length, size in self.rows.items())
        return close and not self.stopped

    def __str__(self) -> str:
        if self.skipped or self.stopped:
            text = f"was not run: {self.skipped}" if self.skipped else f"stops: {self.stopped}"
            return " ".join([f"{self.runtime} {text}", *self.causes])
        sizes = ", ".join(
            f"{size:.4f} nats at {length:,} tokens (allowed: {self.bound(length):.3f})"
            for length, size in self.rows.items()
        )
        verdict = "the scheme" if self.holds else "another scheme"
        if self.baseline and not self.holds:  # a sharper softmax amplifies the same noise
            verdict += ", or quantisation differs more (verify a float32 file to find out)"
        sentence = (
            f"{self.runtime} computes {verdict}: its top {TOP} log-probabilities differ from "
            f"Hugging Face by {sizes}."
        )
        return " ".join([sentence, *self.causes])


@dataclass(frozen=True)
class VerifyResult(TextResult):
    """What each runtime computes from a model, compared with the scheme."""

    scheme: str | None  # None: what the model's own settings mean
    proofs: tuple[Verified, ...]

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs)

    def show(self, console: Console) -> None:
        """Print a row per runtime and length, then causes and what was not run."""
        from longitude.viz.checkpoint import show_verified

        show_verified(self, console)

    def to_json(self) -> dict[str, Any]:
        """Differences by runtime and length."""
        return {
            "holds": self.holds,
            "scheme": self.scheme,
            "runtimes": [
                {
                    "runtime": proof.runtime,
                    "holds": proof.holds if proof.rows or proof.stopped else None,
                    "rows": [
                        {"length": length, "difference": size, "allowed": proof.bound(length)}
                        for length, size in proof.rows.items()
                    ],
                    **{name: getattr(proof, name) for name in ("skipped", "stopped")},
                    "causes": list(proof.causes),
                }
                for proof in self.proofs
            ],
        }


class Reference:
    """A model under a scheme, in Hugging Face and float32: what runtimes are compared to."""

    def __init__(self, source: str | Path, scheme: str | None, original: int, length: int) -> None:
        self.source, self.scheme, self.length = Path(source), scheme, length
        step, longest = min(INSIDE, original // 2), length - 1  # with room for the next token
        self.lengths = sorted({max(1, min(n, longest)) for n in (step, original + step)})
        self.model, tokenizer = load(source, device="cpu", dtype="float32", quiet=True)
        self.ids = tokens(self.model, tokenizer, self.lengths[-1])
        self.drawn = int(self.ids[0]) if tokenizer is None else tokenizer("a")["input_ids"][-1]

    @cached_property
    def logprobs(self) -> LogProbs:
        """Log-probabilities under the scheme."""
        change = nullcontext()
        if self.scheme is not None:
            change = patched(self.model, self.scheme, length=self.length, check=False)
        with change:
            return _logprobs(self.model, self.ids, ends(self.lengths))

    @cached_property
    def inside(self) -> list[int]:
        """The same lengths, limited to the model's own window."""
        own = text_config(self.model).max_position_embeddings
        return sorted({min(n, own - 1) for n in self.lengths})

    @cached_property
    def quantised(self) -> bool:
        """Whether the model is a GGUF file with weights other than float32."""
        gguf = self.source.suffix == ".gguf"
        return gguf and any(t.kind != FLOAT32 for t in read_layout(self.source).tensors)

    def top_tokens(
        self, runner: Runner, path: str | Path, settings: Mapping[str, Any], lengths: Sequence[int]
    ) -> TopTokens:
        """Return a runtime's most likely tokens after `ends(lengths)`; its errors propagate."""
        question = {
            "path": str(path),
            "settings": dict(settings),
            "ids": self.ids.tolist()[: max(lengths)],
            "lengths": ends(lengths),
            "length": self.length,
            "top": TOP,
            "drawn": self.drawn,
            "threads": torch.get_num_threads(),
        }
        return runner.top_tokens(question)


def verify(
    runtime: Runtime,
    path: str | Path,
    settings: Mapping[str, Any],
    reference: Reference,
    meant: Target | Effective | None = None,
) -> Verified:
    """Compare a model in a runtime that is started with these settings with the reference. `meant`
    are the intended numbers, from which known issues behind a difference are found."""
    runner = runtime.runner
    assert runner is not None, runtime.name
    if find_spec(runner.module) is None:
        missing = f"it is not installed (pip install {runner.install})."
        return Verified(runtime.title, skipped=missing)
    package = packages_distributions()[runner.module][0]
    called = f"{runtime.title} ({package} {version(package)})"
    try:
        theirs = reference.top_tokens(runner, path, settings, reference.lengths)
        result = Verified(called, _differences(reference.logprobs, theirs, reference.lengths))
        if runtime.reads == "gguf" and reference.quantised and reference.scheme:
            before = reference.top_tokens(runner, reference.source, {}, reference.inside)
            own = _logprobs(reference.model, reference.ids, ends(reference.inside))
            result = replace(result, baseline=_differences(own, before, reference.inside))
    except Exception as error:  # each runtime raises its own types
        words = " ".join(str(error).split()) or type(error).__name__
        result = Verified(called, stopped=f"{short(words.rstrip('.'), 160)}.")
    if result.holds or meant is None:
        return result
    effective = emulated(runtime.emulate, settings)
    causes, _ = explain(runtime, effective, difference(meant, effective))
    sentences = [f"{issue.sentence} → {issue.fix}" for issue in causes]
    return replace(result, causes=tuple(f"{issue[0].upper()}{issue[1:]}" for issue in sentences))


def ends(lengths: Sequence[int]) -> list[int]:
    """The numbers of tokens to read so as to end at each of the last tokens of each length."""
    return sorted({n - back for n in lengths for back in range(TOKENS_COMPARED) if n > back})


def tokens(model: nn.Module, tokenizer: Any, length: int) -> Int[Tensor, " n"]:
    """Return the tokens to read: Python's own manual, or random ones without a tokenizer."""
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return torch.randint(text_config(model).vocab_size, (length,), generator=rng)
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = torch.tensor(tokenizer(text[: 8 * length], verbose=False)["input_ids"])
    return ids.repeat(-(-length // len(ids)))[:length]


def _logprobs(model: nn.Module, ids: Int[Tensor, " n"], after: Sequence[int]) -> LogProbs:
    head, logprobs = lm_head(model), {}
    for chunk in prefill(model, ids[None, : max(after)], head=head):
        for n in after:
            if chunk.first < n <= chunk.first + chunk.hidden.shape[1]:
                row = n - 1 - chunk.first
                logprobs[n] = head(chunk.hidden[:, row : row + 1])[0, 0].log_softmax(-1)
    return logprobs


def _differences(
    ours: LogProbs, theirs: Sequence[Sequence[tuple[int, float]]], lengths: Sequence[int]
) -> dict[int, float]:
    """Return the largest difference among the last tokens of each length."""
    sizes = {
        n: max(abs(ours[n][token].item() - logprob) for token, logprob in top)
        for n, top in zip(ends(lengths), theirs, strict=True)
    }
    return {n: max(sizes[e] for e in sizes if n - TOKENS_COMPARED < e <= n) for n in lengths}
