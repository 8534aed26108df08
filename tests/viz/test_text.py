"""Texts from outside mean nothing in Markdown."""

from __future__ import annotations

from longitude.viz.text import escaped, fenced, markdown_table


def test_signs_are_escaped() -> None:
    assert escaped("a_b*<i>|![x](y)") == r"a\_b\*\<i\>\|\!\[x\](y)"


def test_a_code_span_has_more_backticks_than_its_text() -> None:
    assert fenced("a|b") == r"`a\|b`" and fenced("a``b") == "``` a``b ```"


def test_a_table_lines_its_numbers_up_on_the_right() -> None:
    assert markdown_table(["m", "n"], [["a", "1"]]) == "| m | n |\n| --- | --: |\n| a | 1 |\n"
