"""`longitude probe` against vLLM's own server on loopback, with tiny-rope: right, with half the
context, with another base, with its factor lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import longitude.hf as lh
from longitude.probing.api import ProbeOptions, ProbeResult, probe
from tests.serving.servers import STOCK, serve

pytest.importorskip("vllm")
YARN = "rope(frequencies=yarn(4, original=256))"
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    lh.save(model, folder / "plain", tokenizer)
    lh.apply(model, YARN)
    lh.save(model, folder / "yarn", tokenizer)
    return folder


def probed(folder: Path, model: str, url: str, out: Path) -> ProbeResult:
    options = ProbeOptions(
        to=256, reference=str(folder / model), tasks=("passkey",), questions=1, concurrency=2,
        device="cpu", out=out,
    )  # fmt: skip
    return probe(url, options=options)


def override(theta: float) -> tuple[str, str]:
    return "--hf-overrides", json.dumps({"rope_parameters": {**PLAIN, "rope_theta": theta}})


def test_a_right_server_has_no_fault(folder: Path, tmp_path: Path) -> None:
    with serve(folder / "plain", tmp_path, "--max-model-len", "256", settings=STOCK) as url:
        result = probed(folder, "plain", url, tmp_path)
    assert result.faults == [] and result.runtime == "vllm"
    assert result.reach.effective_length == 256
    assert result.in_force.best.name == "as meant" and result.in_force.best.misfit < 1e-3
    assert result.reach.loss(256) is not None  # by `echo`


def test_half_the_context_is_refused_where_it_ends(folder: Path, tmp_path: Path) -> None:
    with serve(folder / "plain", tmp_path, "--max-model-len", "128", settings=STOCK) as url:
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
    with serve(
        folder / model, tmp_path, "--max-model-len", "256", *override(theta), settings=STOCK
    ) as url:
        result = probed(folder, model, url, tmp_path)
    assert result.in_force.best.name == name and name in [one.name for one in result.faults]
    assert result.in_force.best.misfit < 1e-3 and result.in_force.meant.misfit > 0.5
    assert "--hf-overrides" in next(one.fix for one in result.faults if one.name == name)
