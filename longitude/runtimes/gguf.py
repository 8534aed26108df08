"""GGUF for llama.cpp: a new file whose keys and rotary tensors state the scheme (`gguf_writer`).

The server cuts each request at the file's `context_length`, which is raised with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from longitude.hf.gguf_reader import header_of, read_layout
from longitude.runtimes import Runtime, Settings, llama_cpp
from longitude.runtimes.checkpoint import Model
from longitude.runtimes.gguf_writer import Changes, changes, rewrite
from longitude.runtimes.target import Target


def export_gguf(source: Path, out: Path, target: Target) -> Changes:
    """Copy a GGUF file to `out` with the settings of a scheme; what was written into it."""
    layout = read_layout(source)
    made = changes(header_of(layout), target)
    rewrite(layout, out, made.keys, made.tensors)
    return made


def write(target: Target, model: Model, version: str) -> Iterator[Settings]:
    """The keys and tensors of a new file."""
    header = llama_cpp.gguf_header(RUNTIME, model)
    yield Settings({**changes(header, target).applied(header), "-c": target.length})


RUNTIME = Runtime(
    name="gguf",
    title="llama.cpp (GGUF)",
    versions=llama_cpp.RUNTIME.versions,
    emulate=llama_cpp.emulate,
    write=write,
    issues=llama_cpp.RUNTIME.issues,
    rank=5,
    start="llama-server -m {file} -c {target}\n",
    file="gguf.sh",
    reads="gguf",
    writes="gguf",
    advice="llama.cpp",
    lengths=llama_cpp.RUNTIME.lengths,
)
