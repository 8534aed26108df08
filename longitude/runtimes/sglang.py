"""SGLang: as vLLM it has one table, but other keys, another length, and merges what it is told.

sglang/srt/layers/rotary_embedding/, sglang/srt/utils/hf_transformers/ of 0.5.23. Its context is the
maximum times the factor, unless an original length or llama3 says that it is inside. Dictionaries
of `--json-model-override-args` are merged into those of the file; before 0.5.23 they replaced them.

SGLang: `--json-model-override-args`, which replaces the whole dictionary.

It drops transformers' attention_factor and multiplies YaRN's own by `attn_factor`. The length is
max_position_embeddings, for linear times its factor.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, main_rope_dict
from longitude.parts import Ntk
from longitude.runtimes.effective import (
    Effective,
    Read,
    Refused,
    before,
    computed,
    frequencies,
    longrope_attention,
    yarn_attention,
)
from longitude.runtimes.rope_dictionaries import by_attn_factor, placed
from longitude.runtimes.settings import Model, Spelling
from longitude.runtimes.target import Wanted
from longitude.runtimes.transformers import THETA, version5
from longitude.runtimes.vllm import by_server, whole_number_stops

KEYS = ("rope_scaling", "rope_parameters")


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What a server of SGLang computes."""
    read = _held(config, version)
    length = _length(read, config)
    twice = read.kind == "linear" and config.get("--context-length") is None
    read = read.trapped("length counted twice" if twice else None)
    match read.kind:
        case "linear":
            whole_number_stops(read)
            return computed(read, frequencies(read), length=length)
        case "dynamic":
            alpha, factor = read.maybe("alpha"), read.number("factor", 1.0)
            grown = factor * factor - (factor - 1) if alpha is None else alpha
            return computed(read, Ntk(grown), length=length, traps=["dynamic is static"])
        case "yarn":
            ignored = read.maybe("attention_factor") is not None
            return computed(
                read,
                frequencies(read),
                attention=yarn_attention(read, explicit=False) * read.number("attn_factor", 1.0),
                length=length,
                traps=["attention factor ignored"] * ignored,
            )
        case "longrope":
            own = longrope_attention(read, read.most / read.number(ORIGINAL))
            gain = read.number("long_mscale", own)
            return computed(
                read, frequencies(read), attention=gain, length=length, traps=by_server(read)
            )
    return computed(read, frequencies(read), length=length)


def _held(config: Mapping[str, Any], version: str | None) -> Read:
    told = dict(config.get("--json-model-override-args") or {})
    told = dict(told.get("text_config", told))
    if not before(version, "0.5.23"):
        there = version5(config)
        for key in KEYS:
            if isinstance(told.get(key), Mapping):
                told[key] = {**there.own, **main_rope_dict(told[key])}
    read = version5(config, told)
    if str(read.text.get("model_type")).startswith("gemma3") and read.kind != "default":
        read = read.having(rope_type="default", factor=None).trapped("full layers unscaled")
    if read.base is None:
        left = tuple(name for name in read.traps if name != "no theta")
        return Read(read.text, read.own, THETA, read.dims, (*left, "theta dropped"))
    return read


def _length(read: Read, config: Mapping[str, Any]) -> int:
    inside = ORIGINAL in read.own or read.kind == "llama3"
    most = int(read.most * (1 if inside else read.number("factor", 1.0)))
    asked = config.get("--context-length")
    if asked is not None and asked > most:
        raise Refused("length refused")
    return int(asked or most)


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in by_attn_factor(w, model.config, "attention_factor"):
        linear = parameters["rope_type"] == "linear"
        most = math.ceil(w.target / parameters["factor"]) if linear else w.target
        entries = {"max_position_embeddings": most, "rope_scaling": parameters}
        overrides = placed(model.config, entries)
        given = {"--json-model-override-args": overrides, "--context-length": w.target}
        settings = {**model.config, **given}
        yield Spelling("sglang", version, settings, _text(w, model, overrides), "sglang.sh")


def _text(w: Wanted, model: Model, overrides: dict[str, Any]) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model.name)} "
        f"--context-length {w.target} --json-model-override-args "
        f"{shlex.quote(json.dumps(overrides))}\n"
    )
