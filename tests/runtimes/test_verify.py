"""Runtimes themselves run exported models, and compute the scheme; where not, it is seen and named.

transformers and llama.cpp run here; mlx-lm and vLLM where they are installed."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from longitude import UserError, VerifyOptions, parse
from longitude import verify as verify_model
from longitude.cli.main import run
from longitude.hf.gguf_reader import read_layout
from longitude.hf.gguf_writer import rewrite
from longitude.runtimes import runtimes
from longitude.runtimes import verify as module
from longitude.runtimes.gguf import export_gguf
from longitude.runtimes.target import Target, make_target
from longitude.runtimes.verify import Reference, Verified, VerifyResult
from longitude.runtimes.verify import verify as verify_in
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

TINY = {"head_dim": 16, "num_attention_heads": 4, "max_position_embeddings": 64}
SMOL = {"head_dim": 64, "num_attention_heads": 9, "max_position_embeddings": 8192}
G = "1, 1, 1.5, 2, 3, 5, 7, 8"
FREQUENCIES = {
    "plain": "unscaled()",
    "linear": "linear(4)",
    "base": "ntk(4)",
    "yarn": "yarn(4, original=64)",
    "gain": "yarn(4, original=64, attention_factor=1.5)",
    "betas": "yarn(4, original=64, fast=8, slow=2)",
    "llama3": "llama3(8, original=64)",
    "longrope": f"longrope(({G}), ({G}), original=64, factor=4)",
}


def asked(frequencies: str, config: dict[str, Any] = TINY, base: float = 5e4) -> tuple[str, Target]:
    text = f"rope(base={base}, frequencies={frequencies})"
    return text, make_target(parse(text), config, 4 * config["max_position_embeddings"])


def verify(source: Path, exported: Path, text: str, want: Target) -> Verified:
    """llama.cpp on an exported file, against its source under the scheme."""
    reference = Reference(source, text, want.original, want.length)
    return verify_in(runtimes()["gguf"], exported, {}, reference)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, with attention that is sharp."""
    model = decoder("llama", vocab_size=320, rope_parameters={"rope_theta": 5e4})
    return write_gguf(tmp_path_factory.mktemp("tiny") / "in.gguf", model, vocabulary=True)


