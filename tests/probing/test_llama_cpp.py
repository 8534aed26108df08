"""The probe against llama.cpp's own server, with tiny-rope as a GGUF file: right, with half the
context, with another base, with its factor lost, with a cache of 8 bits. Needs xllamacpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import longitude.hf as lh
from longitude.probing.api import ProbeOptions, ProbeResult, probe
from tests.hf.gguf_files import write_gguf

from .llama_server import llama_server

pytest.importorskip("xllamacpp")
TO = 512  # twice the trained window
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 256,
}
EIGHT_BITS = {
    "cache_type_k": "GGML_TYPE_Q8_0",
    "cache_type_v": "GGML_TYPE_Q8_0",
    "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
}


@pytest.fixture(autouse=True)
def _two_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each length, of the three that a probe sends."""
    monkeypatch.setattr("longitude.probing.in_force.TEXTS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-rope under YaRN: as a reference, and as two files that llama.cpp reads."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    lh.apply(model, "rope(frequencies=yarn(4, original=256))")
    lh.save(model, folder / "reference", tokenizer)
    lh.undo(model)
    write_gguf(folder / "plain.gguf", model, vocabulary=True)
    model.config.max_position_embeddings = 1024
    write_gguf(folder / "yarn.gguf", model, dict(YARN), vocabulary=True)
    return folder


def probed(
    folder: Path, file: str, out: Path, *, to: int = TO, n_ctx: int, **settings: Any
) -> ProbeResult:
    reference = str(folder / "reference") if file == "yarn.gguf" else "tiny-rope"
    if n_ctx < to:  # no scheme is asked for
        reference = None
    options = ProbeOptions(
        to=to, reference=reference, tasks=("passkey",), questions=1, concurrency=1, device="cpu",
        out=out,
    )  # fmt: skip
    with llama_server(folder / file, n_ctx=n_ctx, **settings) as url:
        return probe(url, options=options)


def names(result: ProbeResult) -> list[str]:
    return [one.name for one in result.faults]


def test_a_right_server_has_no_fault(folder: Path, tmp_path: Path) -> None:
    right = probed(folder, "plain.gguf", tmp_path, to=256, n_ctx=512)
    assert names(right) == [] and right.runtime == "llama.cpp"
    assert right.reach.effective_length == 256 and right.reach.share(256).mean == 1
    assert right.in_force.best.name == "as meant" and right.in_force.best.misfit < 1e-3
    speed = right.reach.speeds[-1]
    assert speed.first and speed.decode and speed.first < speed.seconds
    yarn = probed(folder, "yarn.gguf", tmp_path, n_ctx=1024)
    assert "refused" not in names(yarn) and yarn.input.kind == "complete"
    assert yarn.in_force.as_meant and yarn.in_force.best.misfit < 1e-3


def test_half_the_context_is_refused_where_it_ends(folder: Path, tmp_path: Path) -> None:
    result = probed(folder, "yarn.gguf", tmp_path, to=1024, n_ctx=512)
    assert names(result)[0] == "refused"
    assert result.input.limit == pytest.approx(512, abs=24)
    assert "exceeds the available context size (512 tokens)" in result.faults[0].sentence
    assert result.faults[0].fix == "start llama.cpp with -c 1024 (its slots share this context)."


@pytest.mark.parametrize(
    ("file", "settings", "name"),
    [
        ("plain.gguf", {"rope_freq_base": 500_000.0}, "another theta (500,000)"),
        ("yarn.gguf", {"rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_NONE"}, "factor lost"),
        ("plain.gguf", EIGHT_BITS, "cache in 8 bits (q8_0)"),
        ("plain.gguf", {"cache_type_k": "GGML_TYPE_Q8_0"}, "cache in 8 bits (q8_0, keys alone)"),
    ],
)
def test_what_is_in_force_is_named(
    file: str, settings: dict[str, Any], name: str, folder: Path, tmp_path: Path
) -> None:
    to = 128 if file == "plain.gguf" else 256
    result = probed(folder, file, tmp_path, to=to, n_ctx=1024, **settings)
    assert result.in_force.best.name == name and name in names(result)
    assert result.in_force.best.misfit < 0.3 * result.in_force.meant.misfit
    assert "refused" not in names(result) and "deaf" not in names(result)
