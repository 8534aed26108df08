"""The header of a GGUF file: its keys, and the tensors that belong to its rotation.

Format: ggml-org/ggml, docs/gguf.md. Only the header is read, 0.1 s for a vocabulary of 50,000,
where the `gguf` package takes seconds; but a file that ends before its last tensor is found out.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from longitude.fields import Mistake

NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
FLOAT32 = 0  # ggml's number for it


@dataclass(frozen=True)
class Header:
    """The keys of a GGUF file, arrays of strings as their length, and its rotary tensors."""

    path: Path
    keys: dict[str, Any]
    divisors: dict[str, tuple[float, ...]]

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the architecture's own, as in `llama.rope.freq_base`."""
        return self.keys.get(f"{self.keys['general.architecture']}.{key}", default)

    def scaling(self) -> dict[str, Any]:
        """The keys under `rope.scaling.`, without the prefix."""
        prefix = f"{self.keys['general.architecture']}.rope.scaling."
        found = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        legacy = self.own("rope.scale_linear", 1.0)
        return {"type": "linear", "factor": legacy} if not found and legacy != 1 else found


def read_header(path: Path) -> Header:
    """The header of a GGUF file; raises unless the file is whole."""
    with _mapped(path) as data:
        if data[:4] != b"GGUF":
            raise Mistake(f"{path} is no GGUF file, whose first bytes are GGUF: give another.")
        version = struct.unpack_from("<I", data, 4)[0]
        if version not in (2, 3):
            raise Mistake(f"{path} is GGUF version {version}: convert it to version 3.")
        try:
            return _header(path, data)
        except (struct.error, IndexError, UnicodeDecodeError, ArithmeticError):
            _cut_short(path)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    if path.stat().st_size < 24:
        _cut_short(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _cut_short(path: Path) -> NoReturn:
    raise Mistake(f"{path} is cut short, or damaged: fetch it again.")


def _header(path: Path, data: mmap.mmap) -> Header:
    _, tensors, count = struct.unpack_from("<IQQ", data, 4)
    keys, at = {}, 24
    for _ in range(count):
        key, at = _string(data, at)
        keys[key], at = _value(data, at + 4, _one("<I", data, at))
    if "general.architecture" not in keys:
        raise Mistake(f"{path} does not say its general.architecture: convert the model again.")
    table = []
    for _ in range(tensors):
        name, at = _string(data, at)
        dims = _one("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
        table.append((name, math.prod(shape), kind, offset))
        at += 4 + 8 * dims + 12
    step = keys.get("general.alignment", 32)
    start = -(-at // step) * step
    if start + max((o + _bytes(path, n, k) for _, n, k, o in table), default=0) > len(data):
        _cut_short(path)
    rotary = {
        name: tuple(np.frombuffer(data, np.float32, n, start + offset).astype(float).tolist())
        for name, n, kind, offset in table
        if name.startswith("rope_f") and kind == FLOAT32
    }
    return Header(path, keys, rotary)


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


def _bytes(path: Path, elements: int, kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise Mistake(f"{path} has weights of ggml type {kind}, unknown: update gguf.") from None
    return elements // block * size


def _one(kind: str, data: mmap.mmap, at: int) -> Any:
    return struct.unpack_from(kind, data, at)[0]


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    end = at + 8 + _one("<Q", data, at)
    if end > len(data):
        raise IndexError
    return data[at + 8 : end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """A value and where the next one starts; of an array of strings or arrays its length."""
    if kind in NUMBERS:
        return _one("<" + NUMBERS[kind], data, at), at + struct.calcsize("<" + NUMBERS[kind])
    if kind == STRING:
        return _string(data, at)
    if kind != ARRAY:
        raise IndexError
    of, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if of in NUMBERS:
        whole = f"<{count}{NUMBERS[of]}"
        return list(struct.unpack_from(whole, data, at)), at + struct.calcsize(whole)
    for _ in range(count):  # a vocabulary: skipped as fast as Python can
        at = at + 8 + LENGTH.unpack_from(data, at)[0] if of == STRING else _value(data, at, of)[1]
    return count, at
