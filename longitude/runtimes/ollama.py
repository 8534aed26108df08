"""Ollama: a new GGUF file and a Modelfile, whose parameters have had no rotation since 2024.

`num_ctx` is cut at the file's own context_length, which the new file raises.
"""

from __future__ import annotations

from collections.abc import Iterator

from longitude.runtimes.gguf import header_of_gguf as header_of
from longitude.runtimes.gguf_writer import settings
from longitude.runtimes.settings import Model, Spelling
from longitude.runtimes.target import Wanted

TEXT = "FROM ./{file}\nPARAMETER num_ctx {target}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By the keys and tensors of its file."""
    header = header_of("ollama", model)
    held = {**settings(header, w).on(header), "num_ctx": w.target}
    yield Spelling("ollama", version, held, TEXT.replace("{target}", str(w.target)), "Modelfile")
