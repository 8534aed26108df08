"""Every model type that transformers knows, with its encoding; well-known models first.

A type's row is that of the configuration that its class makes by itself. Named models differ from
those in an entry or two, and some are not in transformers at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longitude.fields import Mistake
from longitude.hf.configs.encodings import Encoding, encodings
from longitude.hf.configs.ropes import made
from longitude.hf.loading.hush import hushed


@dataclass(frozen=True)
class Known:
    """A model, or a type of models, and its encodings."""

    name: str
    model_type: str | None
    encodings: tuple[Encoding, ...]
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found = [each.plain() for each in self.encodings]
        return {"name": self.name, "model_type": self.model_type, "encodings": found} | (
            {"note": self.note} if self.note else {}
        )


DEBERTA = {
    "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1, "position_biased_input": False,
}  # fmt: skip
GPT3 = Encoding("learned", scheme="learned(2048)", window=2048, where="Brown et al. 2020")
PALM = Encoding("rope", scheme="rope()", base=10000.0, window=2048, where="Chowdhery et al. 2022")
SEVEN = Encoding("rope", scheme="rope()", base=10000.0, window=4096, where="its remote code")
THIRTEEN = Encoding("alibi", scheme="alibi()", window=4096, where="its remote code")
Row = tuple[str, str | None, dict[str, Any] | Encoding, str]
NAMED: tuple[Row, ...] = (
    ("GPT-2", "gpt2", {}, ""),
    ("GPT-3", None, GPT3, "not in transformers; every other layer attends in sparse bands"),
    ("BERT", "bert", {}, "position_embedding_type is no longer read"),
    ("T5", "t5", {}, "in the first layer alone, for all; scores are not divided by √d"),
    ("XLNet", "xlnet", {}, "Transformer-XL's encoding, read both ways"),
    ("ALBERT", "albert", {}, "the table is as wide as the factored embedding"),
    ("RoBERTa", "roberta", {"max_position_embeddings": 514}, "learned, too; counted from row 2"),
    ("DeBERTa-v3", "deberta-v2", DEBERTA, "the first DeBERTa adds absolute positions at its end"),
    ("PaLM", None, PALM, "not in transformers"),
    ("LLaMA", "llama", {}, ""),
    ("Llama 2", "llama", {"max_position_embeddings": 4096}, "Code Llama's base is 1,000,000"),
    ("Vicuna, Alpaca", "llama", {}, "LLaMA's"),
    ("BLOOM", "bloom", {}, "added after scores are divided by √d"),
    ("ERNIE 3.0", "ernie", {}, "as released; its paper speaks of Transformer-XL"),
    ("Falcon 7B, 40B, 180B", "falcon", {}, "RoPE: ALiBi is Falcon-RW's alone"),
    ("Falcon-RW", "falcon", {"alibi": True}, ""),
    ("BART", "bart", {}, "two rows are left free"),
    ("MPT", "mpt", {}, "transformers reads neither alibi nor alibi_bias_max"),
    ("Baichuan 7B", None, SEVEN, "remote code"),
    ("Baichuan 13B", None, THIRTEEN, "remote code; 40 heads, no power of two"),
)


def known() -> Iterator[Known]:
    """The named models, then every type in transformers' auto mapping."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with hushed(bars=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that contradict each other
        for name, kind, entries, note in NAMED:
            if isinstance(entries, Encoding):
                yield Known(name, kind, (entries,), note)
            elif kind in CONFIG_MAPPING:
                yield _row(name, str(kind), entries, note)
        for kind in CONFIG_MAPPING:
            yield _row(kind, kind, {}, "")


def _row(name: str, kind: str, entries: dict[str, Any], note: str) -> Known:
    try:
        config = made({"model_type": kind, **entries})
    except Mistake:  # it has no defaults that it takes itself
        told = Encoding("unknown", where="its class makes no configuration by itself")
        return Known(name, kind, (told,), note)
    return Known(name, kind, encodings(config), note)
