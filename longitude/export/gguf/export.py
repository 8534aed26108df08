"""Write a GGUF file under another scheme, after a look at what llama.cpp will make of it."""

from __future__ import annotations

from pathlib import Path

from longitude.export.gguf.rewrite import rewrite
from longitude.export.gguf.settings import Settings, settings
from longitude.export.wanted import Wanted
from longitude.hf.loading.gguf import header_of
from longitude.hf.loading.layout import read_layout


def export_gguf(source: Path, target: Path, wanted: Wanted) -> Settings:
    """Copy a GGUF file to `target` with the settings of a scheme; what was written into it."""
    layout = read_layout(source)
    found = settings(header_of(layout), wanted)
    rewrite(layout, target, found.keys, found.tensors)
    return found
