"""What is typed or pasted is read back by itself and put through each runtime's formulas: they give
the scheme, or the export was refused with one that they do give."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import __version__
from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.gguf_reader import Header
from longitude.parts import ByParts, Linear, Llama3, Ntk, NtkMixed, Rope, Unscaled, Yarn
from longitude.runtimes import Settings, runtimes
from longitude.runtimes.api import ExportOptions, _exported
from longitude.runtimes.checkpoint import TOKENIZER, Checkpoint, open_checkpoint
from longitude.runtimes.export import PriorRun, exports, write
from longitude.runtimes.target import Target, make_target
from tests.hf.tiny import config_of
from tests.runtimes.configs import emulate, request

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
KEYS = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.rope.dimension_count": 16,
    "llama.rope.freq_base": 10000.0,
}
OF_GGUF = ("llama.cpp", "gguf", "ollama")


def model() -> Checkpoint:
    header = Header(Path("m.gguf"), dict(KEYS), {})
    return Checkpoint("some/model", CONFIG, {"model_max_length": 512}, header)


def read_back(runtime: str, text: str, held: dict[str, Any]) -> dict[str, Any]:
    """The settings that a runtime gets from a text; a file of its own is `held`."""
    if runtime == "vllm":
        words = shlex.split(text)
        assert words[:3] == ["vllm", "serve", "some/model"]
        told = dict(zip(words[3::2], words[4::2], strict=True))
        over = json.loads(told["--hf-overrides"])
        given = {"--hf-overrides": over, "--max-model-len": int(told["--max-model-len"])}
        return {**CONFIG, TOKENIZER: {"model_max_length": 512}, **given}
    if runtime == "sglang":
        words = shlex.split(text)
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        told = dict(zip(words[3::2], words[4::2], strict=True))
        over = json.loads(told["--json-model-override-args"])
        length = {"--context-length": int(told["--context-length"])}
        return {**CONFIG, "--json-model-override-args": over, **length}
    if runtime == "tensorrt-llm":
        length = re.search(r"--max_seq_len (\d+)", text)
        assert length
        return {**CONFIG, **yaml.safe_load(text), "max_seq_len": int(length[1])}
    if runtime == "axolotl":
        told = yaml.safe_load(text)
        assert told.pop("base_model") == "some/model"
        return {**CONFIG, **told}
    if runtime == "torchtitan":
        call = ast.parse(text).body[0].value  # type: ignore[attr-defined]
        return {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    if runtime == "llama.cpp":
        words = shlex.split(text)
        told = dict(zip(words[1::2], words[2::2], strict=True))
        over = [one.split("=") for one in told.pop("--override-kv").split(",")]
        types = {"int": int, "float": float}
        keys = {k: types[v.split(":")[0]](v.split(":")[1]) for k, v in over}
        told.pop("-m")
        flags = {k: v if k == "--rope-scaling" else float(v) for k, v in told.items()}
        flags["-c"] = int(flags["-c"])
        return {**KEYS, **keys, **flags}
    return json.loads(json.dumps(held))


def agrees(runtime: str, given: Settings, w: Target, version: str | None = None) -> None:
    text = given.text.replace("{target}", str(w.length)).replace("{folder}", "some/model")
    found = emulate(runtime, read_back(runtime, text, dict(given.entries)), version)
    assert found.inv_freq == pytest.approx(w.inv_freq, rel=1e-6)
    assert found.attention == pytest.approx(w.attention, rel=1e-6)
    assert found.length >= w.length


factors = st.floats(1.25, 16)
gains = st.none() | st.floats(0.5, 1.5)
bases = st.sampled_from([10000, 500000.0, 1e6])
kinds = st.one_of(
    st.just(Unscaled()),
    st.builds(Linear, factors),
    st.builds(Ntk, factors),
    st.builds(NtkMixed, factors),
    st.builds(ByParts, factors, original=st.just(512)),
    st.builds(Llama3, factors, original=st.just(512)),
    st.builds(
        Yarn,
        factors,
        original=st.just(512),
        fast=st.sampled_from([32, 24.0]),
        truncate=st.booleans(),
        attention_factor=gains,
    ),
)


@pytest.mark.parametrize("runtime", list(runtimes()))
@settings(max_examples=8, deadline=None)
@given(base=bases, kind=kinds, times=st.sampled_from([2, 4, 8]))
def test_what_is_typed_is_the_scheme(runtime: str, base: float, kind: Any, times: int) -> None:
    w = make_target(Scheme.of(Rope(base, frequencies=kind)), CONFIG, 512 * times)
    try:
        found = write(runtimes()[runtime], w, model())
    except UserError as mistake:
        near = re.search(r"the nearest it can serve is (rope\(.*?)(, which is|\.$)", str(mistake))
        assert near, mistake
        w = make_target(parse(near[1]), CONFIG, 512 * times)
        found = write(runtimes()[runtime], w, model())
    agrees(runtime, found, w)


MANY = ("transformers", "vllm", "sglang", "gguf", "ollama", "axolotl", "mlx", "exllama")


@pytest.mark.parametrize("runtime", MANY)
def test_any_fixed_frequencies_can_be_told(runtime: str) -> None:
    w = make_target(parse("rope(frequencies=by_parts(4, original=512))"), CONFIG, 2048)
    found = write(runtimes()[runtime], w, model())
    agrees(runtime, found, w)


def test_the_words_of_a_version() -> None:
    text = "rope(frequencies=yarn(4, original=512, attention_factor=1.0))"
    w = make_target(parse(text), CONFIG, 2048)
    for version in ("0.11.0", "0.28.0", "0.32.0"):
        found = write(runtimes()["vllm"], w, model(), version)
        agrees("vllm", found, w, version)
        assert ("rope_parameters" in found.text) == (version != "0.11.0")
    with pytest.raises(UserError, match=r"vLLM 0\.5\.0 .* use 0\.6\.4 or newer"):
        write(runtimes()["vllm"], w, model(), "0.5.0")


def test_numbers_are_floats_and_the_base_is_always_there() -> None:
    w = make_target(parse("rope(frequencies=linear(4))"), CONFIG, 2048)
    for name in ("vllm", "sglang"):
        runtime = runtimes()[name]
        given = write(runtime, w, model()).entries[runtime.overrides]
        rope = next(v for v in given.values() if isinstance(v, dict))
        assert isinstance(rope["factor"], float)
        assert rope["rope_theta"] == 10000.0
        assert given["max_position_embeddings"] == 512  # times the factor, there


def test_refusals_name_what_comes_near() -> None:
    w = make_target(parse("rope(frequencies=yarn(4, original=512))"), CONFIG, 2048)
    with pytest.raises(UserError, match=r"torchtitan 0\.3 .*attention_factor=1"):
        write(runtimes()["torchtitan"], w, model())
    with pytest.raises(UserError, match=r"Ollama serves a GGUF file, but got 'some/model'"):
        write(runtimes()["ollama"], w, Checkpoint("some/model", CONFIG))


def test_text_inside_a_larger_model() -> None:
    config = {"model_type": "some_vlm", "text_config": CONFIG}
    w = make_target(parse("rope(frequencies=yarn(4, original=512))"), config, 2048)
    one = Checkpoint("some/model", config)
    assert list(write(runtimes()["vllm"], w, one).entries["--hf-overrides"]) == ["text_config"]
    written = write(runtimes()["transformers"], w, one).config
    assert written and set(written) == {"model_type", "text_config"}
    assert written["text_config"]["rope_scaling"] == written["text_config"]["rope_parameters"]


@pytest.mark.parametrize("runtime", runtimes())
def test_a_split_is_served_by_longitude_alone(runtime: str) -> None:
    split = "split(streaming(4, 124), rerope(64), share=0.5)"
    (done,) = exports(open_checkpoint("tiny-rope"), [request(runtime, split)], 1024)
    if runtime == "transformers":
        assert done.config and done.config["longitude"]["scheme"] == split
    elif runtime == "vllm":
        assert done.settings and json.loads(done.settings.files["longitude.json"]) == {
            "scheme": split,
            "to": 1024,
            "version": __version__,
        }
    else:
        assert done.refused and "differ: export one scheme for all layers" in done.refused


def test_a_run_that_advises_nothing_for_some_runtimes_serves_the_others() -> None:
    def advice(label: str, scheme: str | None, loss: float) -> dict[str, Any]:
        numbers = {"own": "baseline", "value": {"mean": loss}, "measure": "context"}
        numbers["length"] = 1024
        return {"label": label, "scheme": scheme, "sentence": "none is better.", "numbers": numbers}

    best = advice("rerope", "rope(remap=rerope(64))", 1.0)
    without = ("transformers", "llama.cpp", "sglang")
    nothing = {name: advice("baseline", None, 2.0) for name in without}
    run = PriorRun("tiny-rope", 1024, best, nothing, "")
    every = [(runtime, None) for runtime in runtimes().values()]
    result = _exported(open_checkpoint("tiny-rope"), every, None, ExportOptions(), run)
    refused = {one.runtime.name: str(one.refused) for one in result.exports if not one.settings}
    assert "the run advises no scheme for sglang: none is better." in refused["sglang"]
    assert "--scheme" not in refused["sglang"]  # which has no settings for it
    assert refused["transformers"].endswith("add --scheme 'rope(remap=rerope(64))'.")
    assert "no recommendation for" in " ".join(refused.values()) and "vllm" not in refused
    scheme = "rope(remap=rerope(64))"  # as is said
    named = _exported(open_checkpoint("tiny-rope"), every[:1], scheme, ExportOptions(), run)
    assert named.exports[0].scheme == scheme


@pytest.mark.parametrize(
    ("source", "text", "able"),
    [
        ("tiny-alibi", "alibi_interpolated(4)", "transformers or vllm"),
        ("tiny-learned", "learned_tiled(256)", "transformers or vllm or sglang"),
    ],
)
def test_a_model_without_a_rotation_is_not_told_to_take_one(
    source: str, text: str, able: str
) -> None:
    place = open_checkpoint(source)
    (done,) = exports(place, [request("mlx", text)], 1024)
    assert str(done.refused).endswith(f"export it for {able}.")
    requests = [request(name, text) for name in able.split(" or ")]
    assert all(one.settings for one in exports(place, requests, 1024))


@pytest.mark.parametrize("kind", ["stablelm", "gpt_neox"])
def test_mlx_rotates_some_models_by_the_base_alone(kind: str, tmp_path: Path) -> None:
    """mlx_lm/models/stablelm.py and gpt_neox.py of 0.32.2."""
    config_of(kind).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"rotary_emb_base": 1e4, "rotary_pct": 0.25} if kind == "gpt_neox" else {}
    (tmp_path / "config.json").write_text(json.dumps(config | names))
    texts = [f"rope(frequencies={f})" for f in ("yarn(4, original=64)", "ntk(4)")]
    place = open_checkpoint(str(tmp_path))
    yarn, base = exports(place, [request("mlx", text) for text in texts], 256)
    assert "frequencies=ntk(4)" in str(yarn.refused)
    assert base.settings, base.refused


def test_mlx_takes_phi3s_lists_under_their_old_name(tmp_path: Path) -> None:
    config_of("phi3", original_max_position_embeddings=64).save_pretrained(tmp_path)
    place = open_checkpoint(str(tmp_path))
    (done,) = exports(place, [request("mlx", "rope(frequencies=linear(4))")], 256)
    assert done.config and {"type", "long_factor"} <= done.config["rope_scaling"].keys()
