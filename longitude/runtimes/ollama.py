"""Ollama: a new GGUF file and a Modelfile, which has had no parameters for rotation since 2024.

It runs llama.cpp without flags. `num_ctx` is limited to the file's own context_length, which the
new file raises. If no Modelfile sets it, Ollama chooses a context by the available memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longitude.runtimes import Runtime, Settings, llama_cpp
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import Effective
from longitude.runtimes.gguf import changes
from longitude.runtimes.target import Target


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """Emulate llama.cpp without its flags."""
    effective = llama_cpp.emulate({k: v for k, v in config.items() if not k.startswith("-")})
    issues = [] if "num_ctx" in config else ["context of its own"]
    return replace(effective, issues=(*effective.issues, *issues))


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield the keys and tensors of a new file."""
    header = llama_cpp.gguf_header(RUNTIME, model)
    yield Settings({**changes(header, target).applied(header), "num_ctx": target.length})


RUNTIME = Runtime(
    name="ollama",
    title="Ollama",
    versions=("0.33",),
    emulate=emulate,
    write=write,
    rank=6,
    start="FROM ./{name}\nPARAMETER num_ctx {target}\n",
    file="Modelfile",
    reads="gguf",
    writes="gguf",
    advice="llama.cpp",
    lints=("gguf",),
    lengths=("num_ctx",),
)
