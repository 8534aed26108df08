"""Reads GGUF files: keys, tensor table, and the tensors of the rotation.

Format: ggml-org/ggml, docs/gguf.md. Only the header is parsed, in 0.1 s for a vocabulary of 50,000,
where the `gguf` package takes seconds; a file that ends before its last tensor is refused.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError

NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
START = struct.Struct("<4sIQQ")  # GGUF, the version, the number of tensors, the number of keys
FLOAT32 = 0  # ggml's type number
ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
BLOCKS: dict[int, tuple[int, int]] = {  # for each ggml type: weights per block, and bytes
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip


@dataclass(frozen=True)
class KeyEntry:
    """A key, its value (for an array of strings its length), and its first and last byte."""

    name: str
    value: Any
    start: int
    end: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: shape, ggml type, and its offset (from `Layout.data`) and size in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where everything is in a GGUF file, in bytes from its start."""

    path: Path
    version: int
    entries: tuple[KeyEntry, ...]
    tensors: tuple[TensorEntry, ...]
    table: int  # where the table of tensors starts
    table_end: int
    step: int  # the alignment of tensors
    data: int  # where the first tensor starts

    @property
    def keys(self) -> dict[str, Any]:
        """The keys with their values."""
        return {entry.name: entry.value for entry in self.entries}

    @property
    def used(self) -> int:
        """The bytes of all tensors, alignment included."""
        return max((t.offset + t.size for t in self.tensors), default=0)

    def floats(self, tensor: TensorEntry) -> tuple[float, ...]:
        """Return the numbers of a float32 tensor."""
        with self.path.open("rb") as file:
            file.seek(self.data + tensor.offset)
            return struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size))


@dataclass(frozen=True)
class Header:
    """The keys of a GGUF file, arrays of strings as their length, and its rotary tensors."""

    path: Path
    keys: dict[str, Any]
    divisors: dict[str, tuple[float, ...]]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.keys["general.architecture"]

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, as in `llama.rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{key}", default)

    def scaling(self) -> dict[str, Any]:
        """Return the keys under `rope.scaling.`, without the prefix."""
        prefix = f"{self.architecture}.rope.scaling."
        entries = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        legacy = self.own("rope.scale_linear", 1.0)
        return entries if legacy == 1 else {"type": "linear", "factor": legacy} | entries


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file; raise if the file is truncated."""
    return header_of(read_layout(path))


def header_of(layout: Layout) -> Header:
    """Return the header of a file with this layout."""
    keys = layout.keys
    if "general.architecture" not in keys:
        raise UserError(
            f"{layout.path} does not say its general.architecture: convert the model again."
        )
    rotary = {
        tensor.name: layout.floats(tensor)
        for tensor in layout.tensors
        if tensor.name in ROTARY and tensor.kind == FLOAT32
    }
    return Header(layout.path, keys, rotary)


def read_layout(path: Path) -> Layout:
    """Read where everything is in a GGUF file; raise if the file is truncated."""
    truncated = UserError(f"{path} is cut short, or damaged: fetch it again.")
    if path.stat().st_size < START.size:
        raise truncated
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise UserError(f"{path} is no GGUF file, whose first bytes are GGUF: give another.")
        version = _unpack("<I", data, 4)
        if version not in (2, 3):
            raise UserError(f"{path} is GGUF version {version}: convert it to version 3.")
        try:
            layout = _layout(path, data)
        except (struct.error, IndexError, UnicodeDecodeError, ArithmeticError, MemoryError):
            raise truncated from None
        if layout.data + layout.used > len(data):
            raise truncated
        return layout


def _layout(path: Path, data: mmap.mmap) -> Layout:
    _, version, tensor_count, key_count = START.unpack_from(data)
    entries, at = [], START.size
    for _ in range(key_count):
        start = at
        key, at = _string(data, start)
        value, at = _value(data, at + 4, _unpack("<I", data, at))
        entries.append(KeyEntry(key, value, start, at))
    table, tensors = at, []
    for _ in range(tensor_count):
        name, at = _string(data, at)
        dims = _unpack("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
        if kind not in BLOCKS:
            raise UserError(f"{path} has weights of ggml type {kind}, unknown here: convert it.")
        weights, size = BLOCKS[kind]
        size *= math.prod(shape) // weights
        tensors.append(TensorEntry(name, tuple(shape), kind, offset, size))
        at += 4 + 8 * dims + 12
    step = next((e.value for e in entries if e.name == "general.alignment"), 32)
    places = {"table": table, "table_end": at, "step": step, "data": padded(at, step)}
    return Layout(path, version, tuple(entries), tuple(tensors), **places)


def padded(size: int, step: int) -> int:
    """Round a size up to a multiple of a step."""
    return -(-size // step) * step


def _unpack(kind: str, data: mmap.mmap, at: int) -> Any:
    return struct.unpack_from(kind, data, at)[0]


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    end = at + 8 + _unpack("<Q", data, at)
    if end > len(data):
        raise IndexError
    return data[at + 8 : end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """Return a value (the length of an array of strings or arrays) and the offset after it."""
    if kind in NUMBERS:
        return _unpack("<" + NUMBERS[kind], data, at), at + struct.calcsize("<" + NUMBERS[kind])
    if kind == STRING:
        return _string(data, at)
    if kind != ARRAY:
        raise IndexError
    of, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if of in NUMBERS:
        array = f"<{count}{NUMBERS[of]}"
        return list(struct.unpack_from(array, data, at)), at + struct.calcsize(array)
    for _ in range(count):  # a vocabulary: skipped as fast as Python can
        at = at + 8 + LENGTH.unpack_from(data, at)[0] if of == STRING else _value(data, at, of)[1]
    return count, at
