"""Which runtimes serve which scheme, against the table of runtimes' settings."""

import pytest

from longitude import parse
from longitude.core.scheme import Scheme
from longitude.parts import Rope
from longitude.presets import PRESETS
from longitude.runtimes import recommended
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import exports
from longitude.runtimes.target import supporting
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder
from tests.runtimes.configs import request

NONE: tuple[str, ...] = ()
RUNTIMES = tuple(runtime.name for runtime in recommended())
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
    ("rope(base=500, frequencies=resonance(yarn(4, original=256)))", RUNTIMES),
    ("rope(base=500, frequencies=power_basis())", RUNTIMES),
    ("rope(base=500, frequencies=truncated_basis(32))", NONE),
    ("rope(base=500, frequencies=floor_to_zero(256))", NONE),
    ("rope(base=500, frequencies=dynamic_ntk(256))", ("transformers",)),
    ("rope(base=500, frequencies=dynamic_linear(256))", NONE),
    ("rope(base=500, frequencies=dynamic_yarn(256))", NONE),
    ("rope(base=500, frequencies=stepped('yarn', original=256))", NONE),
    ("rope(base=500, remap=rerope(64))", NONE),
    ("rope(base=500, remap=leaky_rerope(64, 16))", NONE),
    ("rope(base=500, remap=self_extend(8, 64))", NONE),
    ("rope(base=500, remap=dual_chunk(192, 32))", NONE),
    ("rope(base=500, remap=dimension_wise((2, 4), window=64))", NONE),
    ("rope(base=500, remap=adagrope(128))", NONE),
    ("rope(base=500, remap=lampe(192, 0.002, -1, 32, step=128))", NONE),
    ("rope(base=500, remap=group_attention(4, 64))", NONE),
    ("rope(base=500, remap=string(85, local=16))", NONE),
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
def llamas(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A small Llama, as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("llama")
    model = decoder("llama", max_position_embeddings=256, rope_parameters={"rope_theta": 500.0})
    model.save_pretrained(folder)
    file = write_gguf(folder / "m.gguf", model)
    return open_checkpoint(str(folder)), open_checkpoint(str(file))


@pytest.mark.parametrize(("text", "runtimes"), TABLE)
def test_a_rotation(text: str, runtimes: tuple[str, ...]) -> None:
    assert supporting(parse(text), parse("rope(base=500)")) == runtimes


@pytest.mark.parametrize("text", SCHEMES)
def test_what_is_said_to_be_served_can_be_exported(
    text: str, llamas: tuple[Checkpoint, Checkpoint]
) -> None:
    said, (folder, file) = supporting(parse(text), parse("rope(base=500)")), llamas
    for done in exports(folder, [request(runtime, text) for runtime in CHECKPOINTS], 1024):
        runtime = done.runtime.name
        ours = done.settings and (LOADED_BY_US in done.settings.text or done.settings.files)
        stock = done.settings is not None and not ours
        dynamic = runtime == "transformers" and "dynamic_ntk" in text
        assert stock or dynamic if runtime in said else not stock, done.refused
    found = exports(file, [request("gguf", text)], 1024)
    assert (found[0].settings is not None) == ("llama.cpp" in said), found[0].refused


def test_llama_cpps_own_groups_name_the_tool_that_has_them(
    llamas: tuple[Checkpoint, Checkpoint],
) -> None:
    text = "rope(base=500, remap=group_attention(4, 64))"
    (done,) = exports(llamas[1], [request("llama.cpp", text)], 1024)
    assert "llama-completion computes it with --grp-attn-n 4 --grp-attn-w 64" in str(done.refused)
    for other in (text.replace("500", "600"), "rope(base=500, remap=self_extend(4, 64))"):
        (done,) = exports(llamas[1], [request("llama.cpp", other)], 1024)
        assert done.refused and "llama-completion" not in done.refused


@pytest.mark.parametrize("text", ["alibi_interpolated(4)", "ntk_alibi(4)", "alibi() + window(64)"])
def test_other_slopes_have_no_settings(text: str) -> None:
    assert supporting(parse(text), parse("alibi()")) == NONE
    assert supporting(parse("alibi()"), parse("alibi()")) == RUNTIMES


@pytest.mark.parametrize(
    "text", ["hierarchical(256)", "learned_tiled(256)", "learned_interpolated(256, 4)"]
)
def test_a_table_can_be_written_out_longer(text: str) -> None:
    assert supporting(parse(text), parse("learned(256)")) == CHECKPOINTS
    assert supporting(parse(f"{text} + logn(256)"), parse("learned(256)")) == NONE
    assert supporting(parse(text), parse("rope()")) == NONE


def test_kinds_of_layers_have_their_own_settings_but_equal_layers_have_not() -> None:
    own = parse("layers(rope() + window(16), rope(base=1000000))")
    far = "rope(base=1000000, frequencies=linear(8))"
    able = ("transformers", "vllm", "llama.cpp")  # SGLang takes one rotation
    assert supporting(parse(f"layers(rope() + window(16), {far})"), own) == able
    every = f"layers(rope(frequencies=linear(8)) + window(16), {far})"
    assert supporting(parse(every), own) == ("transformers",)  # servers change full layers alone
    assert supporting(own, own) == RUNTIMES
    dynamic = "rope(base=1000000, frequencies=dynamic_ntk(256))"
    assert supporting(parse(f"layers(rope() + window(16), {dynamic})"), own) == ("transformers",)
    assert supporting(parse(f"layers(rope(), {far})"), own) == NONE
    assert (
        supporting(parse(f"layers(rope(base=1000000), {far})"), parse("rope(base=1000000)")) == NONE
    )
    assert supporting(parse("rope(base=7)"), parse("rope(base=7)")) == RUNTIMES


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_served_as_a_models_own(name: str) -> None:
    if name == "longrope_phi3":
        scheme = PRESETS[name]((1.0,) * 8, (4.0,) * 8)
    else:
        scheme = PRESETS[name]()
    assert supporting(scheme, scheme) == RUNTIMES
    assert supporting(scheme, Scheme.of(Rope(base=3))) in (
        NONE,
        CHECKPOINTS,
        RUNTIMES,
        RUNTIMES[:1],
    )
