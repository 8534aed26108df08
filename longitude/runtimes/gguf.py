"""GGUF for llama.cpp: a new file whose keys and rotary tensors state the scheme.

Pair t rotates at the frequency θ_t · scale / g_t: θ_t from `rope.freq_base`, g_t from the tensor
`rope_freqs.weight`, scale = 1 / `rope.scaling.factor` for type linear; `rope.scaling.attn_factor`
multiplies cosine and sine. Type yarn ramps between 32 and 1 rotations, whatever `yarn_beta_fast`
and `yarn_beta_slow` say, and multiplies `attn_factor` by 0.1 ln s + 1; `yarn_attn_factor` is not
read. So type yarn is written only for schemes with exactly these bounds; all others that are not
just a base or linear scaling become divisors g. A loader rejects a file with an unexpected tensor.
Two tensors by length (`rope_factors_long`, `rope_factors_short`) are expected under type longrope,
and both get the same divisors. The server limits each request to the file's `context_length`, which
is raised as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from longitude.core.validate import UserError, shown
from longitude.hf.gguf_reader import Header, header_of, read_layout
from longitude.hf.gguf_writer import Value, rewrite
from longitude.parts import Yarn
from longitude.parts.frequencies import magnitude
from longitude.runtimes import Question, Runner, Runtime, Settings, TopTokens, in_process, llama_cpp
from longitude.runtimes.checkpoint import Checkpoint, layer_bases
from longitude.runtimes.llama_cpp import DIVISORS, LOADS_DIVISORS, LOADS_LISTS, LONG, SHORT
from longitude.runtimes.target import Target

LISTS = (LONG, SHORT)
CLOSE = 1e-9  # relative difference of equal frequencies


class Changes(NamedTuple):
    """What a GGUF file must contain: keys (None: the key is removed) and float32 tensors."""

    keys: dict[str, Value | None]
    tensors: dict[str, tuple[float, ...]]

    def applied(self, header: Header) -> dict[str, Any]:
        """Return the keys and rotary tensors that a file has after these changes."""
        merged = header.keys | header.divisors | self.keys | self.tensors
        return {name: value for name, value in merged.items() if value is not None}


def changes(header: Header, target: Target) -> Changes:
    """Return the changes with which llama.cpp computes the target from this file; raises if there
    are none, and says what to export instead."""
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
    if layer_bases(header) and (kind not in ("none", "linear") or "attn_factor" in scaling):
        raise UserError(
            f"{header.path} has windowed layers with a base of their own, which llama.cpp would "
            f"scale as well under {shown(target.rope)}: export ntk(…), linear(…) or another base."
        )
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
    """Return the scaling type, the other keys of the scaling, and the tensors."""
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
    bounds = ("code", True, 32, 1)  # llama.cpp's fixed ones
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
    """Return the base and the linear factor that give these frequencies, or None."""
    rates = target.inv_freq
    half, first = len(rates), rates[0]
    step = (rates[-1] / first) ** (1 / (half - 1)) if half > 1 else 1 / target.base
    if not all(math.isclose(f, first * step**i, rel_tol=CLOSE) for i, f in enumerate(rates)):
        return None
    base, factor = step**-half, 1 / first
    near = math.isclose(base, target.base, rel_tol=CLOSE)
    return target.base if near else base, 1 if math.isclose(factor, 1, rel_tol=CLOSE) else factor


def export_gguf(source: Path, out: Path, target: Target) -> None:
    """Copy a GGUF file to `out` with the settings of a scheme."""
    layout = read_layout(source)
    rewrite(layout, out, *changes(header_of(layout), target))


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield the keys and tensors of a new file."""
    header = llama_cpp.gguf_header(RUNTIME, model)
    yield Settings({**changes(header, target).applied(header), "-c": target.length})


def top_tokens(question: Question) -> TopTokens:
    """Run llama.cpp through xllamacpp, which is its server as a Python module."""
    return in_process(str(Path(__file__).with_name("llama_cpp_process.py")), question=question)


RUNTIME = Runtime(
    name="gguf",
    title="llama.cpp (GGUF)",
    versions=llama_cpp.RUNTIME.versions,
    emulate=llama_cpp.emulate,
    write=write,
    rank=5,
    start="llama-server -m {file} -c {target}\n",
    file="gguf.sh",
    reads="gguf",
    writes="gguf",
    layers="full",
    advice="llama.cpp",
    lengths=llama_cpp.RUNTIME.lengths,
    runner=Runner("xllamacpp", "longitude[verify]", top_tokens),
)
