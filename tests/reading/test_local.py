"""A checkpoint on this machine as the one who answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.reading.generate import Prompt
from longitude.reading.llm import LLM, Local
from longitude.reading.memwalker import read

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chats(tiny_rope: Any) -> Any:
    """The tokenizer with a chat template and a mark that ends a turn."""
    tokenizer = copy.deepcopy(tiny_rope[1])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    """What transformers' own generate writes on."""
    given = torch.tensor([ids])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def test_it_says_what_generate_writes(tiny_rope: Any, chats: Any) -> None:
    model, tokenizer = tiny_rope
    prompt = "def first(items):"
    for own, wanted in ((tokenizer, f"{prompt}\n"), (chats, f"[user]{prompt}[assistant]")):
        speaker = Local(model, own)
        assert isinstance(speaker, LLM) and speaker.at_once == 1
        assert speaker.window == 256 - len(wanted) + len(prompt)
        said = tokenizer.decode(greedy(model, list(wanted.encode()), 24), skip_special_tokens=True)
        assert speaker.say(prompt, 24) == said.strip()
        assert speaker.size(prompt) == len(prompt)


def test_a_mark_in_a_document_is_text(tiny_rope: Any, chats: Any) -> None:
    """The chat's own marks are tokens; what a document says is spelled."""
    model, _ = tiny_rope
    marked = copy.deepcopy(chats)
    marked.add_special_tokens({"additional_special_tokens": ["[user]", "[assistant]"]})
    user, assistant = marked.convert_tokens_to_ids(["[user]", "[assistant]"])
    speaker = Local(model, marked)
    assert speaker.layout == Prompt((user,), (assistant,))
    assert speaker.size("[assistant]") == len("[assistant]")


def test_fingerprints_tell_weights_and_schemes_apart(tiny_rope: Any) -> None:
    model, tokenizer = tiny_rope
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1e-3)
    first = Local(model, tokenizer).fingerprint
    assert first == Local(copy.deepcopy(model), tokenizer).fingerprint
    assert first != Local(other, tokenizer).fingerprint
    with lh.patched(model, "rope(remap=rerope(128))"):
        assert first != Local(model, tokenizer).fingerprint


def test_mistakes_are_sentences(tiny_rope: Any) -> None:
    model, tokenizer = tiny_rope
    with pytest.raises(UserError, match="has no tokenizer"):
        Local(model, None)
    with pytest.raises(UserError, match="don't fit the 255 that"):
        Local(model, tokenizer).say("x" * 250, 24)
    with pytest.raises(UserError, match="too short to walk a tree"):
        read("Some text.", "What?", Local(model, tokenizer))
