"""A config.json as llama.cpp's convert_hf_to_gguf.py writes it into a GGUF file's keys.

conversion/ of b11549: `rope_parameters` before `rope_scaling`; linear and yarn by name, with keys
for the betas and the factor on cosine and sine that llama.cpp then does not read; longrope as two
tensors and llama3 as one; "dynamic" is dropped without a word.

llama.cpp: keys of a GGUF file, tensors of divisors beside the weights, flags over both.

src/llama-context.cpp, src/llama-model.cpp, ggml/src/ggml-cpu/ops.cpp of b11549. A pair turns by
θ / g, g of `rope_freqs.weight`; type linear multiplies by 1/factor, type yarn ramps between both as
transformers does, with 0.1 ln s + 1 on cosine and sine. `attn_factor` multiplies that. The keys
`yarn_attn_factor` and `yarn_beta_*` are read for two architectures alone; the flags of the betas
work, that of the factor only without YaRN since b7394. A tensor that the loader does not ask for
stops it: both lists of longrope need that type, whose factor then divides once more. A server gives
no slot more than `context_length`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longitude.core.part import Frequencies
from longitude.core.validate import UserError
from longitude.hf.rope_config import ORIGINAL, is_number
from longitude.parts import Linear, LongRope, Unscaled, Yarn
from longitude.parts.frequencies import magnitude, powers
from longitude.runtimes.effective import (
    Effective,
    Read,
    Refused,
    before,
    computed,
    frequencies,
    longrope_attention,
)
from longitude.runtimes.target import of_text
from longitude.runtimes.transformers import version5

ARCHITECTURES = {"mistral": "llama", "smollm3": "smollm3", "phi3": "phi3"}  # where names differ


def gguf_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and rotary tensors that the converter would write, by their names."""
    text = of_text(config)
    first = text.get("rope_parameters")
    held = {k: v for k, v in text.items() if k != "rope_scaling"} if first else text
    read = version5(held)
    kind = str(text.get("model_type", "llama"))
    arch = ARCHITECTURES.get(kind, kind)
    own = {
        "context_length": read.most,
        "rope.dimension_count": read.dims,
        "rope.freq_base": read.base,
        **{f"rope.scaling.{key}": value for key, value in _scaling(read).items()},
    }
    flags = {k: v for k, v in config.items() if k.startswith("-") or k == "num_ctx"}
    named = {f"{arch}.{key}": value for key, value in own.items()}
    return {"general.architecture": arch, **named, **_tensors(read), **flags}


def _scaling(read: Read) -> dict[str, Any]:
    match read.kind:
        case "linear":
            return {"type": "linear", "factor": read.number("factor")}
        case "yarn":
            keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
            told = {to: read.own[key] for key, to in keys.items() if read.own.get(key)}
            given = read.maybe("attention_factor")
            dead = {} if given is None else {"yarn_attn_factor": given}
            return told | dead | _yarn(read)
        case "longrope":
            scale = read.most / read.number(ORIGINAL)
            gain = longrope_attention(read, scale)
            original = int(read.number(ORIGINAL))
            return {"type": "longrope", "original_context_length": original, "attn_factor": gain}
    return {}


def _yarn(read: Read) -> dict[str, Any]:
    original = int(read.number(ORIGINAL))
    return {"type": "yarn", "factor": read.number("factor"), "original_context_length": original}


def _tensors(read: Read) -> dict[str, list[float]]:
    match read.kind:
        case "longrope":
            lists = {"short": read.own["short_factor"], "long": read.own["long_factor"]}
            return {f"rope_factors_{name}.weight": list(each) for name, each in lists.items()}
        case "llama3":
            base = float(read.base or 0)
            scaled = frequencies(read).inv_freq(read.dims, base, read.most)
            return {"rope_freqs.weight": (1 / (scaled * powers(read.dims, base))).tolist()}
    return {}


def explained(config: Mapping[str, Any], found: Effective) -> Effective:
    """The traps of the converter beside those of llama.cpp."""
    read = version5(config)
    lost = ["dynamic is static"] if read.kind == "dynamic" else []
    if read.kind == "yarn":
        lost += ["truncate ignored"] * (not read.own.get("truncate", True))
        lost += ["attention factor ignored"] * (read.maybe("attention_factor") is not None)
        lost += ["mscale ignored"] * bool(read.maybe("mscale") and read.maybe("mscale_all_dim"))
    if read.kind == "longrope":
        lost += ["attention factor ignored"]
    return Effective(found.inv_freq, found.attention, found.length, (*found.traps, *lost))


