"""The models that MemWalker can prompt: a checkpoint on this machine, or one behind a server.

Both are prompted in plain text at temperature 0; a server through `core/client.py`.
"""

from __future__ import annotations

import re
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from longitude.core.client import Client, Retry
from longitude.core.store import address
from longitude.core.text import dump
from longitude.core.validate import UserError, shown
from longitude.eval.prefill import greedy, input_device
from longitude.hf.loading import digest
from longitude.hf.patch import scheme_of, trained_length
from longitude.reading.generate import encode
from longitude.reading.generate import prompt as prompt_layout

WINDOW = 4096  # the paper's, for a model that states none
MODEL_FACTS = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # from llama.cpp
THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@runtime_checkable
class LLM(Protocol):
    """The interface that MemWalker needs of a model."""

    window: int  # tokens of a prompt and its reply together, without a chat template's
    at_once: int  # prompts that may be sent concurrently
    fingerprint: str  # identifies the model; its replies are stored under it

    def size(self, text: str) -> int:
        """Return the number of tokens of a text, or an upper bound."""
        ...

    def say(self, prompt: str, new: int) -> str:
        """Return the reply to a prompt, of at most `new` tokens."""
        ...


class Local:
    """A checkpoint that `longitude.hf.load` loaded, with its tokenizer."""

    at_once = 1

    def __init__(self, model: nn.Module, tokenizer: Any, window: int | None = None) -> None:
        if tokenizer is None:
            raise UserError("the checkpoint has no tokenizer, so it can't read text: use another.")
        self.model, self.tokenizer = model, tokenizer
        try:
            scheme = dump(scheme_of(model))
        except UserError:
            scheme = ""
        self.fingerprint = f"{digest(model)} {scheme}".rstrip()
        # the chat template is tokenized separately: special tokens in a document remain text
        self.layout = prompt_layout(tokenizer, None)
        self.window = (window or trained_length(model) or WINDOW) - self.layout.size

    def size(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(encode(self.tokenizer, text))

    def say(self, prompt: str, new: int) -> str:
        """Return the reply by greedy decoding."""
        ids = encode(self.tokenizer, prompt)
        if len(ids) + new > self.window:
            raise UserError(
                f"a prompt of {len(ids)} tokens and a reply of {new} don't fit the {self.window} "
                f"that the model has for them: use one with a longer window."
            )
        row = torch.tensor(self.layout.row(ids), device=input_device(self.model))
        reply = greedy(self.model, row, new)
        return self.tokenizer.decode(reply, skip_special_tokens=True).strip()


# a server


class Server(Client):
    """A model behind a server, by the URL of its API (`core/client.py`); `window` counts the tokens
    of a prompt and its reply, by default what the server reports, or 4,096."""

    def __init__(
        self,
        url: str,
        *,
        window: int | None = None,
        at_once: int = 8,
        timeout: float = 600.0,
        key: str | None = None,
        retry: Retry | None = None,
    ) -> None:
        if at_once < 1:
            raise UserError(f"at_once is 1 request or more, but got {at_once}: use 8.")
        super().__init__(url, timeout=timeout, key=key, retry=retry)
        self.at_once, self.thinks, facts = at_once, False, self.facts

        def positive(given: dict[str, Any], name: str) -> int | None:
            value = given.get(name)
            return value if type(value) is int and value > 0 else None

        self.window = window or positive(facts, "max_model_len") or WINDOW
        meta, details = facts.get("meta"), {"root": str(facts.get("root"))}
        if isinstance(meta, dict):
            details |= {name: positive(meta, name) for name in MODEL_FACTS}
        self.fingerprint = address({"url": self.url, "model": self.name, "meta": details})

    def size(self, text: str) -> int:
        """Return an upper bound on a text's tokens: one per 3 bytes, where most have 4 or 5."""
        return (len(text.encode(errors="replace")) + 2) // 3

    def say(self, prompt: str, new: int) -> str:
        """Return the likeliest reply without the model's reasoning. A model that spends all tokens
        on reasoning and leaves none for its reply gets the rest of the window from then on."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max(new, self.window - self.size(prompt)) if self.thinks else new,
            "temperature": 0,
        }
        reply = self.post("/chat/completions", body)
        try:
            message = reply["choices"][0]["message"]
            content = message["content"] or ""
        except (KeyError, IndexError, TypeError):
            message, content = {}, None
        if not isinstance(content, str):
            raise UserError(f"{self.url} replied with {shown(reply)}: give a chat-completions API.")
        text = THINKING.sub("", content).strip()
        thought = message.get("reasoning_content") or message.get("reasoning")
        if text or self.thinks or not (thought or THINKING.search(content)):
            return text
        self.thinks = True
        return self.say(prompt, new)
