"""A checkpoint that is to read: how much text its window holds, and which way suits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.cli.output import say
from longitude.core.validate import UserError, shown
from longitude.reading.chunks import Count
from longitude.reading.options import Asked
from longitude.reading.select import AUTO, Case, Choice, choose, extension_for

if TYPE_CHECKING:
    from longitude.reading.prior_runs import Extension

EXACT, SAMPLES = 2**20, 16  # characters that are counted token by token, and samples of more
LARGE = 1024  # tokens of a window where naive Bayes has the choice
LEAST = 16  # tokens of a window that says something
MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, and how many tokens its prompts take."""

    model: Any
    tokenizer: Any
    around: int
    trained: int | None

    def count(self, text: str) -> int:
        from longitude.reading.prompt import spelled

        return len(spelled(self.tokenizer, text))

    @property
    def chats(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


def load_reader(asked: Asked) -> Loaded:
    from longitude.hf.loading import load
    from longitude.hf.patch import trained_length
    from longitude.reading.prompt import prompt

    if asked.model is None and not asked.silent:
        say(f"{asked.name} comes along, and knows passkeys but little else: name another --model.")
    model, tokenizer = load(asked.name, quiet=asked.silent, **asked.load)
    if tokenizer is None:
        raise UserError(f"{asked.name} has no tokenizer, so it can't read text: give one that has.")
    causal = not getattr(model.config, "is_encoder_decoder", False)
    if not causal or model.get_output_embeddings() is None:
        raise UserError(
            f"{shown(asked.name)} is no causal language model ({type(model).__name__}), so it "
            f"can't answer: give one that writes."
        )
    around = prompt(tokenizer, asked.question).around
    return Loaded(model, tokenizer, around, trained_length(model))


def window(asked: Asked, loaded: Loaded) -> int:
    """Tokens of text that stand beside the question and the answer; raises where none can."""
    if loaded.trained is None:
        return asked.window or LARGE
    room = loaded.trained - loaded.around - asked.max_tokens
    if room < LEAST:
        raise UserError(
            f"the question takes {loaded.around} tokens and the answer {asked.max_tokens}, which "
            f"leaves no room for text in the model's window of {loaded.trained:,}: ask a shorter "
            f"one, or lower --max-tokens."
        )
    if asked.window is not None and asked.window > room:
        raise UserError(
            f"a window of {asked.window:,} tokens with the question ({loaded.around}) and the "
            f"answer ({asked.max_tokens}) is more than the {loaded.trained:,} the model was "
            f"trained on: give --window {room} at most."
        )
    return asked.window or room


def chosen(asked: Asked, loaded: Loaded, tokens: int, full: int) -> Choice:
    """The way that was asked for, or the one that suits."""
    if asked.by not in (AUTO, "extend"):
        return Choice(asked.by, "")
    need = tokens + loaded.around + asked.max_tokens
    windows = -(-tokens // full)
    case = Case(need, asked.max_tokens, windows, loaded.trained, loaded.chats)
    if loaded.trained is not None and need > loaded.trained:
        case = replace(case, extensions=_extensions(asked, loaded))
    if asked.by == AUTO or need <= (loaded.trained or 0):
        return choose(case)
    return Choice("extend", "", extension_for(case, asked.name))


def _extensions(asked: Asked, loaded: Loaded) -> list[Extension]:
    from longitude.extension.prepare import subject
    from longitude.reading.prior_runs import extensions

    return extensions(asked.runs, subject(loaded.model, asked.name, asked.load["revision"]))


def tokens_of(text: str, count: Count) -> int:
    """How many tokens a text has; of a very long one about how many, by its parts."""
    if len(text) <= EXACT:
        return count(text)
    every = range(0, len(text), len(text) // SAMPLES)
    parts = [text[at : at + EXACT // SAMPLES] for at in every]
    return round(sum(map(count, parts)) / sum(map(len, parts)) * len(text))


def room(loaded: Loaded) -> int | None:
    """Bytes for caches: most of what is free, where that can be told."""
    import torch

    place = loaded.model.get_input_embeddings().weight.device
    if place.type == "cuda":
        free = torch.cuda.mem_get_info(place)[0]
    elif place.type == "cpu" and MEMORY.is_file():
        told = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        free = int(told.get("MemAvailable", "0 kB").split()[0]) * 1024
    else:
        free = 0
    return free * 3 // 4 or None
