"""From a prompt to an answer: its layout, the loop that generates tokens, and its trace.

Every row is `head + window + tail`, and the row without context `head + tail`: all windows share
the head, and NBCE's empty row still holds the question. A chat model gets the window, an empty line
and the question as one user turn of the tokenizer's template; the tail ends where the assistant's
turn begins. A base model continues the window, a line break and the question, which is the form of
the passkey task that the bundled tiny models were trained on. Special tokens in a text are text.

Tokens come from transformers' own `generate`, so that sampling, processors, stopping and streamers
are its own: it gets a shallow copy of the model without a cache, whose forward asks a
`LogitSource`, which runs several forwards with caches of their own. Beams, several answers and
assistants would need as many caches and are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.hf.generation import Detokenizer

PLACEHOLDER = "LONGITUDE-WINDOW"  # stands for the window in a chat template
SAMPLING = ("temperature", "top_p", "top_k")
# options of `generate` that need several rows or more than the last token's logits: off values
ONE_ROW = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "guidance_scale": None,
}


@dataclass(frozen=True)
class Prompt:
    """The tokens around a window."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    def row(self, window: Sequence[int]) -> list[int]:
        """All tokens of a prompt with this window."""
        return [*self.head, *window, *self.tail]

    @property
    def size(self) -> int:
        """Tokens of a row that are not the window's."""
        return len(self.head) + len(self.tail)


