"""Segments: the text to the letter, none too long, cut at sentence ends where it can be."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from longitude.reading.memwalker import segments, sentences, truncate

LETTERS = st.text("ab .!?\n…\"'”)。！？」\u3000\U0001f600é", max_size=200)


@given(LETTERS, st.integers(1, 40))
def test_joined_they_are_the_text_and_none_is_too_long(text: str, most: int) -> None:
    found = segments(text, most, len)
    assert "".join(found) == text
    assert all(1 <= len(part) <= most for part in found)


@given(LETTERS)
def test_sentences_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_they_end_where_sentences_do_and_hold_as_many_as_fit() -> None:
    text = "".join(f"Sentence number {n} is here. " for n in range(100))
    found = segments(text, 200, len)
    assert all(re.fullmatch(r"(Sentence number \d+ is here\. )+", part) for part in found)
    # each is full: its neighbour's first sentence would not have fitted
    for part, then in pairwise(found):
        assert len(part) + then.index(". ") + 2 > 200


def test_quotes_and_scripts_without_spaces_end_sentences() -> None:
    assert [*sentences('He said "no." Then (so it is!) he left.')] == [
        'He said "no." ',
        "Then (so it is!) ",
        "he left.",
    ]
    assert [*sentences("你好。「再见！」走了。")] == ["你好。", "「再见！」", "走了。"]
    assert [*sentences("A title\n\n\nand text")] == ["A title\n\n\n", "and text"]
    assert [*sentences("3.14 and www.a.b stay")] == ["3.14 and www.a.b stay"]


def test_a_long_sentence_is_cut_between_words_and_a_long_word_anywhere() -> None:
    words = " ".join(["word"] * 100)
    assert {part.strip() for p in segments(words, 30, len) for part in p.split()} == {"word"}
    assert [len(part) for part in segments("x" * 100, 30, len)] == [25, 25, 25, 25]
    assert segments("ab", 1, lambda text: 5 * len(text)) == ["a", "b"]  # a letter is the least


def test_a_million_dots_or_lines_take_no_longer_than_a_million_letters() -> None:
    for text in ("." * 10**6, "\n" * 10**6, '.")' * 10**5, " \n" * 10**5, "。" * 10**4):
        assert "".join(sentences(text)) == text  # quadratic time would never end


def test_the_beginning_of_a_text() -> None:
    assert truncate("One two. Three four.", 10, len) == "One two."
    assert truncate("One two. Three four.", 100, len) == "One two. Three four."
    assert truncate("One two.", 0, len) == truncate("", 10, len) == ""
