"""A GGUF file copied with other keys and other rotary tensors, its weights byte for byte.

Keys keep their order and their bytes unless they change; new ones come behind them. Where a tensor
is replaced, its bytes change in place; a new one comes behind the last, for llama.cpp wants the
offsets without gaps, in the order of the table. So the weights are one stretch of bytes, which the
kernel copies from file to file. Format: ggml-org/ggml, docs/gguf.md.

A scheme as the keys and tensors of a GGUF file, by the formulas of llama.cpp.

A pair turns by θ_t · scale / g_t: θ_t from `rope.freq_base`, scale = 1 / `rope.scaling.factor` for
type linear, g_t from the tensor `rope_freqs.weight`; `rope.scaling.attn_factor` multiplies cosine
and sine. Type yarn has its ramp from 32 and 1 turns, whatever the keys `yarn_beta_fast` and
`yarn_beta_slow` say, and multiplies `attn_factor` by 0.1 ln s + 1; `yarn_attn_factor` is dead. So
yarn is named where the scheme has these very bounds, and everything else that is no base and no
linear scaling becomes divisors g. A tensor that an architecture's loader does not ask for makes it
refuse the file; two tensors by length (`rope_factors_long`, `rope_factors_short`) are asked for
under type longrope, and get the same divisors.
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
from longitude.runtimes.llama_cpp import DIVISORS, FAR, LOADS_DIVISORS, LOADS_LISTS, NEAR
from longitude.runtimes.target import Wanted

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
            atomic_file(target) as part,
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
        raise UserError(_sentence(target, end, error)) from error


def _check_place(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        raise UserError(f"{target} is the file to be exported itself: name another one.")
    if target.is_dir():
        raise UserError(
            f"{target} is a folder, but a GGUF file is to be written: name a file in it."
        )


def _sentence(target: Path, size: int, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return (
            f"{target} takes {size / 1e9:.2f} GB, but there is no space left: free some, or name "
            "another place."
        )
    return f"{target} can't be written ({error.strerror or error}): name another place."


def _placed(layout: Layout, tensors: Tensors, added: list[str]) -> tuple[list[TensorEntry], int]:
    """The tensors of the new file, and where their bytes end."""
    placed, end = list(layout.tensors), padded(layout.used, layout.step)
    for tensor in placed:
        new = tensors.get(tensor.name)
        if new is not None and (tensor.kind, tensor.size) != (FLOAT32, 4 * len(new)):
            raise UserError(
                f"{layout.path} holds {tensor.name} of shape {tensor.shape}, where {len(new)} "
                "float32 numbers should go: convert the model again."
            )
    for name in added:
        size = 4 * len(tensors[name])
        placed.append(TensorEntry(name, (len(tensors[name]),), FLOAT32, end, size))
        end += padded(size, layout.step)
    return placed, end


def _head(layout: Layout, old: bytes, keys: Keys, added: Sequence[TensorEntry]) -> bytes:
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


def _row(tensor: TensorEntry) -> bytes:
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


FACTORS = (FAR, NEAR)
CLOSE = 1e-9  # the largest relative difference of a frequency that is the same
KEPT = ("finetuned",)  # of the keys under rope.scaling: whether Granite's hybrids turn at all


@dataclass(frozen=True)
class Settings:
    """What a GGUF file has to hold: keys (None: must not be there) and float32 tensors."""

    keys: dict[str, Value | None]
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def on(self, header: Header) -> dict[str, Any]:
        """The keys and rotary tensors of a file with these settings written into it."""
        merged = header.keys | header.divisors | self.keys | self.tensors
        return {name: value for name, value in merged.items() if value is not None}


def settings(header: Header, wanted: Wanted) -> Settings:
    """The settings under which llama.cpp computes these numbers from this file; raises where there
    are none, and names what comes near."""
    _check(header, wanted)
    kind, scaling, divisors = _way(header, wanted)
    prefix = f"{header.architecture}."
    keys: dict[str, Value | None] = {
        name: None
        for name in header.keys
        if name == f"{prefix}rope.scale_linear"
        or (name.startswith(f"{prefix}rope.scaling.") and not name.endswith(KEPT))
    }
    base = scaling.pop("base", wanted.base)
    keys |= {
        f"{prefix}context_length": wanted.target,
        f"{prefix}rope.dimension_count": wanted.dims,
        f"{prefix}rope.freq_base": base,
        f"{prefix}rope.scaling.type": kind,
        f"{prefix}rope.scaling.original_context_length": wanted.original,
    }
    keys |= {f"{prefix}rope.scaling.{name}": value for name, value in scaling.items()}
    return Settings(keys, divisors)


def _way(header: Header, wanted: Wanted) -> tuple[str, dict[str, Value], dict[str, Any]]:
    """The type, the keys beside it, and the tensors."""
    gain = wanted.attention
    if any(name in header.divisors for name in FACTORS):
        g = divisors(wanted)
        return "longrope", _gain(gain), dict.fromkeys(FACTORS, g)
    still = {DIVISORS: (1.0,) * len(wanted.inv_freq)} if DIVISORS in header.divisors else {}
    even = geometric(wanted)
    if even:
        base, factor = even
        scaled = {} if factor == 1 else {"factor": factor}
        return "linear" if scaled else "none", {"base": base, **scaled, **_gain(gain)}, still
    found = wanted.rope.frequencies
    if isinstance(found, Yarn) and _llama_cpps_own(found):
        factor = float(found.factor)
        return "yarn", {"factor": factor, **_gain(gain / magnitude(factor))}, still
    if DIVISORS in header.divisors or header.architecture in LOADS_DIVISORS:
        return "none", _gain(gain), {DIVISORS: divisors(wanted)}
    if header.architecture in LOADS_LISTS:
        return "longrope", _gain(gain), dict.fromkeys(FACTORS, divisors(wanted))
    raise UserError(_unknown(header, wanted))


def _gain(gain: float) -> dict[str, Value]:
    return {} if math.isclose(gain, 1, rel_tol=CLOSE) else {"attn_factor": gain}


def _llama_cpps_own(yarn: Yarn) -> bool:
    return (yarn.ramp, yarn.truncate, yarn.fast, yarn.slow) == ("code", True, 32, 1)


def geometric(wanted: Wanted) -> tuple[float, float] | None:
    """The base and the linear factor that give these frequencies, if any do."""
    rates = wanted.inv_freq
    half, first = len(rates), rates[0]
    step = (rates[-1] / first) ** (1 / (half - 1)) if half > 1 else 1 / wanted.base
    if not all(math.isclose(f, first * step**i, rel_tol=CLOSE) for i, f in enumerate(rates)):
        return None
    base, factor = step**-half, 1 / first
    near = math.isclose(base, wanted.base, rel_tol=CLOSE)
    return wanted.base if near else base, 1 if math.isclose(factor, 1, rel_tol=CLOSE) else factor


def divisors(wanted: Wanted) -> tuple[float, ...]:
    """By what each frequency of the base is divided."""
    half = len(wanted.inv_freq)
    return tuple(wanted.base ** (-i / half) / f for i, f in enumerate(wanted.inv_freq))


def _check(header: Header, wanted: Wanted) -> None:
    if not all(wanted.inv_freq):
        raise UserError(
            f"llama.cpp divides frequencies, and no divisor makes a pair stand still as "
            f"{shown(wanted.rope)} does: export a scheme without proportional(…)."
        )
    if header.own("rope.scaling.yarn_log_multiplier"):
        raise UserError(
            f"{header.path} scales its attention by rope.scaling.yarn_log_multiplier, which no "
            "scheme says: start llama.cpp with --rope-scale instead."
        )
    if header.keys.get("split.count", 1) > 1:
        raise UserError(
            f"{header.path} is one of {header.keys['split.count']} files of a model: put them "
            "together first, with llama-gguf-split --merge."
        )


def _unknown(header: Header, wanted: Wanted) -> str:
    found = wanted.rope.frequencies
    factor = getattr(found, "factor", None) or max(1.0, wanted.target / wanted.original)
    near = Yarn(float(factor), original=wanted.original)
    return (
        f"llama.cpp takes divisors of frequencies ({DIVISORS}) for some architectures, and for "
        f"{header.architecture!r} none, so that {shown(found)} has no name there: the nearest it "
        f"can serve is {near}."
    )
