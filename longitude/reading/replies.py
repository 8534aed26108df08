"""What MemWalker asks (prompts.toml, filled in), and how a reply is read (`Action: 2`).

A reply reasons first and then names a number. What can't be read, or names a number that was not
offered, is asked for again, and after three of them there is no answer (Chen et al. 2023).
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 3
ANSWER, REVERT = -2, -1  # actions that are no child's number
# **Action:** 1 or Action: (1) or Action = −1: models write it in many ways
ACTION = re.compile(r"\baction\b[\s*_`]*[:=][\s*_`(\[]*([-−–]?\d{1,9})(?!\d)", re.IGNORECASE)
REASONING = re.compile(r"\A.*?\breasoning\b[\s*_`]*[:=][\s*_]*", re.IGNORECASE | re.DOTALL)
SAID = re.compile(r"\banswer\b[\s*_`]*[:=][\s*_]*(.*)", re.IGNORECASE | re.DOTALL)
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Reply:
    """A reply that could be read. `answer` is empty unless the action is to answer."""

    reasoning: str
    action: int
    answer: str = ""


@functools.cache
def templates() -> dict[str, str]:
    """The prompts of prompts.toml by their names."""
    text = Path(__file__).with_name("prompts.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def prompt(name: str, **values: str) -> str:
    """A prompt with its slots filled; a slot's name inside a value stays as it is."""
    return SLOT.sub(lambda slot: values.get(slot[1], ""), templates()[name])


def numbered(summaries: Sequence[str]) -> str:
    """Summaries under the numbers by which they are chosen."""
    return "\n\n".join(f"Summary {number}: {text}" for number, text in enumerate(summaries))


def read_reply(text: str, actions: Sequence[int]) -> Reply | None:
    """What a reply says, if it names one of these actions; its last word counts. Without an answer
    to give, there is none."""
    named = [*ACTION.finditer(text)]
    if not named:
        return None
    last = named[-1]
    action = int(re.sub("[−–]", "-", last[1]))
    said = SAID.search(text, last.end()) if action == ANSWER else None
    answer = said[1].strip() if said else ""
    if action not in actions or (action == ANSWER and not answer):
        return None
    return Reply(REASONING.sub("", text[: last.start()]).strip(" \n*_#`"), action, answer)