def prompt(tokenizer: Any, question: str, *, chat: bool | None = None) -> Prompt:
    """The layout for a question; by default a chat template is used if there is one."""
    if not question.strip():
        raise UserError(f"a question has words in it, but got {shown(question)}: ask something.")
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise UserError("the checkpoint's tokenizer has no chat template: leave chat out.")
    if not template or chat is False:
        bos = tokenizer.bos_token_id
        adds_bos = tokenizer("a", verbose=False)["input_ids"][:1] == [bos]
        tail = tokenizer(f"\n{question}", add_special_tokens=False, verbose=False)["input_ids"]
        return Prompt((bos,) if adds_bos else (), tuple(tail))
    turn = [{"role": "user", "content": f"{PLACEHOLDER}\n\n{question}"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, placeholder, after = text.partition(PLACEHOLDER)
    if not placeholder:
        raise UserError(
            "the checkpoint's chat template leaves out what the user says: set chat=False."
        )
    head, tail = (
        tuple(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        for part in (before, after)
    )
    return Prompt(head, tail)


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, in which special tokens are text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(text, **options)["input_ids"]


def encode_windows(
    tokenizer: Any, windows: Sequence[str], layout: Prompt, new: int, trained: int | None
) -> list[list[int]]:
    """The tokens of every window; raise where one is empty, or too long beside question and answer
    for the trained length."""
    if not windows:
        raise UserError("a text of at least one window is read, but got none: give some text.")
    ids = [encode(tokenizer, window) for window in windows]
    if not all(ids):
        raise UserError(
            f"a window has text in it, but number {ids.index([])} of {len(ids)} has none: drop it."
        )
    longest = max(map(len, ids))
    if trained is not None and longest + layout.size + new > trained:
        raise UserError(
            f"a window of {longest} tokens, {layout.size} around it and an answer of {new} are "
            f"more than the {trained} the model was trained on: use windows of "
            f"{max(0, trained - new - layout.size)} tokens at most."
        )
    return ids


# the answer


@dataclass(frozen=True)
class Step:
    """One token of an answer; the texts of all steps joined are the answer.

    `text` is empty while a character is incomplete, and holds what several tokens spell together
    once the last of them is there.
    """

    token: int | None  # None for text left over after the last token
    text: str
    window: int | None = None  # the window it came from, counted from 0; None: from none of them
    entropy: float | None = None  # NBCE: that of the chosen window, in nats
    entropies: tuple[float, ...] = ()  # NBCE: that of every window
    mass: tuple[float, ...] = ()  # parallel windows: each window's share of attention

    def plain(self) -> dict[str, Any]:
        """For JSON, without what this method does not have."""
        known = {"token": self.token, "text": self.text, "window": self.window}
        if self.entropy is not None:
            known |= {"entropy": self.entropy, "entropies": list(self.entropies)}
        return known | ({"mass": list(self.mass)} if self.mass else {})


@dataclass(frozen=True)
class Answer:
    """An answer with its trace."""

    text: str
    by: str  # "nbce", "windows", "extend"
    steps: tuple[Step, ...] = ()
    windows: int = 0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        trace = {"windows": self.windows, "steps": [step.plain() for step in self.steps]}
        return {"answer": self.text, "by": self.by, **trace}


Tell = Callable[[Step], None]  # called with each step as soon as it is known


@runtime_checkable
class LogitSource(Protocol):
    """Computes the next token's logits, and remembers where each token came from."""

    def first(self) -> Float[Tensor, " v"]:
        """The logits after the prompt."""
        ...

    def next(self, token: int) -> Float[Tensor, " v"]:
        """The logits after one more token."""
        ...

    def trace(self, index: int) -> dict[str, Any]:
        """Fields of the `Step` of token number `index`."""
        ...


def generate_answer(
    by: str,
    model: nn.Module,
    tokenizer: Any,
    source: LogitSource,
    layout: Prompt,
    windows: int,
    tell: Tell | None,
    options: dict[str, Any],
) -> Answer:
    """The answer that `generate` makes of a source; `tell` gets each step as it comes."""
    steps: list[Step] = []
    detokenizer = Detokenizer(tokenizer, layout.tail[-1])

    def add(step: Step) -> None:
        steps.append(step)
        if tell is not None:
            tell(step)

    def on_token(token: int) -> None:
        add(Step(token, detokenizer.add(token), **source.trace(len(steps))))

    generate_tokens(model, source, list(layout.tail), on_token, **options)
    if rest := detokenizer.rest():
        add(Step(None, rest))
    return Answer("".join(step.text for step in steps), by, tuple(steps), windows)


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    source: LogitSource,
    prompt: list[int],
    on_token: Callable[[int], None] | None = None,
    **options: Any,
) -> list[int]:
    """The tokens that `generate` makes of a source's logits.

    Args:
        prompt: the last tokens the source has read: what processors see before the answer.
        on_token: called with each token as it comes.
        options: those of `generate`; by default the likeliest token is taken.
    """
    for name, off in ONE_ROW.items():
        if options.get(name, off) not in (off, None):
            raise UserError(
                f"an answer over several windows is one row, token by token, but got {name}="
                f"{shown(options[name])}: leave it out."
            )
    settings = getattr(model, "generation_config", None)
    eos = getattr(settings, "eos_token_id", None)
    pad = getattr(settings, "pad_token_id", None)
    pad = (eos[0] if isinstance(eos, list) else eos) if pad is None else pad
    options = {"do_sample": False, "pad_token_id": pad} | options
    if not options["do_sample"]:  # a checkpoint's own sampling settings would cause warnings
        options = dict.fromkeys(SAMPLING) | options
    streamer = _Streamer(on_token, options.pop("streamer", None))
    device = model.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
    ids = torch.tensor([prompt], device=device)
    shell = _without_cache(model, source, len(prompt))
    out = shell.generate(input_ids=ids, streamer=streamer, use_cache=False, **options)
    out = out if isinstance(out, Tensor) else out.sequences
    return out[0, len(prompt) :].tolist()


def _without_cache(model: Any, source: LogitSource, read: int) -> Any:
    """The model as `generate` sees it: a copy whose forward asks the source."""
    from transformers.modeling_outputs import CausalLMOutput

    logits: Tensor | None = None

    def forward(input_ids: Tensor, return_dict: bool = True) -> Any:
        nonlocal logits, read
        logits = source.first() if logits is None else logits
        for token in input_ids[0, read:].tolist():
            logits, read = source.next(token), read + 1
        return CausalLMOutput(logits=logits[None, None])  # type: ignore[arg-type]

    def prepare(input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    shell = copy.copy(model)
    vars(shell).update(forward=forward, prepare_inputs_for_generation=prepare)
    return shell


class _Streamer:
    """Passes tokens on, one by one, but for the prompt, which `generate` puts first."""

    def __init__(self, on_token: Callable[[int], None] | None, other: Any) -> None:
        self.on_token, self.other, self.started = on_token, other, False

    def put(self, value: Tensor) -> None:
        if self.started and self.on_token is not None:
            for token in value.flatten().tolist():
                self.on_token(token)
        self.started = True
        if self.other is not None:
            self.other.put(value)

    def end(self) -> None:
        if self.other is not None:
            self.other.end()
