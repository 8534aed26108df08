"""Copies a GGUF file with other keys and rotary tensors.

Keys keep their order and bytes unless they change; new ones follow. A replaced tensor's bytes
change in place; a new one follows the last, since llama.cpp allows no gaps between offsets. So the
weights are one range of bytes, which the OS kernel copies. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from longitude.core.store import atomic_file
from longitude.core.validate import UserError
from longitude.hf.gguf_reader import FLOAT32, LENGTH, START, STRING, Layout, TensorEntry, padded

Value = str | int | float
Keys = Mapping[str, Value | None]
Tensors = Mapping[str, Sequence[float]]
UINT32, FLOAT = 4, 6  # types of keys; tensors number their types differently (FLOAT32)
CHUNK = 8 << 20  # bytes read at once if the OS kernel can't copy
UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def rewrite(layout: Layout, out: Path, keys: Keys, tensors: Tensors) -> None:
    """Copy a GGUF file to `out` with these keys (None removes one) and float32 tensors. The copy
    is complete or absent; the source is not changed."""
    if out.exists() and out.samefile(layout.path):
        raise UserError(f"{out} is the file to be exported itself: name another one.")
    if out.is_dir():
        raise UserError(f"{out} is a folder, but a GGUF file is to be written: name a file in it.")
    table, end = list(layout.tensors), padded(layout.used, layout.step)  # `end` of their bytes
    known = {tensor.name: tensor for tensor in table}
    for name, values in tensors.items():
        size, old = 4 * len(values), known.get(name)
        if old is not None and (old.kind, old.size) != (FLOAT32, size):
            raise UserError(
                f"{layout.path} holds {name} of shape {old.shape}, where {len(values)} float32 "
                "numbers should go: convert the model again."
            )
        if old is None:
            table.append(TensorEntry(name, (len(values),), FLOAT32, end, size))
            end += padded(size, layout.step)
    try:
        with atomic_file(out) as part, part.open("wb") as new, layout.path.open("rb", 0) as source:
            source.seek(START.size)
            head = source.read(layout.table_end - START.size)
            new.write(_head(layout, head, keys, table[len(layout.tensors) :]))
            new.write(bytes(padded(new.tell(), layout.step) - new.tell()))
            data = new.tell()
            _copy(source, new, layout.data, layout.used)
            for tensor in table:
                if tensor.name in tensors:
                    values = tensors[tensor.name]
                    new.seek(data + tensor.offset)
                    new.write(struct.pack(f"<{len(values)}f", *values))
            new.truncate(data + end)
    except OSError as error:
        why = f"can't be written ({error.strerror or error}): name another place."
        if error.errno == errno.ENOSPC:
            size = f"takes {end / 1e9:.2f} GB, but there is no space left"
            why = f"{size}: free some, or name another place."
        raise UserError(f"{out} {why}") from error


def _head(layout: Layout, old: bytes, keys: Keys, added: Sequence[TensorEntry]) -> bytes:
    """Return the new file up to its table's end; `old` is the old one's from its first key on."""
    remaining = dict(keys)
    entries = []
    for entry in layout.entries:
        if entry.name not in keys:
            entries.append(old[entry.start - START.size : entry.end - START.size])
        elif (value := remaining.pop(entry.name, None)) is not None:
            entries.append(_entry(entry.name, value))
    entries += [_entry(name, value) for name, value in remaining.items() if value is not None]
    count = len(layout.tensors) + len(added)
    start = START.pack(b"GGUF", layout.version, count, len(entries))
    rows = [
        _string(t.name)
        + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.kind, t.offset)
        for t in added
    ]
    return b"".join([start, *entries, old[layout.table - START.size :], *rows])


def _entry(name: str, value: Value) -> bytes:
    if isinstance(value, str):
        return _string(name) + struct.pack("<I", STRING) + _string(value)
    kind = ("<II", UINT32) if isinstance(value, int) else ("<If", FLOAT)
    return _string(name) + struct.pack(*kind, value)


def _string(text: str) -> bytes:
    return LENGTH.pack(len(text.encode())) + text.encode()


def _copy(source: FileIO, out: BinaryIO, start: int, count: int) -> None:
    """Copy bytes to the position of `out`: inside the OS kernel, or else in large chunks."""
    source.seek(start)
    out.flush()
    while count and hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source.fileno(), out.fileno(), min(count, 1 << 30))
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            break
        if not copied:
            break
        count -= copied
    while count:
        chunk = os.read(source.fileno(), min(count, CHUNK))
        if not chunk:
            raise OSError(errno.EIO, "the source file was truncated meanwhile")
        view = memoryview(chunk)
        while view:
            view = view[os.write(out.fileno(), view) :]
        count -= len(chunk)
