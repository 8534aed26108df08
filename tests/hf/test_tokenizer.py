"""Token ids are bytes, whatever the text, and stock transformers loads the tokenizer."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longitude.training.to_hf import byte_tokenizer

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200)
AWKWARD = [
    "",
    " ",
    "  a  .  b ,c ",
    "Ā",
    "Ġ Ċ ā",
    "é\u0301 \u00a0\u200b",
    "\r\n\t",
    "<s></s>",
    "日本𝄞",
]


@pytest.fixture(scope="module", params=["made", "loaded"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    made = byte_tokenizer(256)
    if request.param == "made":
        return made
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_ids_are_bytes_and_come_back(tokenizer: PreTrainedTokenizerFast) -> None:
    @settings(max_examples=200, deadline=None, database=None)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = list(text.encode())
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text

    for text in AWKWARD:
        check = example(text)(check)
    check()


def test_every_byte_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 256
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    # every byte that UTF-8 has, but for those that start letters of four
    letters = "".join(chr(c) for c in range(1, 0x10000) if not 0xD800 <= c < 0xE000)
    assert tokenizer.encode(letters, truncation=False) == list(letters.encode())


def test_byte_0_ends_and_pads(tokenizer: PreTrainedTokenizerFast) -> None:
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (0, 0, 0)
    assert tokenizer.encode("a\0b") == [97, 0, 98]
    assert tokenizer.decode([97, 0, 98]) == "a\0b"
    assert tokenizer.decode([97, 0, 98], skip_special_tokens=True) == "ab"
    both = tokenizer(["abc", "a"], padding=True)
    assert both["input_ids"] == [[97, 98, 99], [97, 0, 0]]
    assert both["attention_mask"] == [[1, 1, 1], [1, 0, 0]]


def test_it_knows_the_window(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.model_max_length == 256
    assert tokenizer("a" * 300, truncation=True)["input_ids"] == [97] * 256
    assert byte_tokenizer().model_max_length > 10**9
