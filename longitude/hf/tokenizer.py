"""A tokenizer whose token ids are the bytes of the text: no vocabulary, no merges, no training.

Byte-level BPE (Radford et al. 2019, GPT-2) writes each byte as one printable letter; without merges
every letter stays a token, and here its id is the byte. Byte 0 ends a document and pads. It is
written as itself and not as its letter Ā: as a special token that letter would be cut out of real
text before it is turned into bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "\0"


def byte_tokenizer(window: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer; `window` is the length past which it says that a text is long."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # printable bytes are their own letter, the others in turn take those from U+0100 on
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    vocabulary = {END if byte == 0 else letter: byte for letter, byte in letters.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=window,
    )
