"""From a prompt to an answer: the prompt's layout, the generation loop, and the trace.

Every row is `head + window + tail`, and the row without context `head + tail`: all windows share
the head, and NBCE's empty row still holds the question. A chat model gets the window, an empty line
and the question as one user turn of the tokenizer's template; the tail ends where the assistant's
turn begins. A base model continues the window, a line break and the question, which is the form of
the passkey task that the bundled tiny models were trained on. Special tokens in a text are text.

Tokens come from transformers' `generate`, so that sampling, logits processors, stopping criteria
and streamers work as usual. It gets a shallow copy of the model, used without a cache, whose
forward calls a `Source`, which runs several forward passes with caches of their own. Beam search,
several sequences and assistant models would need as many caches and are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError, shown
from longitude.eval.documents import token_ids
from longitude.eval.prefill import input_device
from longitude.hf.generation import Detokenizer
from longitude.hf.patch import patched, trained_length
from longitude.reading.forward import Rows

PLACEHOLDER = "LONGITUDE-WINDOW"  # stands for the window in a chat template
SAMPLING = ("temperature", "top_p", "top_k")
# off values for options of `generate` that need several rows, or more than the last logits
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
        return [*self.head, *window, *self.tail]

    @property
    def size(self) -> int:
        """The number of tokens around the window."""
        return len(self.head) + len(self.tail)


def prompt(tokenizer: Any, question: str | None, *, chat: bool | None = None) -> Prompt:
    """Return the layout for a question, or with None for a window that is the full prompt. By
    default, the chat template is used if there is one."""
    if question is not None and not question.strip():
        raise UserError(f"a question has words in it, but got {shown(question)}: ask something.")
    template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not template:
        raise UserError("the checkpoint's tokenizer has no chat template: leave chat out.")
    if not template or chat is False:
        bos = tokenizer.bos_token_id
        adds_bos = tokenizer("a", verbose=False)["input_ids"][:1] == [bos]
        tail = token_ids(tokenizer, f"\n{question or ''}")
        return Prompt((bos,) if adds_bos else (), tuple(tail))
    content = PLACEHOLDER if question is None else f"{PLACEHOLDER}\n\n{question}"
    turn = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, placeholder, after = text.partition(PLACEHOLDER)
    if not placeholder:
        raise UserError(
            "the checkpoint's chat template leaves out what the user says: set chat=False."
        )
    return Prompt(*(tuple(token_ids(tokenizer, part)) for part in (before, after)))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text; special tokens in it are treated as text."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(text, **options)["input_ids"]


def encode_windows(
    tokenizer: Any, windows: Sequence[str], layout: Prompt, new: int, trained: int | None
) -> list[list[int]]:
    """Tokenize every window; raises if one is empty, or too long for the trained length together
    with question and answer."""
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
    """One token of an answer; the joined texts of all steps are the answer. `text` is empty while a
    character is incomplete; once its last token is generated, `text` has the full character."""

    token: int | None  # None for text left over after the last token
    text: str
    window: int | None = None  # index of the window that the token came from, if any
    entropy: float | None = None  # NBCE: of the chosen window, in nats
    entropies: tuple[float, ...] = ()  # NBCE: of every window
    mass: tuple[float, ...] = ()  # parallel windows: each window's share of attention

    def plain(self) -> dict[str, Any]:
        """For JSON, without fields that the method does not have."""
        data = {"token": self.token, "text": self.text, "window": self.window}
        if self.entropy is not None:
            data |= {"entropy": self.entropy, "entropies": list(self.entropies)}
        return data | ({"mass": list(self.mass)} if self.mass else {})


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


Tell = Callable[[Step], None]  # called with each step as soon as it is generated
# returns the logits (v) after the prompt (None) or after one more token, and their trace: fields of
# the `Step` of the token that is chosen by them
Source = Callable[[int | None], tuple[Tensor, dict[str, Any]]]


def answer_by(
    by: str,
    build: Callable[[Prompt, list[list[int]]], Source],
    model: Any,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    chat: bool | None = None,
    tell: Tell = lambda step: None,
    max_new_tokens: int = 64,
    inside_window: bool = True,
    **options: Any,
) -> Answer:
    """Answer with the source that `build` returns for a layout and the windows' tokens; each window
    must fit the model's if `inside_window`. `chat` uses the tokenizer's template (by default if
    there is one), `tell` is called with each step, and options are those of transformers'
    `generate`: do_sample, temperature, stopping_criteria, …."""
    layout = prompt(tokenizer, question, chat=chat)
    trained = trained_length(model) if inside_window else None
    ids = encode_windows(tokenizer, windows, layout, max_new_tokens, trained)
    source, detokenizer = build(layout, ids), Detokenizer(tokenizer, layout.tail[-1])
    steps: list[Step] = []

    def add(step: Step) -> None:
        steps.append(step)
        tell(step)

    def on_token(token: int, trace: dict[str, Any]) -> None:
        add(Step(token, detokenizer.add(token), **trace))

    options |= {"max_new_tokens": max_new_tokens}
    generate_tokens(model, source, layout.tail, on_token, **options)
    if rest := detokenizer.rest():
        add(Step(None, rest))
    return Answer("".join(step.text for step in steps), by, tuple(steps), len(ids))


@torch.no_grad()
def generate_tokens(
    model: Any,
    source: Source,
    tail: Sequence[int],
    on_token: Callable[[int, dict[str, Any]], None] = lambda token, trace: None,
    **options: Any,
) -> list[int]:
    """Return the tokens that `generate` chooses by a source's logits; `on_token` gets each one and
    its trace. `tail` are the prompt's last tokens, which logits processors see before the answer.
    By default, decoding is greedy."""
    from transformers.modeling_outputs import CausalLMOutput

    for name, off in ONE_ROW.items():
        if options.get(name, off) not in (off, None):
            raise UserError(
                f"an answer over several windows is one row, token by token, but got {name}="
                f"{shown(options[name])}: leave it out."
            )
    eos, pad = (getattr(model.generation_config, f"{n}_token_id", None) for n in ("eos", "pad"))
    pad = (eos[0] if isinstance(eos, list) else eos) if pad is None else pad
    options = {"do_sample": False, "pad_token_id": pad} | options
    if not options["do_sample"]:  # a checkpoint's own sampling settings would cause warnings
        options = dict.fromkeys(SAMPLING) | options
    trace: dict[str, Any] = {}

    def forward(input_ids: Tensor, return_dict: bool = True) -> Any:
        nonlocal trace
        begun = input_ids.shape[1] > len(tail)
        logits, trace = source(int(input_ids[0, -1]) if begun else None)
        return CausalLMOutput(logits=logits[None, None])  # type: ignore[arg-type]

    def prepare(input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def pass_on(input_ids: Tensor, *_: Any, **__: Any) -> bool:  # called after every token
        on_token(int(input_ids[0, -1]), trace)
        return False

    model_copy = copy.copy(model)
    vars(model_copy).update(forward=forward, prepare_inputs_for_generation=prepare)
    vars(model_copy).pop("generate", None)  # a patched model's is bound to the original
    options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), pass_on]
    ids = torch.tensor([tail], device=input_device(model))
    out = model_copy.generate(input_ids=ids, use_cache=False, **options)
    out = out if isinstance(out, Tensor) else out.sequences
    return out[0, len(tail) :].tolist()


def answer_in_one_row(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    question: str,
    scheme: str | None = None,
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """Answer from the full text in one row, under a scheme that was measured at its length or,
    without one, by the unmodified model; other options are those of `answer_by`."""

    def build(layout: Prompt, ids: list[list[int]]) -> Source:
        row = layout.row(ids[0])
        if scheme is not None:
            # length-dependent parts are fixed before the first token, as `generate` does
            stack.enter_context(patched(model, scheme, length=len(row) + max_new_tokens))
        rows = Rows(model, [row])
        return lambda token: (rows(token)[0], {})

    options |= {"max_new_tokens": max_new_tokens, "inside_window": False}
    with ExitStack() as stack:
        return answer_by("extend", build, model, tokenizer, [text], question, **options)
