"""A scheme as the keys and tensors of a GGUF file, and a GGUF file copied with them.

A pair rotates by θ_t · scale / g_t: θ_t from `rope.freq_base`, scale = 1 / `rope.scaling.factor`
for type linear, g_t from the tensor `rope_freqs.weight`; `rope.scaling.attn_factor` multiplies
cosine and sine. Type yarn ramps between 32 and 1 rotations, whatever `yarn_beta_fast` and
`yarn_beta_slow` say, and multiplies `attn_factor` by 0.1 ln s + 1; `yarn_attn_factor` is not read.
So yarn is named if the scheme has these very bounds, and everything else that is no base and no
linear scaling becomes divisors g. A loader refuses a file with a tensor that it does not expect;
two tensors by length (`rope_factors_long`, `rope_factors_short`) are expected under type longrope,
and get the same divisors.

In the copy keys keep their order and bytes unless they change; new ones follow. A replaced tensor's
bytes change in place; a new one follows the last, since llama.cpp allows no gaps between offsets.
So the weights are one range of bytes, which the kernel copies. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from longitude.core.atomic_io import atomic_file
from longitude.core.validate import UserError, shown
from longitude.hf.gguf_reader import (
    FLOAT32,
    LENGTH,
    START,
    STRING,
    Header,
    Layout,
    TensorEntry,
    padded,
)
from longitude.parts import Yarn
from longitude.parts.frequencies import magnitude
from longitude.runtimes.llama_cpp import DIVISORS, LOADS_DIVISORS, LOADS_LISTS, LONG, SHORT
from longitude.runtimes.target import Target

Value = str | int | float
Keys = Mapping[str, Value | None]
Tensors = Mapping[str, Sequence[float]]
UINT32, FLOAT = 4, 6  # types of keys, where a tensor's float32 is another number
CHUNK = 8 << 20  # bytes read at once if the kernel can't copy by itself
UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
LISTS = (LONG, SHORT)
CLOSE = 1e-9  # relative difference of equal frequencies


@dataclass(frozen=True)
class Changes:
    """What a GGUF file must hold: keys (None: must be absent) and float32 tensors."""

    keys: dict[str, Value | None]
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def applied(self, header: Header) -> dict[str, Any]:
        """The keys and rotary tensors of a file with these changes written into it."""
        merged = header.keys | header.divisors | self.keys | self.tensors
        return {name: value for name, value in merged.items() if value is not None}


def changes(header: Header, target: Target) -> Changes:
    """The changes under which llama.cpp computes the target from this file; raises if there are
    none, and names the nearest scheme."""
    if not all(target.inv_freq):
        raise UserError(
            f"llama.cpp divides frequencies, and no divisor gives a pair the frequency 0 as "
            f"{shown(target.rope)} does: export a scheme without proportional(…)."
        )
    if header.own("rope.scaling.yarn_log_multiplier"):
        raise UserError(
            f"{header.path} scales its attention by rope.scaling.yarn_log_multiplier, which no "
            "scheme expresses: start llama.cpp with --rope-scale instead."
        )
    if header.keys.get("split.count", 1) > 1:
        raise UserError(
            f"{header.path} is one of {header.keys['split.count']} files of a model: merge them "
            "first, with llama-gguf-split --merge."
        )
    kind, scaling, tensors = _scaling(header, target)
    prefix = f"{header.architecture}."
    keys: dict[str, Value | None] = {
        name: None
        for name in header.keys
        if name == f"{prefix}rope.scale_linear"
        # "finetuned" says whether Granite's hybrids rotate at all
        or (name.startswith(f"{prefix}rope.scaling.") and not name.endswith("finetuned"))
    }
    keys |= {
        f"{prefix}context_length": target.length,
        f"{prefix}rope.dimension_count": target.dims,
        f"{prefix}rope.freq_base": scaling.pop("base", target.base),
        f"{prefix}rope.scaling.type": kind,
        f"{prefix}rope.scaling.original_context_length": target.original,
    }
    keys |= {f"{prefix}rope.scaling.{name}": value for name, value in scaling.items()}
    return Changes(keys, tensors)


def _scaling(header: Header, target: Target) -> tuple[str, dict[str, Value], dict[str, Any]]:
    """The type, the keys beside it, and the tensors."""
    half, gain = len(target.inv_freq), target.attention
    divisors = tuple(target.base ** (-i / half) / f for i, f in enumerate(target.inv_freq))
    if any(name in header.divisors for name in LISTS):
        return "longrope", _attn_factor(gain), dict.fromkeys(LISTS, divisors)
    ones = {DIVISORS: (1.0,) * half} if DIVISORS in header.divisors else {}
    if even := geometric(target):
        base, factor = even
        scaled = {} if factor == 1 else {"factor": factor}
        keys = {"base": base, **scaled, **_attn_factor(gain)}
        return "linear" if scaled else "none", keys, ones
    f = target.rope.frequencies
    bounds = ("code", True, 32, 1)  # llama.cpp's own
    if isinstance(f, Yarn) and (f.ramp, f.truncate, f.fast, f.slow) == bounds:
        factor = float(f.factor)
        return "yarn", {"factor": factor, **_attn_factor(gain / magnitude(factor))}, ones
    if ones or header.architecture in LOADS_DIVISORS:
        return "none", _attn_factor(gain), {DIVISORS: divisors}
    if header.architecture in LOADS_LISTS:
        return "longrope", _attn_factor(gain), dict.fromkeys(LISTS, divisors)
    factor = getattr(f, "factor", None) or max(1.0, target.length / target.original)
    raise UserError(
        f"llama.cpp takes divisors of frequencies ({DIVISORS}) for some architectures, and for "
        f"{header.architecture!r} none, so that it has no settings for {shown(f)}: the nearest it "
        f"can serve is {Yarn(float(factor), original=target.original)}."
    )


def _attn_factor(gain: float) -> dict[str, Value]:
    return {} if math.isclose(gain, 1, rel_tol=CLOSE) else {"attn_factor": gain}


def geometric(target: Target) -> tuple[float, float] | None:
    """The base and the linear factor that give these frequencies, if any do."""
    rates = target.inv_freq
    half, first = len(rates), rates[0]
    step = (rates[-1] / first) ** (1 / (half - 1)) if half > 1 else 1 / target.base
    if not all(math.isclose(f, first * step**i, rel_tol=CLOSE) for i, f in enumerate(rates)):
        return None
    base, factor = step**-half, 1 / first
    near = math.isclose(base, target.base, rel_tol=CLOSE)
    return target.base if near else base, 1 if math.isclose(factor, 1, rel_tol=CLOSE) else factor


def rewrite(layout: Layout, out: Path, keys: Keys, tensors: Tensors) -> None:
    """Copy a GGUF file to `out` with these keys (None removes one) and float32 tensors. The copy
    is complete or absent; the source is not changed."""
    if out.exists() and out.samefile(layout.path):
        raise UserError(f"{out} is the file to be exported itself: name another one.")
    if out.is_dir():
        raise UserError(f"{out} is a folder, but a GGUF file is to be written: name a file in it.")
    table, end = _tensor_table(layout, tensors)
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


def _tensor_table(layout: Layout, tensors: Tensors) -> tuple[list[TensorEntry], int]:
    """The tensors of the new file, and where their bytes end."""
    table, end = list(layout.tensors), padded(layout.used, layout.step)
    for tensor in table:
        new = tensors.get(tensor.name)
        if new is not None and (tensor.kind, tensor.size) != (FLOAT32, 4 * len(new)):
            raise UserError(
                f"{layout.path} holds {tensor.name} of shape {tensor.shape}, where {len(new)} "
                "float32 numbers should go: convert the model again."
            )
    for name in [n for n in tensors if n not in {tensor.name for tensor in table}]:
        size = 4 * len(tensors[name])
        table.append(TensorEntry(name, (len(tensors[name]),), FLOAT32, end, size))
        end += padded(size, layout.step)
    return table, end


def _head(layout: Layout, old: bytes, keys: Keys, added: Sequence[TensorEntry]) -> bytes:
    """The new file up to the end of its table; `old` is the old file's from its first key."""
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
    """Copy bytes to the place of `out`: in the kernel, or else in large chunks."""
    source.seek(start)
    out.flush()
    while count and hasattr(os, "copy_file_range"):
        try:
            done = os.copy_file_range(source.fileno(), out.fileno(), min(count, 1 << 30))
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            break
        if not done:
            break
        count -= done
    while count:
        chunk = os.read(source.fileno(), min(count, CHUNK))
        if not chunk:
            raise OSError(errno.EIO, "the source file was truncated meanwhile")
        view = memoryview(chunk)
        while view:
            view = view[os.write(out.fileno(), view) :]
        count -= len(chunk)
