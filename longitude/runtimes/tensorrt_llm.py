"""TensorRT-LLM: `rope_scaling` with `type` before `rope_type`, and no `attention_factor`.

Source: tensorrt_llm/_torch/attention_backend/interface.py, RopeParams.from_config, of 1.2. The
original length is 1,024 by default. YaRN's factor on cosine and sine is mscale's; LongRoPE's comes
from the lengths. "dynamic" takes an `alpha` that stretches the base once, 1 by default. An export
is `model_kwargs` in the YAML file of its server, which override the checkpoint's config.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, main_rope_dict, rope_type
from longitude.parts import Ntk, Unscaled
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import Effective
from longitude.runtimes.mlx import yarn_by_mscale
from longitude.runtimes.rope_dictionaries import by_mscale, equal_lengths, listed, nested, yaml
from longitude.runtimes.target import Target
from longitude.runtimes.transformers import overridden, version5

FILE = "tensorrt-llm.yaml"


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    overrides = config.get("model_kwargs") or {}
    overrides = overrides.get("text_config", overrides)  # nested configurations are merged
    rope, own = version5(overridden(config, overrides, "model_kwargs")), version5(config)
    given_base = any(isinstance(v, Mapping) and v.get("rope_theta") for v in overrides.values())
    rope = rope.noting("theta dropped" if rope.base != own.base and not given_base else None)
    new = main_rope_dict(overrides.get("rope_scaling") or overrides.get("rope_parameters"))
    kind = rope.entries.get("type") or (rope_type(new) if new else rope.kind)
    rope = rope.updated(rope_type=kind, **{ORIGINAL: rope.number(ORIGINAL, 1024)})
    length = int(config.get("max_seq_len") or rope.max_length)
    match kind:
        case "yarn":
            return yarn_by_mscale(rope.updated(factor=rope.number("factor", 1.0)), length, [])
        case "longrope":
            at = config.get("max_seq_len") or rope.number(ORIGINAL) + 1
            plain = rope.updated(attention_factor=None, factor=None)
            return plain.computed(length, at=at, issues=["attention factor ignored"])
        case "dynamic":
            alpha = rope.optional("alpha") or 1.0
            frequencies = Unscaled() if alpha == 1 else Ntk(alpha)
            return rope.computed(length, frequencies, issues=["dynamic is static"])
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope = rope.updated(**{**bounds, **rope.entries})
    return rope.computed(length)


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield `model_kwargs` with a named rope type, or with a list of factors."""
    for parameters in (*by_mscale(target), *listed(target), *equal_lengths(target)):
        entries = {
            "max_position_embeddings": target.length,
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": parameters,
        }
        settings = {"model_kwargs": nested(model.config, entries)}
        command = f"# trtllm-serve {shlex.quote(model.name)} --max_seq_len {target.length} "
        text = f"{command}--extra_llm_api_options {FILE}\n{yaml(settings)}"
        yield Settings({**model.config, **settings, "max_seq_len": target.length}, text)


RUNTIME = Runtime(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    versions=("1.2",),
    emulate=emulate,
    write=write,
    rank=9,
    file=FILE,
    advice="vllm",
    lints=("config.json",),
    overrides="model_kwargs",
    lengths=("max_seq_len",),
)
