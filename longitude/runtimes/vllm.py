"""vLLM: the configuration as transformers 5 holds it, one table of cosines for the whole server.

vllm/model_executor/layers/rotary_embedding/, vllm/config/model.py of 0.32.0. Dictionaries of
`--hf-overrides` are set after transformers has filled in what is missing, and replace the whole:
a theta that is left out is 10,000. Before 0.32 YaRN read `attn_factor`, a multiple of 0.1 ln s + 1,
in place of `attention_factor` and the mscales.

vLLM: `--hf-overrides`, which replaces the whole dictionary: every entry stands in it.

`linear` multiplies max_position_embeddings by its factor, the other types don't. Longrope's factor
on cosine and sine goes under names of vLLM's own; YaRN's under two, since older versions multiply
theirs and drop transformers'. A tokenizer that ends before the target would cut the length.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, is_number, main_rope_dict
from longitude.parts import Ntk, Unscaled
from longitude.parts.frequencies import magnitude
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
from longitude.runtimes.rope_dictionaries import by_attn_factor, layered, placed
from longitude.runtimes.settings import TOKENIZER, Entries, Model, Spelling, refuse_before
from longitude.runtimes.target import Wanted
from longitude.runtimes.transformers import THETA, version5

SCALED_ALREADY = ("longrope", "llama3", "yarn")  # the maximum is not multiplied by their factor


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What a server of vLLM computes."""
    read = _held(config)
    length = _length(read, config, version)
    read = read.trapped(*_about_length(read, config))
    match read.kind:
        case "linear":
            whole_number_stops(read)
            return computed(read, frequencies(read), length=length)
        case "dynamic":
            return _dynamic(read, length)
        case "yarn":
            return _yarn(read, length, version)
        case "longrope":
            return _longrope(read, length)
    return computed(read, frequencies(read), length=length)


def whole_number_stops(read: Read) -> None:
    """Linear scaling takes a list of factors or a float, and a whole number for neither."""
    if isinstance(read.own.get("factor"), int):
        raise Refused("whole number")


def _held(config: Mapping[str, Any]) -> Read:
    """The configuration with what the server was told put in its place."""
    told = config.get("--hf-overrides") or {}
    told = told.get("text_config", told)
    new = main_rope_dict(told.get("rope_parameters") or told.get("rope_scaling") or {})
    read = version5(config, told)
    if not new or new.get("rope_theta") is not None:
        return read
    if "rope_scaling" in told:  # its setter of transformers fills in a theta of None
        raise Refused("no theta")
    if not new.get("rope_type") or (read.kind in SCALED_ALREADY and not new.get(ORIGINAL)):
        raise Refused("missing key")
    left = tuple(name for name in read.traps if name != "no theta")
    return Read(read.text, read.own, THETA, read.dims, (*left, "theta dropped"))


def _length(read: Read, config: Mapping[str, Any], version: str | None) -> int:
    """The longest input: the file's, not above the tokenizer's, times the factor of types that are
    not taken to have it inside; `--max-model-len` can only be shorter."""
    limit = (config.get("tokenizer_config.json") or {}).get("model_max_length")
    most = min(read.most, limit) if is_number(limit) else read.most
    old_yarn = before(version, "0.32") and read.kind == "yarn"
    if old_yarn:
        most = read.number(ORIGINAL) * read.number("factor")
    elif read.kind not in SCALED_ALREADY and "gemma3" not in str(read.text.get("model_type")):
        most = most * (read.maybe("factor") or 1.0)
    asked = config.get("--max-model-len")
    if asked is None:
        beside = read.text.get(ORIGINAL)
        return int(beside if read.kind == "longrope" and beside else most)
    if asked > most and asked > (read.text.get("model_max_length") or 0):
        raise Refused("length refused")
    return int(asked)


