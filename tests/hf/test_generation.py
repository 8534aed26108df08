"""Incremental detokenization emits complete characters; chat turns join to the full template."""

from __future__ import annotations

import pytest

from longitude.core.validate import UserError
from longitude.hf.generation import MAX_PENDING, Chat, Detokenizer
from longitude.training.to_hf import byte_tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system\\nBe kind.</s>\\n"
    "{% endif %}<s>{{ m.role }}\\n{{ m.content }}</s>\\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\\n{% endif %}"
)
BRACKETS = (
    "<b>{% for m in messages %}{% if m.role == 'user' %}[I] {{ m.content | trim }} [/I]"
    "{% else %} {{ m.content | trim }}<e>{% endif %}{% endfor %}"
)
ONLY_THE_LAST = "{{ messages[-1].content }}:"


@pytest.mark.parametrize("template", [CHATML, BRACKETS])
def test_chat_join_to_the_whole(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    messages, chat, text = [], Chat(tokenizer), ""
    for said, answer in (("Hello.", "Hi!"), ("How are you?", "Well."), ("Bye", "")):
        text += chat.next(said)
        messages.append({"role": "user", "content": said})
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.replace("] ", "]") == whole.replace("] ", "]")  # who says the space is open
        text += answer
        messages.append({"role": "assistant", "content": answer})


def test_templates_that_cannot_go_on() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="no chat template"):
        Chat(tokenizer)
    tokenizer.chat_template = ONLY_THE_LAST
    chat = Chat(tokenizer)
    assert chat.next("one") == "one:"
    with pytest.raises(UserError, match="leaves out earlier answers"):
        chat.next("two")


def test_letters_come_whole() -> None:
    text = "naïve 漢字 🙂 end"
    detokenizer = Detokenizer(byte_tokenizer())
    pieces = [detokenizer.add(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.rest() == text
    assert [p for p in pieces if p] == list(text)


def test_half_a_letter_is_said_at_the_end_and_no_letter_at_all_soon() -> None:
    detokenizer = Detokenizer(byte_tokenizer())
    assert detokenizer.add("漢".encode()[0]) == ""
    assert detokenizer.rest() == "\ufffd" and detokenizer.rest() == ""
    said = "".join(detokenizer.add(0xFF) for _ in range(3 * MAX_PENDING))
    assert len(said) >= MAX_PENDING


def test_what_came_before_is_not_said_again() -> None:
    detokenizer = Detokenizer(byte_tokenizer(), before=ord("a"))
    assert detokenizer.rest() == ""
    assert detokenizer.add(ord("b")) == "b"
