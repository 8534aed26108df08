"""The header of a GGUF file: its keys, and the tensors that belong to its rotation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.fields import Mistake
from longitude.hf.loading.layout import FLOAT32, Layout, read_layout

ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Header:
    """The keys of a GGUF file, arrays of strings as their length, and its rotary tensors."""

    path: Path
    keys: dict[str, Any]
    divisors: dict[str, tuple[float, ...]]

    @property
    def architecture(self) -> str:
        """llama.cpp's name for it."""
        return self.keys["general.architecture"]

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the architecture's own, as in `llama.rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{key}", default)

    def scaling(self) -> dict[str, Any]:
        """The keys under `rope.scaling.`, without the prefix."""
        prefix = f"{self.architecture}.rope.scaling."
        found = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        legacy = self.own("rope.scale_linear", 1.0)
        return found if legacy == 1 else {"type": "linear", "factor": legacy} | found


def read_header(path: Path) -> Header:
    """The header of a GGUF file; raises unless the file is whole."""
    return header_of(read_layout(path))


def header_of(layout: Layout) -> Header:
    """The header of a file whose layout is known."""
    keys = layout.keys
    if "general.architecture" not in keys:
        raise Mistake(
            f"{layout.path} does not say its general.architecture: convert the model again."
        )
    rotary = {
        tensor.name: layout.floats(tensor)
        for tensor in layout.tensors
        if tensor.name in ROTARY and tensor.kind == FLOAT32
    }
    return Header(layout.path, keys, rotary)


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers read a GGUF file once while it loads it.

    It parses the whole vocabulary for the configuration, for the weights and for the tokenizer, and
    makes the table of tensor names anew for every module: two thirds of the time to load.
    """
    import gguf

    stock = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, call in stock.items():
        setattr(gguf, name, functools.cache(call))
    try:
        yield
    finally:
        for name, call in stock.items():
            setattr(gguf, name, call)
