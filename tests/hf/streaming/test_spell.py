"""Tokens spelled while they come: whole letters only, and all of them."""

from __future__ import annotations

from longitude.hf.generation import MAX_PENDING, Detokenizer
from longitude.hf.tokenizer import byte_tokenizer


def test_letters_come_whole() -> None:
    text = "naïve 漢字 🙂 end"
    speller = Detokenizer(byte_tokenizer())
    pieces = [speller.add(byte) for byte in text.encode()]
    assert "".join(pieces) + speller.rest() == text
    assert [p for p in pieces if p] == list(text)


def test_half_a_letter_is_said_at_the_end_and_no_letter_at_all_soon() -> None:
    speller = Detokenizer(byte_tokenizer())
    assert speller.add("漢".encode()[0]) == ""
    assert speller.rest() == "\ufffd" and speller.rest() == ""
    said = "".join(speller.add(0xFF) for _ in range(3 * MAX_PENDING))
    assert len(said) >= MAX_PENDING


def test_what_came_before_is_not_said_again() -> None:
    speller = Detokenizer(byte_tokenizer(), before=ord("a"))
    assert speller.rest() == ""
    assert speller.add(ord("b")) == "b"
