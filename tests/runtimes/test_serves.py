"""Which runtimes serve which scheme, against the table of runtimes' settings."""

from pathlib import Path

import pytest

from longitude import parse
from longitude.core.scheme import Scheme
from longitude.parts import Rope
from longitude.presets import PRESETS
from longitude.runtimes.checkpoint import opened
from longitude.runtimes.export import Wish, exports
from longitude.runtimes.support import RUNTIMES, serves
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

NONE: tuple[str, ...] = ()
CHECKPOINTS = ("transformers", "vllm", "sglang")
PAIRS = [1.0 + i / 8 for i in range(8)]


TABLE = [
    ("rope(base=500)", RUNTIMES),
    ("rope(base=800)", RUNTIMES),
    ("rope(base=500, frequencies=linear(4))", RUNTIMES),
    ("rope(base=500, frequencies=ntk(4))", RUNTIMES),
    ("rope(base=500, frequencies=ntk_mixed(4))", RUNTIMES),
    ("rope(base=500, frequencies=by_parts(4, original=256))", RUNTIMES),
    ("rope(base=500, frequencies=yarn(4, original=256))", RUNTIMES),
    ("rope(base=500, frequencies=yarn(4, original=256, ramp='paper'))", RUNTIMES),
    ("rope(base=500, frequencies=llama3(4, original=256))", RUNTIMES),
    (f"rope(base=500, frequencies=longrope({PAIRS}, {PAIRS}, original=256))", RUNTIMES),
    ("rope(base=500, frequencies=proportional(0.5))", CHECKPOINTS),
    ("rope(base=500, frequencies=dynamic_ntk(256))", ("transformers",)),
    ("rope(base=500, frequencies=dynamic_linear(256))", NONE),
    ("rope(base=500, frequencies=dynamic_yarn(256))", NONE),
    ("rope(base=500, frequencies=stepped('yarn', original=256))", NONE),
    ("rope(base=500, remap=rerope(64))", NONE),
    ("rope(base=500, remap=leaky_rerope(64, 16))", NONE),
    ("rope(base=500, remap=self_extend(8, 64))", NONE),
    ("rope(base=500, remap=dual_chunk(192, 32))", NONE),
    ("rope(base=500, remap=streaming(4, 252))", NONE),
    ("rope(base=500, frequencies=yarn(4, original=256)) + logn(256)", NONE),
    ("rope(base=500) + logn(256)", NONE),
    ("rope(base=500) + window(128)", NONE),
    ("rope(base=500, pairs='adjacent', frequencies=linear(4))", NONE),
    ("rope(base=500, fraction=0.5, frequencies=linear(4))", NONE),
    ("alibi()", NONE),
]
SCHEMES = [text for text, _ in TABLE if "pairs" not in text and "fraction" not in text]
LOADED_BY_US = "longitude.hf"


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a GGUF file, with its folder around it."""
    folder = tmp_path_factory.mktemp("llama")
    model = decoder("llama", max_position_embeddings=256, rope_parameters={"rope_theta": 500.0})
    model.save_pretrained(folder)
    return write_gguf(folder / "m.gguf", model)


@pytest.mark.parametrize(("text", "runtimes"), TABLE)
def test_a_rotation(text: str, runtimes: tuple[str, ...]) -> None:
    assert serves(parse(text), parse("rope(base=500)")) == runtimes


@pytest.mark.parametrize("text", SCHEMES)
def test_what_is_said_to_be_served_can_be_exported(text: str, llama_file: Path) -> None:
    said = serves(parse(text), parse("rope(base=500)"))
    for runtime in CHECKPOINTS:
        (done,) = exports(opened(str(llama_file.parent)), [Wish(runtime, text)], 1024)
        stock = done.spelling is not None and LOADED_BY_US not in done.spelling.text
        dynamic = runtime == "transformers" and "dynamic_ntk" in text
        assert stock or dynamic if runtime in said else not stock, done.refused
    found = exports(opened(str(llama_file)), [Wish("gguf", text)], 1024)
    assert (found[0].spelling is not None) == ("llama.cpp" in said), found[0].refused


@pytest.mark.parametrize("text", ["alibi_interpolated(4)", "ntk_alibi(4)", "alibi() + window(64)"])
def test_other_slopes_have_no_settings(text: str) -> None:
    assert serves(parse(text), parse("alibi()")) == NONE
    assert serves(parse("alibi()"), parse("alibi()")) == RUNTIMES


@pytest.mark.parametrize(
    "text", ["hierarchical(256)", "learned_tiled(256)", "learned_interpolated(256, 4)"]
)
def test_a_table_can_be_written_out_longer(text: str) -> None:
    assert serves(parse(text), parse("learned(256)")) == CHECKPOINTS
    assert serves(parse(f"{text} + logn(256)"), parse("learned(256)")) == NONE
    assert serves(parse(text), parse("rope()")) == NONE


def test_kinds_of_layers_have_their_own_settings_but_equal_layers_have_not() -> None:
    own = parse("layers(rope() + window(16), rope(base=1000000))")
    far = "rope(base=1000000, frequencies=linear(8))"
    assert serves(parse(f"layers(rope() + window(16), {far})"), own) == RUNTIMES
    dynamic = "rope(base=1000000, frequencies=dynamic_ntk(256))"
    assert serves(parse(f"layers(rope() + window(16), {dynamic})"), own) == ("transformers",)
    assert serves(parse(f"layers(rope(), {far})"), own) == NONE
    assert serves(parse(f"layers(rope(base=1000000), {far})"), parse("rope(base=1000000)")) == NONE
    assert serves(parse("rope(base=7)"), parse("rope(base=7)")) == RUNTIMES


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_served_as_a_models_own(name: str) -> None:
    if name == "longrope_phi3":
        scheme = PRESETS[name]((1.0,) * 8, (4.0,) * 8)
    else:
        scheme = PRESETS[name]()
    assert serves(scheme, scheme) == RUNTIMES
    assert serves(scheme, Scheme.of(Rope(base=3))) in (NONE, CHECKPOINTS, RUNTIMES, RUNTIMES[:1])
