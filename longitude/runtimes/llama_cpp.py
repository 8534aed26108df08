"""llama.cpp: keys of a GGUF file, divisor tensors beside its weights, flags that override both.

Source: src/llama-context.cpp, src/llama-model.cpp and ggml/src/ggml-cpu/ops.cpp of b11549. A pair
rotates at θ / g, with g from `rope_freqs.weight`. Type linear multiplies that by 1/factor; type
yarn ramps between both as in transformers, with 0.1 ln s + 1 on cosine and sine, times
`attn_factor`. The keys `yarn_attn_factor` and `yarn_beta_*` are read for two architectures only.
The flags for the betas work; since b7394 the flag for the factor works only without YaRN. The
loader stops at an unexpected tensor: both lists of longrope need type longrope, whose factor then
divides once more. A server limits each slot to `context_length`.

A config.json is read as convert_hf_to_gguf.py (conversion/ of b11549) writes it: `rope_parameters`
precedes `rope_scaling`; longrope becomes two tensors for four architectures, llama3 one for those
that load it, with the original length beside the dictionary or 8,192. For all others both are
dropped silently, as is "dynamic", except Hunyuan's, whose alpha becomes a base. `mscale_all_dim` is
written for DeepSeek's and Ministral 3's architectures only (`yarn_log_multiplier`).

An export is flags for the unchanged file. They can set a base, linear, and yarn with betas; a
factor on cosine and sine is set as a key (`--override-kv`). All else needs a new file: gguf.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.gguf_reader import Header
from longitude.hf.rope_config import ORIGINAL, is_number
from longitude.parts import GroupAttention, LongRope
from longitude.parts.frequencies import magnitude, powers, stretched
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint, layer_bases
from longitude.runtimes.effective import DoesNotStart, Effective, RopeEntries, before
from longitude.runtimes.rope_dictionaries import default_attention, typed_dictionary
from longitude.runtimes.target import Target, text_config
from longitude.runtimes.transformers import version5

READS_ALL_KEYS = ("grok", "mistral3")
# architectures whose loader expects divisors; qwen2, qwen3, gemma3 and most others do not
LOADS_DIVISORS = frozenset(
    "llama mistral3 granite granitemoe granitehybrid exaone exaone4 exaone-moe minicpm arcee "
    "apertus deci falcon-h1 gemma4 llama4 refact step35".split()
)
LOADS_LISTS = frozenset(
    "llama phi3 phimoe minicpm minicpm3 granite granitemoe granitehybrid mistral3".split()
)
LOADS_LISTS_OF_ANY_TYPE = ("phi3", "phimoe", "minicpm3")
WRITES_LISTS = ("phi3", "phimoe", "minicpm", "minicpm3")  # by the converter
LATENT = ("deepseek2", "deepseek32", "mistral4")  # their yarn_log_multiplier is mscale_all_dim / 10
# architectures by transformers' model types, if the names differ
ARCHITECTURES: dict[str, str] = dict.fromkeys(("mistral", "mixtral"), "llama")
ARCHITECTURES |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), "deepseek2")
ARCHITECTURES |= {"deepseek_v32": "deepseek32", "ministral3": "mistral3", "llama4_text": "llama4"}
ARCHITECTURES |= {"granitemoehybrid": "granitehybrid", "granitemoeshared": "granitemoe"}
ARCHITECTURES |= {"falcon_h1": "falcon-h1", "exaone_moe": "exaone-moe", "gemma4_text": "gemma4"}
HUNYUAN_CONTEXT = 1 << 18  # whatever its file says
DIVISORS, SHORT, LONG = (f"rope_{n}.weight" for n in ("freqs", "factors_short", "factors_long"))
FLAGS = {"factor": "--rope-scale", ORIGINAL: "--yarn-orig-ctx"}
FLAGS |= {"beta_fast": "--yarn-beta-fast", "beta_slow": "--yarn-beta-slow"}
CONTEXT = ("-c", "--ctx-size", "num_ctx")


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """Emulate a GGUF file's keys and flags, or a config.json as the converter writes it."""
    if "general.architecture" in config:
        return from_keys(config, version)
    keys, rope = converted(config), version5(config)
    effective, written = from_keys(keys, version), keys.keys() & {DIVISORS, LONG}
    lost = {
        "dynamic": ["dynamic is static"],
        "longrope": ["attention factor ignored" if written else "not converted"],
        "llama3": ["other original" if written else "not converted"],
        "yarn": rope.ignoring("truncate", "attention_factor", "mscale"),
    }
    return replace(effective, issues=(*effective.issues, *lost.get(rope.kind, ())))


