"""A GGUF file's header as a config.json would say it, as far as positions go.

transformers takes seconds to make a configuration of a GGUF file, for it reads the vocabulary; what
there is to know of its rotation stands in a few keys. Keys: llama.cpp, src/llama-arch.cpp.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from longitude.fields import Mistake
from longitude.hf.loading.gguf import Header
from longitude.hf.loading.mend import mend

BASE = 10000.0  # llama.cpp's own, where a file names none
KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}


def config_of(header: Header) -> dict[str, Any]:
    """What a config.json of the same model says of its size, its length and its rotation."""
    sizes = {name: header.own(key) for name, key in KEYS.items()}
    for name, key in KEYS.items():
        if isinstance(sizes[name], list):  # a number of heads for each layer
            sizes[name] = max(sizes[name])
        if not isinstance(sizes[name], int):
            raise Mistake(f"{header.path} does not say its {key}: convert the model again.")
    head = header.own("attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    window = header.own("attention.sliding_window")
    plain = {"rope_type": "default", "rope_theta": header.own("rope.freq_base", BASE)}
    found = SimpleNamespace(**sizes, head_dim=head, sliding_window=window, rope_parameters=plain)
    mend(found, header)
    return {"model_type": header.architecture, **vars(found)}
