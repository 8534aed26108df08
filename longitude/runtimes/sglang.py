"""SGLang: one cosine table as in vLLM, but other keys, another length, and merged overrides.

Source: sglang/srt/layers/rotary_embedding/ and sglang/srt/utils/hf_transformers/ of 0.5.23. The
context is the maximum times the factor, unless an original length or type llama3 implies that the
maximum includes it. Dictionaries of `--json-model-override-args` are merged into the file's; before
0.5.23 they replaced them. SGLang drops `attention_factor` and multiplies YaRN's own factor by
`attn_factor`. Only SGLang has dual chunk attention (dual_chunk_flashattention_backend.py), which
vLLM removed in 0.11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, is_number, main_rope_dict
from longitude.parts import Ntk
from longitude.runtimes import Runtime, Settings, vllm
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import DoesNotStart, Effective, RopeEntries, before
from longitude.runtimes.rope_dictionaries import by_attn_factor, started, unmultiplied
from longitude.runtimes.target import Target, text_config
from longitude.runtimes.transformers import version5

# the first of these that is set is the length
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length")
LENGTHS += ("max_position_embeddings", "n_positions")


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    rope = _read(config, version)
    included = ORIGINAL in rope.entries or rope.kind == "llama3"
    stated = next(filter(is_number, map(rope.config.get, LENGTHS)), 2048)
    length = int(stated * (1 if included else rope.number("factor", 1.0)))
    requested = config.get("--context-length")
    if requested is not None and requested > length:
        raise DoesNotStart("length refused")
    length = int(requested or length)
    twice = rope.kind == "linear" and requested is None
    vllm.refuse_sections(rope)
    rope = rope.noting("length counted twice" if twice else None)
    match rope.kind:
        case "linear":
            vllm.refuse_integer_factor(rope)
        case "dynamic":
            alpha, factor = rope.optional("alpha"), rope.number("factor", 1.0)
            grown = factor * factor - (factor - 1) if alpha is None else alpha
            return rope.computed(length, Ntk(grown), issues=["dynamic is static"])
        case "yarn":
            gain = rope.attention("attention_factor") * rope.number("attn_factor", 1.0)
            return rope.computed(length, attention=gain, issues=rope.ignoring("attention_factor"))
        case "longrope":
            gain = rope.number("long_mscale", rope.attention("attention_factor", "factor"))
            return rope.computed(length, attention=gain, issues=vllm.longrope_issues(rope))
    return rope.computed(length)


def _read(config: Mapping[str, Any], version: str | None) -> RopeEntries:
    overrides = dict(config.get("--json-model-override-args") or {})
    overrides = dict(overrides.get("text_config", overrides))
    if not before(version, "0.5.23"):
        own = version5(config).entries
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(overrides.get(key), Mapping):
                overrides[key] = {**own, **main_rope_dict(overrides[key])}
    rope = version5(config, overrides)
    if str(rope.config.get("model_type")).startswith("gemma3") and rope.kind != "default":
        rope = rope.updated(rope_type="default", factor=None).noting("full layers unscaled")
    return vllm.without_theta(rope) if rope.base is None else rope


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield `--json-model-override-args` with a named rope type, or with a list of factors."""
    for parameters in by_attn_factor(target, "attention_factor"):
        longest = unmultiplied(target, parameters)
        text = text_config(model.config)
        entries: dict[str, Any] = {"max_position_embeddings": longest, "rope_scaling": parameters}
        entries |= {key: longest for key in LENGTHS if is_number(text.get(key))}
        yield started(RUNTIME, target, model, entries)


RUNTIME = Runtime(
    name="sglang",
    title="SGLang",
    versions=("0.5.10", "0.5.23"),
    emulate=emulate,
    write=write,
    rank=3,
    start="python -m sglang.launch_server --model-path {folder} --context-length {target}\n",
    file="sglang.sh",
    supports=frozenset({"fixed", "proportional", "learned_table"}),
    lints=("config.json",),
    overrides="--json-model-override-args",
    lengths=("--context-length",),
    dual_chunk=lambda version: True,
)