def _about_length(read: Read, config: Mapping[str, Any]) -> list[str]:
    limit = (config.get("tokenizer_config.json") or {}).get("model_max_length")
    twice = read.kind == "linear" and config.get("--max-model-len") is None
    capped = is_number(limit) and limit < read.most
    return ["length counted twice"] * twice + ["tokenizer's length"] * capped


def _dynamic(read: Read, length: int) -> Effective:
    """One table of as many rows as the maximum, with the base of that length."""
    if (alpha := read.maybe("alpha")) is not None:
        return computed(read, Ntk(alpha), length=length)
    trained = read.number("max_trained_positions", read.most)
    factor = read.number("factor")
    grown = factor * read.most / trained - (factor - 1)
    base = Ntk(grown) if grown != 1 else Unscaled()
    return computed(read, base, length=min(length, read.most), traps=["dynamic is static"])


def _yarn(read: Read, length: int, version: str | None) -> Effective:
    if before(version, "0.32"):
        gain = magnitude(read.number("factor")) * read.number("attn_factor", 1.0)
        ignored = [read.maybe(k) for k in ("attention_factor", "mscale", "mscale_all_dim")]
        traps = ["attention factor ignored"] if any(ignored) else []
    else:
        gain, traps = yarn_attention(read), []
    rows = math.ceil(read.number(ORIGINAL) * read.number("factor"))
    return computed(
        read,
        frequencies(read),
        attention=gain,
        length=min(length, rows),
        traps=[*traps, "length past the table"] if rows < length else traps,
    )


def _longrope(read: Read, length: int) -> Effective:
    """The long list for every input where longer ones than the original are let in."""
    scale = longrope_attention(read, read.most / read.number(ORIGINAL))
    long = length > read.number(ORIGINAL)
    gain = read.number("long_mscale" if long else "short_mscale", scale)
    short = length == read.text.get(ORIGINAL) != read.most
    traps = [*by_server(read), *["longrope kept short"] * short]
    return computed(read, frequencies(read), attention=gain, length=length, traps=traps)


def by_server(read: Read) -> list[str]:
    """The traps of a longrope whose list a server chooses once."""
    switched = read.own.get("short_factor") != read.own.get("long_factor")
    ignored = read.maybe("attention_factor") is not None or read.maybe("factor") is not None
    return ["longrope switch"] * switched + ["attention factor ignored"] * ignored


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    refuse_before("vllm", version, "0.6.4", "it has no --hf-overrides yet")
    if model.kinds:
        refuse_before("vllm", version, "0.12", "it has one rotation for all types of layers yet")
    for parameters in by_attn_factor(w, model.config):
        entries = _entries(w, model, parameters, version)
        if model.limit is not None and model.limit < entries["max_position_embeddings"]:
            entries["model_max_length"] = w.target  # allows what the tokenizer's limit would not
        overrides = placed(model.config, entries)
        given = {"--hf-overrides": overrides, "--max-model-len": w.target}
        settings = {**model.config, TOKENIZER: dict(model.tokenizer), **given}
        yield Spelling("vllm", version, settings, _text(w, model, overrides), "vllm.sh")


def _entries(w: Wanted, model: Model, parameters: Entries, version: str) -> Entries:
    linear = parameters["rope_type"] == "linear"
    most = math.ceil(w.target / parameters["factor"]) if linear else w.target
    if before(version, "0.12"):  # version 5's name is not read yet
        scaling = {} if parameters["rope_type"] == "default" else {"rope_scaling": parameters}
        theta = {"rope_theta": parameters["rope_theta"]}
        return {"max_position_embeddings": most, **theta, **scaling}
    return {"max_position_embeddings": most, "rope_parameters": layered(model, parameters)}


def _text(w: Wanted, model: Model, overrides: dict[str, Any]) -> str:
    name, told = shlex.quote(model.name), shlex.quote(json.dumps(overrides))
    return f"vllm serve {name} --max-model-len {w.target} --hf-overrides {told}\n"
