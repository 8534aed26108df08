"""Which position encoding the header of a GGUF file says: its architecture's, or its keys'.

llama.cpp turns nothing in a few architectures (src/llama-model.cpp, llama_model_rope_type); ALiBi's
and T5's have keys of their own. All others turn, scaled as the file's keys and tensors say, in the
words of a config.json (loading/mend.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longitude.hf.configs.encodings import Encoding, read_encodings
from longitude.hf.loading.gguf import Header
from longitude.parts import T5, Alibi, Bidirectional, Learned
from longitude.scheme import Scheme

TABLES = {"gpt2": False, "starcoder": False, "bert": True, "roberta-bert": True}  # both ways?
STILL = ("mamba", "mamba2", "jamba", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "nemotron_h")


def turns(header: Header) -> bool:
    """Whether a file's model turns queries and keys."""
    return _still(header) is None


def of_header(header: Header, config: Mapping[str, Any] | None) -> tuple[Encoding, ...]:
    """The encoding of a GGUF file; `config` is its rotation as a config.json, if it turns."""
    still = _still(header)
    if still is not None or config is None:
        return (still or Encoding("unknown", where="no key of the file"),)
    return tuple(
        replace(
            each,
            where=f"{header.architecture}.rope.* of the file",
            window_from=f"{header.architecture}.context_length",
        )
        for each in read_encodings(config)
    )


def _still(header: Header) -> Encoding | None:
    """The encoding of an architecture that turns nothing; None of others."""
    length, arch = header.own("context_length"), header.architecture
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    size = width // heads if isinstance(heads, int) and heads and width else None
    told = {"window": length, "window_from": f"{arch}.context_length", "head_dim": size}
    told |= {"heads": heads if isinstance(heads, int) else None}
    steep, buckets = (
        header.own("attention.max_alibi_bias"),
        header.own("attention.relative_buckets_count"),
    )
    if steep or arch == "bloom":
        scheme = Scheme.of(Alibi(steepness=float(steep or 8)))
        return Encoding("alibi", scheme=str(scheme), where=f"{arch} of the file", **told)
    if buckets:
        scheme = Scheme.of(T5(int(buckets)))
        return Encoding("t5", scheme=str(scheme), where=f"{arch} of the file", **told)
    if arch in TABLES and length:
        way = (Bidirectional(),) if TABLES[arch] else ()
        scheme = Scheme.of(Learned(int(length)), *way)
        return Encoding("learned", scheme=str(scheme), where=f"{arch} of the file", **told)
    return Encoding("none", where=f"{arch} of the file", **told) if arch in STILL else None