def converted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and rotary tensors that the converter would write, by name."""
    text = text_config(config)
    parameters = text.get("rope_parameters")
    rope = version5({k: v for k, v in text.items() if k != "rope_scaling"} if parameters else text)
    model_type = str(text.get("model_type", "llama"))
    arch = ARCHITECTURES.get(model_type, model_type)
    base, context = rope.base, rope.max_length
    scaling: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    match rope.kind:
        case "dynamic" if model_type.startswith("hunyuan") and (alpha := rope.optional("alpha")):
            base, context = stretched(float(base or 0), alpha, rope.dims), HUNYUAN_CONTEXT
        case "linear":
            scaling = {"type": "linear", "factor": rope.number("factor")}
        case "yarn":
            betas = {f"yarn_{k}": rope.entries.get(k) for k in ("beta_fast", "beta_slow")}
            scaling = {key: value for key, value in betas.items() if value}
            if (gain := rope.optional("attention_factor")) is not None:
                scaling["yarn_attn_factor"] = gain
            scaling |= {"type": "yarn", "factor": rope.number("factor")}
            scaling["original_context_length"] = int(rope.number(ORIGINAL))
            if (bottom := rope.optional("mscale_all_dim")) and arch in (*LATENT, "mistral3"):
                scaling["yarn_log_multiplier"] = bottom / 10 if arch in LATENT else bottom
        case "longrope":
            scaling = {"type": "longrope"}
            if arch.startswith("phi"):
                gain = rope.attention("attention_factor", "factor")
                original = int(rope.number(ORIGINAL))
                scaling |= {"attn_factor": gain, "original_context_length": original}
            if arch in WRITES_LISTS:
                lists = {SHORT: "short_factor", LONG: "long_factor"}
                tensors = {name: list(rope.entries[key]) for name, key in lists.items()}
        case "llama3" if arch in LOADS_DIVISORS:
            written = rope.updated(**{ORIGINAL: text.get(ORIGINAL, 8192)})
            scaled = written.frequencies().inv_freq(rope.dims, base or 0.0, context)
            tensors = {DIVISORS: (1 / (scaled * powers(rope.dims, base or 0.0))).tolist()}
    entries = {
        "context_length": context,
        "rope.dimension_count": rope.dims,
        "rope.freq_base": base,
        **{f"rope.scaling.{key}": value for key, value in scaling.items()},
    }
    flags = {k: v for k, v in config.items() if k.startswith("-") or k in CONTEXT}
    keys = {f"{arch}.{key}": value for key, value in entries.items()}
    return {"general.architecture": arch, **keys, **tensors, **flags}


class _File:
    """Access to the keys of a GGUF file by their short names, and to flags. With `literal`,
    every key counts, whether llama.cpp reads it or not."""

    def __init__(self, keys: Mapping[str, Any], literal: bool) -> None:
        self.keys, self.arch = keys, str(keys.get("general.architecture"))
        self.literal, self.reads_all = literal, literal or self.arch in READS_ALL_KEYS
        self.kind = str(keys.get("--rope-scaling") or self.scaling("type") or "linear")
        self.context = int(self.own("context_length") or 512)
        name = "rope.scaling.original_context_length"
        self.original = int(self.number("--yarn-orig-ctx", name, default=self.context))
        self.requested = next((keys[name] for name in CONTEXT if name in keys), None)
        self.length = int(min(self.requested or self.context, self.context))
        factor = self.number("--rope-scale", "rope.scaling.factor", "rope.scale_linear", default=1)
        scale = keys.get("--rope-freq-scale")
        self.factor = 1 / scale if is_number(scale) else 1.0 if self.kind == "none" else factor

    def own(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.arch}.{name}", default)

    def scaling(self, name: str, default: Any = None) -> Any:
        return self.own(f"rope.scaling.{name}", default)

    def number(self, flag: str, *names: str, default: float) -> float:
        """Return a number from its flag, or else from the first of its keys that is set."""
        candidates = [self.keys.get(flag), *(self.own(name) for name in names)]
        return next((float(n) for n in candidates if is_number(n) and n != 0), float(default))

    @property
    def dims(self) -> int:
        stated = self.own("rope.dimension_count") or self.own("attention.key_length")
        width, heads = self.own("embedding_length"), self.own("attention.head_count")
        if not stated and not (width and heads):
            raise UserError(
                "the GGUF keys have no rope.dimension_count, nor embedding_length and "
                "attention.head_count: give those of a complete file."
            )
        return int(stated or width // heads)


def from_keys(
    keys: Mapping[str, Any], version: str | None = None, *, literal: bool = False
) -> Effective:
    """Return what llama-server computes from keys and flags, or if `literal`, what they mean."""
    file = _File(keys, literal)
    entries: dict[str, Any] = {"rope_type": "linear", "factor": file.factor}
    dead_betas = []
    if file.kind == "yarn":
        entries |= {"rope_type": "yarn", ORIGINAL: file.original}
        for end, default in (("fast", 32.0), ("slow", 1.0)):
            key = f"yarn_beta_{end}"
            names = (f"rope.scaling.{key}",) if file.reads_all else ()
            bound = file.number(f"--yarn-beta-{end}", *names, default=default)
            entries[f"beta_{end}"] = bound
            if not file.reads_all and file.scaling(key) not in (None, bound):
                dead_betas = ["dead betas"]
    divisors, switch = _divisors(file)
    gain, unread = _attention(file, version)
    capped = is_number(file.requested) and file.requested > file.context
    scaled = math.isfinite(file.factor) and file.factor != 1
    no_original = file.kind == "yarn" and file.original == file.context and scaled
    about_length = ["context cap"] * capped + ["other original"] * no_original
    base = file.number("--rope-freq-base", "rope.freq_base", default=10000)
    rope = RopeEntries({}, entries, base, file.dims, (*dead_betas, *switch, *unread, *about_length))
    undivided = rope.computed(file.length, attention=gain)
    if not divisors:
        return undivided
    if len(divisors) != len(undivided.inv_freq):
        raise DoesNotStart("wrong list")
    # YaRN's ramp depends on the pair only, so it commutes with divisors
    divided = (f / g for f, g in zip(undivided.inv_freq, divisors, strict=True))
    return replace(undivided, inv_freq=tuple(divided))


def _divisors(file: _File) -> tuple[tuple[float, ...], list[str]]:
    """Return the divisors that are loaded (of two lists, those for the context), and issues."""
    tensors = [file.keys.get(name) for name in (DIVISORS, SHORT, LONG)]
    fixed, short, long = (None if t is None else tuple(map(float, t)) for t in tensors)
    typed = file.kind == "longrope"
    listed = file.arch in LOADS_LISTS and (typed or file.arch in LOADS_LISTS_OF_ANY_TYPE)
    single = file.arch in LOADS_DIVISORS and not typed
    if not file.literal and ((fixed and not single) or (long and not listed)):
        raise DoesNotStart("tensor not loaded")
    if fixed or not (short and long):
        return fixed or (), []
    try:
        LongRope(short, long, original=file.original)
    except UserError as error:
        raise DoesNotStart("out of range") from error
    chosen = long if file.length > file.original else short
    return chosen, ["longrope switch"] * (short != long)


def _attention(file: _File, version: str | None) -> tuple[float, list[str]]:
    gain, key = float(file.scaling("attn_factor", 1.0)), "rope.scaling.yarn_attn_factor"
    factor = file.number("--yarn-attn-factor", *([key] if file.reads_all else []), default=1)
    unread = ["dead attention key"] * (not file.reads_all and file.own(key) not in (None, 1.0))
    if file.kind != "yarn":
        return gain * factor, unread
    bottom = float(file.scaling("yarn_log_multiplier", 0.0)) * (10 if file.arch in LATENT else 1)
    top = bottom if file.arch == "deepseek2" and bottom else 1.0  # DeepSeek V2's mscales are equal
    gain *= magnitude(file.factor, top) / magnitude(file.factor, bottom)
    if file.literal or before(version, "b7394"):
        return gain * factor, unread
    return gain, unread + ["dead attention key"] * (factor != 1)


def gguf_header(runtime: Runtime, model: Checkpoint) -> Header:
    """Return the header of the model's file; raises unless it is a GGUF file."""
    if model.header is None:
        raise UserError(
            f"{runtime.title} serves a GGUF file, but got {shown(model.name)}: give one, or make "
            f"one with llama.cpp's convert_hf_to_gguf.py."
        )
    return model.header


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield flags if they suffice; a file that has divisors must be written anew."""
    header = gguf_header(RUNTIME, model)
    entries = typed_dictionary(target) or {}
    kind = {"default": "none", "linear": "linear", "yarn": "yarn"}.get(entries.get("rope_type", ""))
    if kind is None or not entries.get("truncate", True) or header.divisors:
        return
    if kind == "yarn" and layer_bases(header):  # its factor would apply to windowed layers, too
        return
    flags = {"-c": target.length, "--rope-freq-base": entries["rope_theta"]}
    flags |= {"--rope-scaling": kind}
    flags |= {FLAGS[key]: value for key, value in entries.items() if key in FLAGS}
    keys: dict[str, Any] = {f"{header.architecture}.context_length": target.length}
    gain = target.attention / default_attention(target)
    if abs(gain - 1) > 1e-9:
        keys[f"{header.architecture}.rope.scaling.attn_factor"] = gain
    arguments = [str(word) for pair in flags.items() for word in pair]
    typed = (f"{k}={'int' if isinstance(v, int) else 'float'}:{v}" for k, v in keys.items())
    command = ["llama-server", "-m", model.name, *arguments, "--override-kv", ",".join(typed)]
    yield Settings({**header.keys, **keys, **flags}, shlex.join(command) + "\n")


def group_attention(scheme: Scheme, own: Scheme | None) -> str:
    """Describe the flags of llama-completion for the only remap it supports. llama-server lost them
    in October 2024 (PR 9860)."""
    remap = scheme.rotary.remap if scheme.rotary else None
    if not isinstance(remap, GroupAttention) or scheme.rotary is None or own is None:
        return ""
    if replace(scheme, rotary=replace(scheme.rotary, remap=None)) != own:
        return ""
    flags = f"--grp-attn-n {remap.group} --grp-attn-w {remap.window}"
    return (
        f"llama-server can't group positions, llama-completion computes it with {flags} and a "
        f"batch that divides {remap.window} (-b); otherwise "
    )


RUNTIME = Runtime(
    name="llama.cpp",
    title="llama.cpp",
    versions=("b7000", "b11549"),
    emulate=emulate,
    write=write,
    rank=4,
    file="llama.cpp.sh",
    reads="gguf",
    layers="full",
    lints=("config.json", "gguf"),
    lengths=CONTEXT[:2],
    no_settings="its flags can't express it; a new file, written by --for gguf, may",
    verified_as="gguf",
    other_tools=group_attention,
)
