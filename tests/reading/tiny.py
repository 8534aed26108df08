"""Tiny random models of every kind that reads windows, and the rows they are asked about."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from longitude.reading.generate import Prompt
from tests.hf.families.models import tiny
from tests.hf.tiny import decoder

WIDE = {"max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
}
LAYOUT = Prompt((5, 11, 7), (21, 22, 23, 24))


@cache
def model(kind: str, attention: str | None = None) -> Any:
    """A tiny causal model in float64, built once: a test that changes it takes a copy."""
    if kind in OTHERS:
        made = tiny(kind, "AutoModelForCausalLM", attention, **WIDE, **OTHERS[kind])
    else:
        made = decoder(kind, max_position_embeddings=256)
        made.set_attn_implementation(attention or made.config._attn_implementation)
    return made.double()


def windows(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(30, 97) for _ in range(n)] for n in lengths]