READS_ALL = ("grok", "mistral3")
# architectures whose loader asks for the tensor; qwen2, qwen3, gemma3 and most others do not
LOADS_DIVISORS = frozenset(
    "llama mistral3 granite granitemoe granitehybrid exaone exaone4 exaone-moe minicpm arcee "
    "apertus deci falcon-h1 gemma4 llama4 refact step35".split()
)
LOADS_LISTS = frozenset(
    "llama phi3 phimoe minicpm minicpm3 granite granitemoe granitehybrid mistral3".split()
)
UNTYPED = ("phi3", "phimoe", "minicpm3")  # which load both lists whatever the type is
DIVISORS, NEAR, FAR = (f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long"))


def effective(keys: Mapping[str, Any], version: str | None = None) -> Effective:
    """What llama-server computes from a GGUF file and flags."""
    return _computed(_File(keys), version, heeding=False)


def stated(keys: Mapping[str, Any]) -> Effective:
    """What the file says, were every key of it heeded: what whoever wrote it wanted."""
    return _computed(_File(keys), None, heeding=True)


class _File:
    """The keys of a GGUF file by their short names, and flags."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys, self.arch = keys, str(keys.get("general.architecture"))

    def own(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.arch}.{name}", default)

    def scaling(self, name: str, default: Any = None) -> Any:
        return self.own(f"rope.scaling.{name}", default)

    def number(self, flag: str, *names: str, default: float) -> float:
        """A number by its flag, or the first of its keys that is there."""
        found = [self.keys.get(flag), *(self.own(name) for name in names)]
        return next((float(n) for n in found if is_number(n) and n != 0), float(default))

    @property
    def dims(self) -> int:
        said = self.own("rope.dimension_count") or self.own("attention.key_length")
        width, heads = self.own("embedding_length"), self.own("attention.head_count")
        if not said and not (width and heads):
            raise UserError(
                "the GGUF keys have no rope.dimension_count, nor embedding_length and "
                "attention.head_count: give those of a whole file."
            )
        return int(said or width // heads)

    @property
    def context(self) -> int:
        return int(self.own("context_length") or 512)

    @property
    def original(self) -> int:
        name = "rope.scaling.original_context_length"
        return int(self.number("--yarn-orig-ctx", name, default=self.context))

    @property
    def kind(self) -> str:
        return str(self.keys.get("--rope-scaling") or self.scaling("type") or "linear")

    @property
    def factor(self) -> float:
        if is_number(by := self.keys.get("--rope-freq-scale")):
            return 1 / by
        names = ("rope.scaling.factor", "rope.scale_linear")
        return 1.0 if self.kind == "none" else self.number("--rope-scale", *names, default=1)

    def tensor(self, name: str) -> tuple[float, ...] | None:
        values = self.keys.get(name)
        return tuple(map(float, values)) if values is not None else None


def _computed(file: _File, version: str | None, *, heeding: bool) -> Effective:
    length = _length(file)
    try:
        parts, traps = _frequencies(file, heeding)
        divisors, more = _divisors(file, length, heeding)
    except UserError as mistake:
        raise Refused("out of range") from mistake
    base = file.number("--rope-freq-base", "rope.freq_base", default=10000)
    read = Read({}, {}, base, file.dims)
    gain, dead = _attention(file, version, heeding)
    found = computed(
        read, parts, attention=gain, length=length, traps=[*traps, *more, *dead, *_asked(file)]
    )
    if len(divisors or found.inv_freq) != len(found.inv_freq):
        raise Refused("wrong list")
    divided = found.inv_freq
    if divisors:
        divided = _over(file, parts, read, divisors, length)
    return Effective(divided, found.attention, found.length, found.traps)


def _over(
    file: _File, parts: Frequencies, read: Read, divisors: tuple[float, ...], length: int
) -> tuple[float, ...]:
    """Frequencies over divisors: the ramp of YaRN is by pair, so it commutes with them."""
    inv = parts.inv_freq(read.dims, float(read.base or 0), length).tolist()
    return tuple(f / g for f, g in zip(inv, divisors, strict=True))


def _frequencies(file: _File, heeding: bool) -> tuple[Frequencies, list[str]]:
    if file.kind != "yarn":
        return (Linear(file.factor) if file.factor != 1 else Unscaled()), []
    heeded = heeding or file.arch in READS_ALL
    ends, traps = {}, []
    for end, usual in (("fast", 32.0), ("slow", 1.0)):
        key = f"yarn_beta_{end}"
        names = (f"rope.scaling.{key}",) if heeded else ()
        ends[end] = file.number(f"--yarn-beta-{end}", *names, default=usual)
        if not heeded and file.scaling(key) not in (None, ends[end]):
            traps = ["dead betas"]
    return Yarn(file.factor, original=file.original, **ends), traps


def _divisors(
    file: _File, length: int, heeding: bool
) -> tuple[tuple[float, ...] | None, list[str]]:
    """The divisors that are loaded: one list for all lengths, or one of two by the context."""
    fixed, near, far = map(file.tensor, (DIVISORS, NEAR, FAR))
    typed = file.kind == "longrope"
    listed = file.arch in LOADS_LISTS and (typed or file.arch in UNTYPED)
    single = file.arch in LOADS_DIVISORS and not typed
    if not heeding and ((fixed and not single) or (far and not listed)):
        raise Refused("tensor not loaded")
    if fixed:
        return fixed, []
    if near and far:
        lists = LongRope(near, far, original=file.original)
        switch = ["longrope switch"] if near != far else []
        return (lists.long if length > file.original else lists.short), switch
    return None, []


def _attention(file: _File, version: str | None, heeding: bool) -> tuple[float, list[str]]:
    own = float(file.scaling("attn_factor", 1.0))
    key = "rope.scaling.yarn_attn_factor"
    heeded = heeding or file.arch in READS_ALL
    asked = file.number("--yarn-attn-factor", *([key] if heeded else []), default=1)
    dead = ["dead attention key"] * (not heeded and file.own(key) not in (None, 1.0))
    if file.kind != "yarn":
        return own * asked, dead
    said = magnitude(file.factor)
    if heeding or before(version, "b7394"):
        return own * asked * said, dead
    bottom = float(file.scaling("yarn_log_multiplier", 0.0))
    over = ["dead attention key"] * (asked != 1)
    return own * said / magnitude(file.factor, bottom), [*dead, *over]


def _length(file: _File) -> int:
    asked = file.keys.get("-c", file.keys.get("--ctx-size", file.keys.get("num_ctx")))
    return int(min(asked or file.context, file.context))


def _asked(file: _File) -> list[str]:
    asked = file.keys.get("-c", file.keys.get("--ctx-size", file.keys.get("num_ctx")))
    silent = file.kind == "yarn" and file.original == file.context and math.isfinite(file.factor)
    capped = is_number(asked) and asked > file.context
    return ["context cap"] * capped + ["other original"] * (silent and file.factor != 1)
