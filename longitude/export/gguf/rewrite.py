"""A GGUF file copied with other keys and other rotary tensors, its weights byte for byte.

Keys keep their order and their bytes unless they change; new ones come behind them. Where a tensor
is replaced, its bytes change in place; a new one comes behind the last, for llama.cpp wants the
offsets without gaps, in the order of the table. So the weights are one stretch of bytes, which the
kernel copies from file to file. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from longitude.atomic import whole_file
from longitude.fields import Mistake
from longitude.hf.loading.layout import FLOAT32, LENGTH, START, STRING, Held, Layout, padded

Value = str | int | float
Keys = Mapping[str, Value | None]
Tensors = Mapping[str, Sequence[float]]
UINT32, FLOAT = 4, 6  # of keys, where a tensor's float32 is another number
PIECE = 8 << 20  # bytes read at once where the kernel can't copy by itself
UNABLE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def rewrite(layout: Layout, target: Path, keys: Keys, tensors: Tensors) -> None:
    """Copy a GGUF file to `target` with these keys (None takes one out) and float32 tensors.

    The file is whole or is not there, and the one it is made from stays as it is.
    """
    _check_place(layout.path, target)
    added = [name for name in tensors if name not in {t.name for t in layout.tensors}]
    placed, end = _placed(layout, tensors, added)
    try:
        with (
            whole_file(target) as part,
            part.open("wb") as out,
            layout.path.open("rb", 0) as source,
        ):
            source.seek(START.size)
            head = source.read(layout.table_end - START.size)
            out.write(_head(layout, head, keys, placed[len(layout.tensors) :]))
            out.write(bytes(padded(out.tell(), layout.step) - out.tell()))
            data = out.tell()
            _copy(source, out, layout.data, layout.used)
            for tensor in placed:
                if tensor.name in tensors:
                    out.seek(data + tensor.offset)
                    out.write(_floats(tensors[tensor.name]))
            out.truncate(data + end)
    except OSError as error:
        raise Mistake(_sentence(target, end, error)) from error


def _check_place(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        raise Mistake(f"{target} is the file to be exported itself: name another one.")
    if target.is_dir():
        raise Mistake(f"{target} is a folder, but a GGUF file is to be written: name a file in it.")


def _sentence(target: Path, size: int, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"{target} takes {size / 1e9:.2f} GB, but there is no space left: free some, or name "
            "another place."
        )
    return f"{target} can't be written ({error.strerror or error}): name another place."


def _placed(layout: Layout, tensors: Tensors, added: list[str]) -> tuple[list[Held], int]:
    """The tensors of the new file, and where their bytes end."""
    placed, end = list(layout.tensors), padded(layout.used, layout.step)
    for tensor in placed:
        new = tensors.get(tensor.name)
        if new is not None and (tensor.kind, tensor.size) != (FLOAT32, 4 * len(new)):
            raise Mistake(
                f"{layout.path} holds {tensor.name} of shape {tensor.shape}, where {len(new)} "
                "float32 numbers should go: convert the model again."
            )
    for name in added:
        size = 4 * len(tensors[name])
        placed.append(Held(name, (len(tensors[name]),), FLOAT32, end, size))
        end += padded(size, layout.step)
    return placed, end


def _head(layout: Layout, old: bytes, keys: Keys, added: Sequence[Held]) -> bytes:
    """The new file up to the end of its table; `old` is the old one's from its first key."""
    left = dict(keys)
    entries = []
    for entry in layout.entries:
        if entry.name not in keys:
            entries.append(old[entry.start - START.size : entry.end - START.size])
        elif (value := left.pop(entry.name, None)) is not None:
            entries.append(_entry(entry.name, value))
    entries += [_entry(name, value) for name, value in left.items() if value is not None]
    count = len(layout.tensors) + len(added)
    start = START.pack(b"GGUF", layout.version, count, len(entries))
    table = old[layout.table - START.size :]
    return b"".join([start, *entries, table, *map(_row, added)])


def _entry(name: str, value: Value) -> bytes:
    if isinstance(value, str):
        return _text(name) + struct.pack("<I", STRING) + _text(value)
    if isinstance(value, int):
        return _text(name) + struct.pack("<II", UINT32, value)
    return _text(name) + struct.pack("<If", FLOAT, value)


def _text(text: str) -> bytes:
    return LENGTH.pack(len(text.encode())) + text.encode()


def _row(tensor: Held) -> bytes:
    shape = tensor.shape
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.kind, tensor.offset)
    return _text(tensor.name) + numbers


def _floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _copy(source: FileIO, out: BinaryIO, start: int, count: int) -> None:
    """Copy bytes to where `out` stands: in the kernel, or else in large pieces."""
    source.seek(start)
    out.flush()
    while count and hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source.fileno(), out.fileno(), min(count, 1 << 30))
        except OSError as error:
            if error.errno not in UNABLE:
                raise
            break
        if not done:
            break
        count -= done
    while count:
        piece = os.read(source.fileno(), min(count, PIECE))
        if not piece:
            raise OSError(errno.EIO, "the file it is made from was cut short meanwhile")
        view = memoryview(piece)
        while view:
            view = view[os.write(out.fileno(), view) :]
        count -= len(piece)