@pytest.mark.parametrize("name", FREQUENCIES)
def test_llama_cpp_computes_each_scheme(tiny: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("xllamacpp")
    text, want = asked(FREQUENCIES[name])
    export_gguf(tiny, tmp_path / "out.gguf", want)
    found = verify(tiny, tmp_path / "out.gguf", text, want)
    assert list(found.rows) == [32, 96]  # inside the window, and past it
    assert found.holds and max(found.rows.values()) < 1e-3, found


def test_another_scheme_is_seen(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    text, want = asked(FREQUENCIES["gain"])
    export_gguf(tiny, tmp_path / "right.gguf", want)
    dead = {"llama.rope.scaling.attn_factor": None, "llama.rope.scaling.yarn_attn_factor": 1.3}
    rewrite(read_layout(tmp_path / "right.gguf"), tmp_path / "wrong.gguf", dead, {})
    found = verify(tiny, tmp_path / "wrong.gguf", text, want)
    assert not found.holds and "another scheme" in str(found)


def test_what_llama_cpp_refuses_gets_a_sentence(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    text, want = asked("linear(4)")
    stray = {"stray.weight": [1.0] * 8}  # which no loader asks for
    rewrite(read_layout(tiny), tmp_path / "out.gguf", {}, stray)
    found = verify(tiny, tmp_path / "out.gguf", text, want)
    assert not found.holds and not found.rows
    assert "llama.cpp (GGUF)" in str(found) and " stops: " in str(found) and "\n" not in str(found)


def test_a_runtime_that_is_not_installed_is_named_with_its_package(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    found = verify(tiny, tiny, *asked("linear(4)"))
    assert "not installed (pip install longitude[verify])" in str(found) and not found.rows
    with pytest.raises(UserError, match=r"mlx-lm was not run: .*pip install mlx\[cpu\] mlx-lm"):
        verify_model("tiny-rope", options=VerifyOptions("mlx", "rope(frequencies=linear(2))"))


def test_the_bound_grows_with_what_the_blocks_make_differ() -> None:
    rows = {32: 0.2, 96: 0.4}
    assert not Verified("llama.cpp", rows).holds
    assert Verified("llama.cpp", rows, {32: 0.3}).holds
    doubtful = Verified("llama.cpp", rows, {32: 0.2})
    assert not doubtful.holds and "verify a float32 file to find out" in str(doubtful)
    assert Verified("llama.cpp", rows, {32: 0.001}).bound(32) == 0.05


def test_each_length_is_held_to_the_untouched_file_at_its_own() -> None:
    untouched = {32: 0.2, 64: 0.3}
    assert Verified("llama.cpp", {32: 0.2, 96: 0.4}, untouched).holds
    assert not Verified("llama.cpp", {32: 0.4, 96: 0.4}, untouched).holds


def test_blocks_are_held_to_the_untouched_file(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    model = decoder("llama", vocab_size=320, rope_parameters={"rope_theta": 5e4})
    before = write_gguf(tmp_path / "in.gguf", model, vocabulary=True, blocks=True)
    text, want = asked("yarn(4, original=64)")
    export_gguf(before, tmp_path / "out.gguf", want)
    found = verify(before, tmp_path / "out.gguf", text, want)
    assert list(found.baseline) == [32, 63]  # its slot holds one more token
    assert found.holds, found
    other = verify(before, tmp_path / "out.gguf", "rope(base=500)", want)
    assert not other.holds, other


def dequantised(source: Path, target: Path) -> Path:
    """The same weights as float32, by the `gguf` package."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, found in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = found.types[1] if len(found.types) > 1 else None
            writer.add_key_value(name, found.contents(), found.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True], ids=["float32", "Q4_1"])
def test_smollm2_inside_and_past_its_window(
    smollm2_file: Path, tmp_path: Path, blocks: bool
) -> None:
    pytest.importorskip("xllamacpp")
    source = smollm2_file if blocks else dequantised(smollm2_file, tmp_path / "in.gguf")
    schemes = ("yarn(4, original=8192)", "yarn(4, original=8192, fast=16, attention_factor=1.2)")
    for frequencies in schemes:
        text, want = asked(frequencies, SMOL, base=1e5)
        export_gguf(source, tmp_path / "out.gguf", want)
        found = verify(source, tmp_path / "out.gguf", text, want)
        assert list(found.rows) == [512, 8704]
        assert bool(found.baseline) == blocks and found.holds, found


def test_the_program_asks_nothing_but_xllamacpp() -> None:
    """It runs by its path, without the library: a line of another import would break it."""
    lines = Path(module.__file__).with_name("llama_cpp_process.py").read_text().splitlines()
    found = {line.split()[1] for line in lines if line.strip().startswith(("import ", "from "))}
    assert found == {"__future__", "importlib", "json", "sys", "typing"}
    assert [line for line in lines if 'import_module("xllamacpp")' in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with grouped heads, as a checkpoint's folder."""
    place = tmp_path_factory.mktemp("folder")
    decoder("llama", vocab_size=320, rope_parameters={"rope_theta": 5e4}).save_pretrained(place)
    return place


SCHEMES = {name: f"rope(frequencies={text})" for name, text in FREQUENCIES.items()}
SCHEMES |= {"NoPE": "nope()", "a remap": "rope(remap=rerope(32))"}
SCHEMES |= {"DroPE": "drope(32, c=0.4, length=128)", "DroPE by query": "drope(32, c=0.4)"}
SCHEMES |= {"by length": "rope(frequencies=dynamic_ntk(64))"}
WITHOUT_SETTINGS = ("a remap", "DroPE by query", "by length")


@pytest.mark.parametrize(
    "name", ["linear", "base", "gain", "longrope", "NoPE", "DroPE", *WITHOUT_SETTINGS]
)
def test_transformers_computes_each_scheme(folder: Path, name: str) -> None:
    """Those without settings by `longitude.hf.load`, as the export says."""
    found = verify_model(str(folder), options=VerifyOptions("transformers", SCHEMES[name], "4x"))
    assert list(found.proofs[0].rows) == [32, 96] and found.holds
    assert max(found.proofs[0].rows.values()) < 1e-4


@pytest.mark.parametrize("runtime", ["mlx", "vllm"])
@pytest.mark.parametrize(
    "name", ["linear", "base", "yarn", "gain", "longrope", "llama3", "NoPE", "DroPE"]
)
def test_other_runtimes_compute_each_scheme(folder: Path, name: str, runtime: str) -> None:
    pytest.importorskip({"mlx": "mlx_lm", "vllm": "vllm"}[runtime])
    found = verify_model(str(folder), options=VerifyOptions(runtime, SCHEMES[name], "4x"))
    assert found.holds and max(found.proofs[0].rows.values()) < 2e-3, found


def test_a_difference_is_seen_with_its_cause(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers drops the scaling of a GGUF file, and lint knows it."""
    _, want = asked(FREQUENCIES["linear"])
    export_gguf(tiny, tmp_path / "out.gguf", want)
    given = ["verify", str(tmp_path / "out.gguf"), "--in", "transformers,mlx"]
    assert run([*given, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["runtimes"]
    assert [row["holds"] for row in rows] == [False, None]
    assert rows[0]["rows"][0]["difference"] > 0.05
    assert "scaling" in rows[0]["causes"][0] and "a checkpoint's folder" in rows[1]["skipped"]


def test_the_table_has_a_row_per_length_and_a_line_per_runtime_that_was_not_run() -> None:
    right = Verified("A (a 1.0)", {32: 0.001, 96: 0.002})
    wrong = Verified("B (b 2.0)", {32: 0.3}, causes=("It drops it. → Write it.",))
    found = VerifyResult("nope()", (right, wrong, Verified("C", skipped="it is not installed.")))
    text = found.table()
    assert text.count("same") == 2 and text.count("differs") == 1 and not found.holds
    assert "It drops it. → Write it." in text and "C was not run: it is not installed." in text


def test_what_can_not_be_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "tiny-rope", "--in", "sglang"]) == 2
    assert "sglang can't be run from Python: use transformers, vllm" in capsys.readouterr().err
