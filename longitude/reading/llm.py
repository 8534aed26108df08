"""Who answers MemWalker: anything that says something to a prompt. A checkpoint on this machine.

The other kind is a server (server.py). Both are asked in plain text, at temperature 0.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.eval.prefill import greedy, input_device
from longitude.hf.generation import Chat
from longitude.hf.loading import digest
from longitude.hf.patch import scheme_of, trained_length
from longitude.reading.prompt import MARK, spelled
from longitude.reading.prompt import prompt as layout

WINDOW = 4096  # the paper's, for what does not say its own


@runtime_checkable
class Speaker(Protocol):
    """What MemWalker needs of a model."""

    window: int  # tokens of a prompt and its reply together, a chat's own marks aside
    at_once: int  # prompts that may be asked at the same time
    fingerprint: str  # of the model: what it said is kept under it

    def size(self, text: str) -> int:
        """How many tokens a text has, or a few more."""
        ...

    def say(self, prompt: str, new: int) -> str:
        """The reply to a prompt, of `new` tokens at most."""
        ...


class Local:
    """A checkpoint that `longitude.hf.loading` gave, with its tokenizer."""

    at_once = 1

    def __init__(self, model: nn.Module, tokenizer: Any, window: int | None = None) -> None:
        if tokenizer is None:
            raise UserError("the checkpoint has no tokenizer, so it can't read text: use another.")
        self.model, self.tokenizer = model, tokenizer
        self.fingerprint = f"{digest(model)} {_scheme(model)}".rstrip()
        self._before, self._after = _around(tokenizer)
        whole = window or trained_length(model) or WINDOW
        self.window = whole - len(self._before) - len(self._after)

    def size(self, text: str) -> int:
        """How many tokens a text has."""
        return len(spelled(self.tokenizer, text))

    def say(self, prompt: str, new: int) -> str:
        """The likeliest reply."""
        own = spelled(self.tokenizer, prompt)
        if len(own) + new > self.window:
            raise UserError(
                f"a prompt of {len(own)} tokens and a reply of {new} don't fit the {self.window} "
                f"that the model has for them: use one with a longer window."
            )
        ids = [*self._before, *own, *self._after]
        reply = greedy(self.model, torch.tensor(ids, device=input_device(self.model)), new)
        return self.tokenizer.decode(reply, skip_special_tokens=True).strip()


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and behind a prompt: a chat's marks where there is a template. They are
    made apart from it, because a mark inside a document is text."""
    if not getattr(tokenizer, "chat_template", None):
        return layout(tokenizer, MARK).head, tuple(spelled(tokenizer, "\n"))
    before, _, after = Chat(tokenizer).next(MARK).partition(MARK)
    marks = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
    first, last = map(tuple, marks)
    return first, last


def _scheme(model: nn.Module) -> str:
    """The positions that a model reads with; nothing where they can't be told."""
    try:
        return dump(scheme_of(model))
    except UserError:
        return ""


def said_to(speaker: Speaker, prompts: Sequence[str], new: int) -> Iterator[tuple[int, str]]:
    """The reply to every prompt with the prompt's place, as they come; no more are asked at once
    than the speaker takes. The first error ends it."""
    if speaker.at_once == 1:
        yield from ((place, speaker.say(prompt, new)) for place, prompt in enumerate(prompts))
        return
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    replies: queue.SimpleQueue[tuple[int, str | BaseException]] = queue.SimpleQueue()
    over = threading.Event()

    def work() -> None:
        with suppress(queue.Empty):
            while not over.is_set():
                place = waiting.get_nowait()
                replies.put((place, _said_or_error(speaker, prompts[place], new)))

    for place in range(len(prompts)):
        waiting.put(place)
    for _ in range(min(speaker.at_once, len(prompts))):
        # daemons: Ctrl-C need not wait for a slow reply
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in prompts:
            place, reply = replies.get()
            if isinstance(reply, BaseException):
                raise reply
            yield place, reply
    finally:
        over.set()


def _said_or_error(speaker: Speaker, prompt: str, new: int) -> str | BaseException:
    try:
        return speaker.say(prompt, new)
    except BaseException as error:  # raised where the replies are waited for
        return error
