"""A scheme as the keys and tensors of a GGUF file, by the formulas of llama.cpp.

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

import math
from dataclasses import dataclass, field
from typing import Any

from longitude.export.effective.llama_cpp import DIVISORS, FAR, LOADS_DIVISORS, LOADS_LISTS, NEAR
from longitude.export.gguf.rewrite import Value
from longitude.export.wanted import Wanted
from longitude.fields import Mistake, shown
from longitude.hf.loading.gguf import Header
from longitude.parts import Yarn
from longitude.parts.rotary.frequencies.yarn import magnitude

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
    raise Mistake(_unknown(header, wanted))


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
        raise Mistake(
            f"llama.cpp divides frequencies, and no divisor makes a pair stand still as "
            f"{shown(wanted.rope)} does: export a scheme without proportional(…)."
        )
    if header.own("rope.scaling.yarn_log_multiplier"):
        raise Mistake(
            f"{header.path} scales its attention by rope.scaling.yarn_log_multiplier, which no "
            "scheme says: start llama.cpp with --rope-scale instead."
        )
    if header.keys.get("split.count", 1) > 1:
        raise Mistake(
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
