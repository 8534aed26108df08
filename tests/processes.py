"""Programs in processes of their own, without importing torch and transformers for each of them,
and the processes of a gloo group.

A server that has imported them is started once; it forks for every program that it is sent.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
# torch's pool of threads is made anew after each fork, which two threads at once can't do
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
IMPORTED = (
    "longitude.cli.measure",
    "longitude.extension.api",
    "longitude.ops.ring",
    "longitude.training.api",
    "longitude.training.tune.run",
    "transformers.models.llama.modeling_llama",
)


def python(*argv: str, timeout: int = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGV`, where ARGV begins with -m MODULE or -c CODE, in a fork of the server.

    Its imports are not those of a fresh process: a test of them starts one itself.
    """
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        said = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        request = {"argv": argv, "timeout": timeout, "env": env, "said": said}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        ran = subprocess.CompletedProcess(argv, status, *(Path(s).read_text() for s in said))
    if status == -signal.SIGSEGV:  # seen once: a fork may crash where a fresh process does not
        print(f"{argv} crashed in a fork: {ran.stderr}")
        return subprocess.run([sys.executable, *argv], env=env, timeout=timeout, text=True,
                              capture_output=True, check=False)  # fmt: skip
    return ran


@cache
def _server() -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__]
    server = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
    atexit.register(server.communicate)  # without requests it ends
    return server


def _serve() -> None:
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    sys.modules["longitude.hf.device"].has_bfloat16 = lambda: False  # type: ignore[attr-defined]
    gc.freeze()  # no fork searches or copies what was imported
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(argv: list[str], timeout: int, env: dict[str, str], said: list[str]) -> NoReturn:
    """Run a program in this process, and end."""
    signal.alarm(timeout)
    os.environ.clear()
    os.environ.update(env)
    for fd, path in enumerate([os.devnull, *said]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), fd)
    faulthandler.enable()
    kind, program, *rest = argv
    sys.argv = [program, *rest]
    status = 0
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def ranks(count: int) -> Iterator[Any]:
    """Become so many processes of one group, inside the block; the first outlives the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    rank, children = 0, []
    for r in range(1, count):
        child = os.fork()
        if child == 0:
            rank, children = r, []
            break
        children.append(child)
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)


def run(module: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """What each rank of a program wrote into its own file of a folder."""
    ran = python("-m", module, str(folder), str(count), timeout=900)
    assert ran.returncode == 0, ran.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


if __name__ == "__main__":
    _serve()
