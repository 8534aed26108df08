"""A chat turn by turn is the template's whole conversation."""

from __future__ import annotations

import pytest

from longitude.core.validate import UserError
from longitude.hf.generation import Chat
from longitude.hf.tokenizer import byte_tokenizer

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
def test_turns_join_to_the_whole(template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    messages, turns, text = [], Chat(tokenizer), ""
    for said, answer in (("Hello.", "Hi!"), ("How are you?", "Well."), ("Bye", "")):
        text += turns.next(said)
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
    turns = Chat(tokenizer)
    assert turns.next("one") == "one:"
    with pytest.raises(UserError, match="leaves out earlier answers"):
        turns.next("two")
