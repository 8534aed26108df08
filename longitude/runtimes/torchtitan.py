"""torchtitan: `RoPE.Config` in a model's Python configuration, with `scaling` none, llama or yarn.

Source: torchtitan/models/common/rope.py of 0.3.0. It has no list of factors, and no factor on
cosine and sine: YaRN's is left to the model's code, and only DeepSeek's and gpt-oss's fold it into
the softmax scale. The settings are the fields of RoPE.Config, with `dim` and `max_seq_len`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import DoesNotStart, Effective, RopeEntries
from longitude.runtimes.rope_dictionaries import typed_dictionary
from longitude.runtimes.target import Target

# transformers' name of each `scaling`; for each field, transformers' name and the default
TYPES = {"none": "default", "llama": "llama3", "yarn": "yarn"}
FIELDS: dict[str, dict[str, tuple[str, Any]]] = {
    "none": {},
    "llama": {
        "scaling_factor": ("factor", 8.0),
        "low_freq_factor": ("low_freq_factor", 1.0),
        "high_freq_factor": ("high_freq_factor", 4.0),
        "original_max_position_embeddings": (ORIGINAL, 8192),
    },
    "yarn": {
        "rope_factor": ("factor", 1.0),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "original_seq_len": (ORIGINAL, 4096),
        "truncate": ("truncate", True),
    },
}


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    if not {"dim", "max_seq_len"} <= config.keys():
        raise DoesNotStart("missing key")
    scaling = config.get("scaling", "none")
    if scaling not in TYPES:
        raise DoesNotStart("unknown type")
    fields = FIELDS[scaling].items()
    entries = {key: config.get(name, default) for name, (key, default) in fields}
    unscaled = scaling == "yarn" and entries["factor"] <= 1
    entries["rope_type"] = "default" if unscaled else TYPES[scaling]
    rope = RopeEntries({}, entries, float(config.get("theta", 1e4)), int(config["dim"]))
    issues = ["temperature left out"] * (rope.kind == "yarn")
    return rope.computed(int(config["max_seq_len"]), attention=1.0, issues=issues)


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield the fields of RoPE.Config, if one of its three scalings fits."""
    entries = typed_dictionary(target) or {}
    scaling = next((s for s, kind in TYPES.items() if kind == entries.get("rope_type")), None)
    if scaling is None:
        return
    fields = {"dim": target.dims, "max_seq_len": target.length, "theta": entries["rope_theta"]}
    fields |= {"scaling": scaling}
    fields |= {name: entries[key] for name, (key, _) in FIELDS[scaling].items()}
    arguments = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    yield Settings(fields, f"rope = RoPE.Config({arguments})\n")


RUNTIME = Runtime(
    name="torchtitan",
    title="torchtitan",
    versions=("0.3",),
    emulate=emulate,
    write=write,
    rank=11,
    file="torchtitan.py",
    advice="vllm",
)
