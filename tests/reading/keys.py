"""A passkey's text cut into windows that each fit a model's own, question and answer included."""

from __future__ import annotations

from typing import Any

from longitude.eval.tasks.passkey import QUESTION, Passkey, passkey, retrieved

TRAINED = 256  # bytes: the bundled models' window
NEW = 7  # bytes of an answer: a space, five digits, a full stop
ASKED = len(f"\n{QUESTION}")
WINDOW = TRAINED - ASKED - NEW
OVERLAP = 70  # more than the sentences with the key take, so that one window has all of them


def cut(windows: int, seed: int) -> tuple[Passkey, list[str]]:
    """A key and the windows of its text; the last one is shorter by as many bytes as the key has
    digits, or one less."""
    step = WINDOW - OVERLAP
    length = windows * step + OVERLAP + ASKED + len(" 1")
    asked = passkey(length, rng=seed, form="short")
    text = text_of(asked)
    return asked, [text[first : first + WINDOW] for first in range(0, len(text) - OVERLAP, step)]


def text_of(asked: Passkey) -> str:
    """All but the question."""
    return asked.prompt[:-ASKED]


def share_found(answer: Any, tiny_rope: Any, windows: int, seeds: range) -> float:
    """How often a way of answering finds the key of texts cut into so many windows."""
    model, tokenizer = tiny_rope
    found = []
    for seed in seeds:
        asked, texts = cut(windows, seed)
        made = answer(model, tokenizer, texts, QUESTION, max_new_tokens=NEW)
        found.append(retrieved(asked, made.text))
    return sum(found) / len(found)
