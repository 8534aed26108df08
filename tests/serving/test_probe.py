"""`longitude probe` against vLLM's own server on loopback, with tiny-rope: right, with half the
context, with another base, with its factor lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import longitude.hf as lh
from longitude.probing.api import ProbeOptions, ProbeResult, probe

pytest.importorskip("vllm")
YARN = "rope(frequencies=yarn(4, original=256))"
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
SETTINGS = {
    "VLLM_PLUGINS": "",  # stock, without ours
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    lh.save(model, folder / "plain", tokenizer)
    lh.apply(model, YARN)
    lh.save(model, folder / "yarn", tokenizer)
    try:
        version("vllm")
    except PackageNotFoundError:  # the wheel for CPUs has another name, and vLLM asks for its own
        stub = folder / "vllm-0.32.0+cpu.dist-info"
        stub.mkdir()
        text = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
        (stub / "METADATA").write_text(text)
    return folder


@contextmanager
def served(folder: Path, model: str, *flags: str) -> Iterator[str]:
    """The URL of a server, once it answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(folder / model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *flags]
    log = folder / f"{port}.log"
    with log.open("wb") as out:
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=folder)
    try:
        _wait(port, process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _wait(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(1)
        finally:
            connection.close()
    raise AssertionError("vLLM did not start")


def probed(folder: Path, model: str, url: str, out: Path) -> ProbeResult:
    options = ProbeOptions(
        to=256, reference=str(folder / model), tasks=("passkey",), questions=1, concurrency=2,
        device="cpu", out=out,
    )  # fmt: skip
    return probe(url, options=options)


def override(theta: float) -> tuple[str, str]:
    return "--hf-overrides", json.dumps({"rope_parameters": {**PLAIN, "rope_theta": theta}})


def test_a_right_server_has_no_fault(folder: Path, tmp_path: Path) -> None:
    with served(folder, "plain", "--max-model-len", "256") as url:
        result = probed(folder, "plain", url, tmp_path)
    assert result.faults == [] and result.runtime == "vllm"
    assert result.reach.effective_length == 256
    assert result.in_force.best.name == "as meant" and result.in_force.best.misfit < 1e-3
    assert result.reach.loss(256) is not None  # by `echo`


def test_half_the_context_is_refused_where_it_ends(folder: Path, tmp_path: Path) -> None:
    with served(folder, "plain", "--max-model-len", "128") as url:
        result = probed(folder, "plain", url, tmp_path)
    assert [one.name for one in result.faults] == ["refused"]
    assert result.input.limit == pytest.approx(128, abs=24)
    assert result.faults[0].fix == "start vLLM with --max-model-len 256."


@pytest.mark.parametrize(
    ("model", "theta", "name"),
    [("plain", 500_000.0, "another theta (500,000)"), ("yarn", 10_000.0, "factor lost")],
)
def test_what_is_in_force_is_named(
    model: str, theta: float, name: str, folder: Path, tmp_path: Path
) -> None:
    with served(folder, model, "--max-model-len", "256", *override(theta)) as url:
        result = probed(folder, model, url, tmp_path)
    assert result.in_force.best.name == name and name in [one.name for one in result.faults]
    assert result.in_force.best.misfit < 1e-3 and result.in_force.meant.misfit > 0.5
    assert "--hf-overrides" in next(one.fix for one in result.faults if one.name == name)
