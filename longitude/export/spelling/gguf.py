"""GGUF: a new file, whose keys and rotary tensors say the scheme (`longitude.export.gguf`).

The server cuts each request at the file's `context_length`, which is raised with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from longitude.export.gguf.settings import settings
from longitude.export.spelling.value import Model, Spelling
from longitude.export.spelling.versions import called
from longitude.export.wanted import Wanted
from longitude.fields import Mistake, shown
from longitude.hf.loading.gguf import Header

TEXT = "llama-server -m {file} -c {target}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By the keys and tensors of a new file."""
    header = header_of("gguf", model)
    held = {**settings(header, w).on(header), "-c": w.target}
    yield Spelling("gguf", version, held, TEXT.replace("{target}", str(w.target)), "gguf.sh")


def header_of(runtime: str, model: Model) -> Header:
    """The header of the model's file; raises unless it is a GGUF file."""
    if model.header is None:
        raise Mistake(
            f"{called(runtime)} serves a GGUF file, but got {shown(model.name)}: give one, or make "
            f"one with llama.cpp's convert_hf_to_gguf.py."
        )
    return model.header
