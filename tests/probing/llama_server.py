"""llama.cpp's own server on loopback, through xllamacpp: a program of its own.

    python llama_server.py '{"path": …, "n_ctx": 512, …}'

Further entries are llama.cpp's parameters by their names in xllamacpp; enumerations by name. It
prints its address, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ENUMS = {
    "rope_scaling_type": "llama_rope_scaling_type",
    "cache_type_k": "ggml_type",
    "cache_type_v": "ggml_type",
    "flash_attn_type": "llama_flash_attn_type",
}


def serve(settings: dict[str, Any]) -> None:
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = settings.pop("path")
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel, params.n_gpu_layers = 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = params.fit_params = params.ctx_shift = False
    for name, value in settings.items():
        kind = ENUMS.get(name)
        setattr(params, name, getattr(getattr(llama, kind), value) if kind else value)
    server = llama.Server(params)
    print(f"\nat {server.listening_address}", flush=True)
    sys.stdin.read()
    os._exit(0)  # its threads do not join


@contextmanager
def llama_server(path: Path, **settings: Any) -> Iterator[str]:
    """The URL of a server for a GGUF file."""
    exact = {
        "cache_type_k": "GGML_TYPE_F32",
        "cache_type_v": "GGML_TYPE_F32",
        "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
    }
    given = json.dumps({"path": str(path), **exact, **settings})
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, __file__, given]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = next((line for line in process.stdout if line.startswith("at ")), "")
            assert line, "llama.cpp did not start"
            address = line.removeprefix("at ").strip()
            yield f"{address if address.startswith('http') else f'http://{address}'}/v1"
        finally:
            process.stdin.close()
            process.wait(20)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
