"""Write a GGUF file under another scheme, after a look at what llama.cpp will make of it.

GGUF: a new file, whose keys and rotary tensors say the scheme (`longitude.export.gguf`).

The server cuts each request at the file's `context_length`, which is raised with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from longitude.core.validate import UserError, shown
from longitude.hf.gguf_reader import Header, header_of, read_layout
from longitude.runtimes.gguf_writer import Settings, rewrite, settings
from longitude.runtimes.settings import Model, Spelling, called
from longitude.runtimes.target import Wanted


def export_gguf(source: Path, target: Path, wanted: Wanted) -> Settings:
    """Copy a GGUF file to `target` with the settings of a scheme; what was written into it."""
    layout = read_layout(source)
    found = settings(header_of(layout), wanted)
    rewrite(layout, target, found.keys, found.tensors)
    return found


TEXT = "llama-server -m {file} -c {target}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By the keys and tensors of a new file."""
    header = header_of_gguf("gguf", model)
    held = {**settings(header, w).on(header), "-c": w.target}
    yield Spelling("gguf", version, held, TEXT.replace("{target}", str(w.target)), "gguf.sh")


def header_of_gguf(runtime: str, model: Model) -> Header:
    """The header of the model's file; raises unless it is a GGUF file."""
    if model.header is None:
        raise UserError(
            f"{called(runtime)} serves a GGUF file, but got {shown(model.name)}: give one, or make "
            f"one with llama.cpp's convert_hf_to_gguf.py."
        )
    return model.header
