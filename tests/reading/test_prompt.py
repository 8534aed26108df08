"""What stands around a window: a template's words or a line; and no special token of the text's."""

from __future__ import annotations

import pytest

from longitude.core.validate import UserError
from longitude.reading.generate import Prompt, encode, encode_windows, prompt
from longitude.training.to_hf import byte_tokenizer

TEMPLATE = (
    "{{ bos_token }}[system] be short{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def text(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids))


def test_a_base_model_writes_on_from_the_question() -> None:
    made = prompt(byte_tokenizer(), "What is it? It is")
    assert made == Prompt((), tuple(b"\nWhat is it? It is"))
    assert made.row(b"some text") == list(b"some text\nWhat is it? It is")


def test_a_chat_model_has_the_window_and_the_question_in_one_turn() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    made = prompt(tokenizer, "What is it?")
    assert text(tokenizer, made.head) == "\0[system] be short[user] "
    assert text(tokenizer, made.tail) == "\n\nWhat is it?[assistant] "
    assert prompt(tokenizer, "What is it?", chat=False).head == ()
    tokenizer.chat_template = "nothing"
    with pytest.raises(UserError, match="leaves out what the user says"):
        prompt(tokenizer, "What is it?")


def test_a_text_has_no_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert encode(tokenizer, "an <end> of it") == list(b"an <end> of it")
    assert len(tokenizer("an <end> of it")["input_ids"]) == 10


def test_what_can_not_be_asked() -> None:
    with pytest.raises(UserError, match="a question has words"):
        prompt(byte_tokenizer(), " \n")
    with pytest.raises(UserError, match="no chat template"):
        prompt(byte_tokenizer(), "why?", chat=True)
    layout = Prompt((1,), (2, 3))
    for trained in (18, None):
        assert encode_windows(byte_tokenizer(), ["ten bytes!"], layout, 5, trained)
    with pytest.raises(UserError, match="use windows of 9 tokens at most"):
        encode_windows(byte_tokenizer(), ["ten bytes!"], layout, 5, 17)
