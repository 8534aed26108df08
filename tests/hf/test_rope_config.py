"""Rotations read from configurations and written into them: transformers' own bits both ways."""

import importlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longitude import UserError, parse
from longitude.core.store import read_json
from longitude.hf.rope_config import (
    fraction_of,
    make_config,
    read,
    rope_dicts,
    rope_parameters,
    ropes,
)
from longitude.parts import Proportional, Rope, Unscaled, Yarn
from tests.hf.real_configs import FORMS, ORIGINAL

DIM, LONGEST = 32, 256
SHORT, LONG = (tuple(1 + i * by for i in range(DIM // 2)) for by in (0.01, 0.375))
NAMED = {
    "rope()": "default",
    "rope(base=500000)": "default",
    "rope(frequencies=linear(4))": "linear",
    f"rope(frequencies=dynamic_ntk({LONGEST}, 3))": "dynamic",
    "rope(base=500000, frequencies=llama3(8, original=64))": "llama3",
    "rope(frequencies=llama3(3, original=48, low=0.5, high=9))": "llama3",
    "rope(frequencies=yarn(4, original=64))": "yarn",
    "rope(frequencies=yarn(4, original=64, fast=20, slow=2, truncate=False))": "yarn",
    "rope(frequencies=yarn(4, original=64, attention_factor=2))": "yarn",
    "rope(frequencies=yarn(4, original=64, mscale=1, mscale_all_dim=0.5))": "yarn",
    f"rope(frequencies=longrope({SHORT}, {LONG}, original=64, factor=4))": "longrope",
    f"rope(frequencies=longrope({SHORT}, {LONG}, original=64, attention_factor=1.5))": "longrope",
    "rope(base=1000000, frequencies=proportional(0.25))": "proportional",
    "rope(frequencies=proportional(0.5, 8))": "proportional",
}
UNNAMED = [
    "rope(remap=rerope(8))",
    "rope(decay=xpos())",
    "rope(frequencies=ntk(4))",
    "rope(frequencies=yarn(4, original=64, ramp='paper'))",
    "rope(frequencies=stepped('yarn', original=64))",
    "rope(fraction=0.5, frequencies=proportional(0.25))",
]


def rope(text: str) -> Rope:
    made = parse(text).layer(0).rotary
    assert made
    return made


def llama(parameters: dict[str, Any], **entries: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 2 * DIM,
        "num_attention_heads": 2,
        "max_position_embeddings": LONGEST,
    }
    return LlamaConfig(**sizes | entries, rope_parameters=parameters)


def inv_freq(ours: Rope | None, head: int, length: int = 64) -> torch.Tensor:
    assert ours
    return ours.frequencies.inv_freq(ours.dim(head), ours.base, length, dtype=torch.float32)


def rotary(config: Any) -> Any:
    """The module with which a model of this configuration turns."""
    home = type(config).__module__
    modeling = importlib.import_module(home.replace("configuration_", "modeling_"))
    named = [name for name in vars(modeling) if name.endswith("RotaryEmbedding")]
    return getattr(modeling, next(name for name in named if "Vision" not in name))(config)


@pytest.mark.parametrize("text", NAMED)
def test_transformers_computes_the_same_frequencies(text: str, heard: list[str]) -> None:
    ours = rope(text)
    parameters = rope_parameters(ours)
    assert parameters["rope_type"] == NAMED[text]
    theirs = LlamaRotaryEmbedding(llama(parameters))
    assert torch.equal(theirs.inv_freq, inv_freq(ours, DIM))
    assert theirs.attention_scaling**2 == ours.frequencies.gain(64)
    scaled_to_1 = "longrope" in text and "attention_factor" in text
    proportional = "proportional" in text and ", 8" in text  # a factor it reads but calls unknown
    assert proportional or scaled_to_1 or not heard


@pytest.mark.parametrize("text", NAMED)
@pytest.mark.parametrize("saved", [False, True])
def test_what_is_written_is_read_back(text: str, saved: bool, tmp_path: Path) -> None:
    config = llama(rope_parameters(rope(text)))
    if saved:
        config.save_pretrained(tmp_path)
        assert read(read_json(tmp_path / "config.json")) == {None: rope(text)}
    assert ropes(config) == {None: rope(text)}


def test_the_share_of_a_head_that_turns_is_named() -> None:
    assert rope_parameters(rope("rope(fraction=0.25)"))["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in rope_parameters(rope("rope()"))


@pytest.mark.parametrize("text", UNNAMED)
def test_what_transformers_has_no_name_for_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"transformers (has no name for|can't combine)"):
        rope_parameters(rope(text))


def drawn(kind: str, rng: random.Random) -> dict[str, Any]:
    """Settings of one type, anywhere in its range."""
    theta, factor, original = rng.uniform(500, 1e6), rng.uniform(1, 40), rng.randint(40, 5000)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": theta}
    if kind != "default":
        found["factor"] = factor
    if kind in ("yarn", "llama3", "longrope"):
        found[ORIGINAL] = original
    if kind == "llama3":
        low = rng.uniform(0.3, 3)
        found |= {"low_freq_factor": low, "high_freq_factor": low + rng.uniform(0.1, 9)}
    if kind == "yarn":
        found |= {"beta_slow": rng.uniform(0.2, 3), "truncate": rng.random() < 0.5}
        found |= {"beta_fast": rng.choice([0, None, rng.uniform(4, 60)])}
        found |= rng.choice([{}, {"attention_factor": rng.uniform(0.5, 2)}, {"mscale": 0.7}])
        found |= rng.choice([{}, {"mscale_all_dim": rng.uniform(0.1, 2)}])
    if kind == "longrope":
        found |= {f"{n}_factor": [rng.uniform(1, 60) for _ in range(16)] for n in ("short", "long")}
    if kind == "proportional":
        found["partial_rotary_factor"] = rng.uniform(0.1, 1)
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["default", *ROPE_INIT_FUNCTIONS])
def test_any_settings_give_the_bits_of_transformers(kind: str, seed: int) -> None:
    config = llama(drawn(kind, random.Random(f"{kind} {seed}")))
    ours, module = ropes(config)[None], LlamaRotaryEmbedding(config)
    assert ours and torch.equal(module.inv_freq, inv_freq(ours, DIM, length=1))
    assert math.sqrt(ours.frequencies.gain(1)) == pytest.approx(module.attention_scaling, 1e-15)
    assert ours.frequencies.gain(1) == module.attention_scaling**2
    for length in (1, 64, LONGEST, LONGEST + 1, 5001, 70000) if kind != "default" else ():
        theirs, scaling = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        assert torch.equal(theirs, inv_freq(ours, DIM, length))
        assert scaling**2 == ours.frequencies.gain(length)


@pytest.mark.parametrize("name", FORMS)
def test_a_well_known_checkpoint_reads_the_same_in_both_forms(name: str) -> None:
    raw, texts = FORMS[name]
    before = json.dumps(raw)
    found = read(raw)
    assert found == {kind: rope(text) for kind, text in texts.items()}
    assert json.dumps(raw) == before


@pytest.mark.parametrize("name", FORMS)
def test_a_well_known_checkpoint_turns_as_its_model_does(name: str) -> None:
    raw, _ = FORMS[name]
    config = AutoConfig.for_model(**json.loads(json.dumps(raw)))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    whole = config.qk_head_dim if "qk_rope_head_dim" in raw else head
    module = rotary(config)
    for kind, ours in ropes(config).items():
        prefix = f"{kind}_" if kind else ""
        assert torch.equal(getattr(module, f"{prefix}inv_freq"), inv_freq(ours, whole, 1))
        scaling = getattr(module, f"{prefix}attention_scaling")
        assert ours and scaling**2 == ours.frequencies.gain(1)


def test_a_layer_type_without_a_rotation_has_none() -> None:
    layers = {"sliding_attention": {"rope_theta": 5000.0}, "full_attention": None}
    types = ["sliding_attention", "full_attention"]
    config = llama({"rope_theta": 1.5}, layer_types=types, num_hidden_layers=2)
    config.rope_parameters = layers
    assert ropes(config) == {"sliding_attention": Rope(5000), "full_attention": None}


@pytest.mark.parametrize("model", ["gpt2", "bert", "bloom", "t5"])
def test_a_model_without_rotation_has_none(model: str) -> None:
    assert ropes(AutoConfig.for_model(model)) == {None: None}


def test_falcon_turns_unless_it_has_alibi() -> None:
    assert ropes(AutoConfig.for_model("falcon")) == {None: Rope()}
    assert ropes(AutoConfig.for_model("falcon", alibi=True)) == {None: None}


def test_esm_turns_only_if_it_says_so() -> None:
    assert ropes(AutoConfig.for_model("esm")) == {None: None}
    assert ropes(AutoConfig.for_model("esm", position_embedding_type="rotary")) == {None: Rope()}


def test_the_text_of_a_model_of_several_senses_is_found() -> None:
    config = AutoConfig.for_model("gemma3")
    assert ropes(config) == ropes(config.get_text_config()) != {None: None}


def test_a_share_is_ignored_where_the_model_ignores_it() -> None:
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = llama(partial)
    assert len(LlamaRotaryEmbedding(config).inv_freq) == DIM // 2
    assert ropes(config) == {None: Rope()}
    assert ropes(AutoConfig.for_model("stablelm", rope_parameters=partial)) == {
        None: Rope(fraction=0.5)
    }


def test_the_share_of_latent_attention_is_of_the_whole_head() -> None:
    sizes = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
    assert ropes(AutoConfig.for_model("deepseek_v3", **sizes)) == {None: Rope(fraction=0.25)}


def test_every_share_of_a_head_makes_its_dimensions() -> None:
    for head in (*range(2, 258, 2), 384, 512, 576):
        for dim in range(2, head + 1, 2):
            assert Rope(fraction=fraction_of(dim, head)).dim(head) == dim


def test_the_original_length_of_the_file_has_priority_and_the_maximum_comes_last() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    both = llama({**yarn, ORIGINAL: 32}, original_max_position_embeddings=64)
    for config, original in ((both, 64), (llama(yarn), LONGEST)):
        LlamaRotaryEmbedding(config)  # which settles it
        assert config.rope_parameters[ORIGINAL] == original
        assert ropes(config) == {None: Rope(frequencies=Yarn(2, original=original))}


def test_a_factor_of_none_is_the_ratio_of_the_lengths() -> None:
    config = llama({"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, ORIGINAL: 32})
    config.rope_parameters["factor"] = None
    assert ropes(config) == {None: Rope(frequencies=Yarn(8, original=32))}
    assert torch.equal(LlamaRotaryEmbedding(config).inv_freq, inv_freq(ropes(config)[None], DIM))


def test_truncate_is_read_where_transformers_reads_it() -> None:
    nested = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, ORIGINAL: 64}
    types = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma3_text", head_dim=DIM, layer_types=types, num_hidden_layers=2
    )
    config.rope_parameters = {t: {**nested, "truncate": False} for t in types}
    ours, module = ropes(config)["full_attention"], rotary(config)
    assert ours == Rope(frequencies=Yarn(4, original=64, truncate=True))
    assert torch.equal(module.full_attention_inv_freq, inv_freq(ours, DIM))


def test_a_proportional_layer_keeps_its_share_inside() -> None:
    config = llama(rope_parameters(Rope(frequencies=Proportional(0.25))))
    found = ropes(config)[None]
    assert found == Rope(frequencies=Proportional(0.25))
    assert int(inv_freq(found, DIM).count_nonzero()) == DIM // 8


def test_only_hunyuan_takes_alpha_for_a_fixed_stretch() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0, "rope_theta": 10000.0}
    assert ropes(llama(parameters)) == {None: rope(f"rope(frequencies=dynamic_ntk({LONGEST}, 2))")}


def test_phi_3_5_moe_scales_by_its_own_entries() -> None:
    scaling = {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG)}
    scaling |= {"rope_theta": 1e4, ORIGINAL: 64, "short_mscale": 1.25, "long_mscale": 1.25}
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "max_position_embeddings": LONGEST}
    config = AutoConfig.for_model("phimoe", **sizes, rope_parameters=scaling)
    ours, x = ropes(config)[None], torch.zeros(1)
    cos, _ = rotary(config)(x, torch.arange(4)[None])
    assert ours and ours.frequencies.gain(4) == 1.25**2 == float(cos[0, 0, 0]) ** 2
    config.rope_parameters["long_mscale"] = 1.5
    with pytest.raises(UserError, match=r"a short_mscale of 1.25 and a long_mscale of 1.5"):
        ropes(config)


REFUSED = {
    "rope_type 'wavelets'": {"rope_type": "wavelets", "rope_theta": 10000.0},
    "need rope_theta": {"rope_type": "default", "rope_theta": None},
    "need factor": {"rope_type": "linear", "rope_theta": 10000.0},
    "need high_freq_factor": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8,
        "low_freq_factor": 1,
    },
    "need short_factor": {"rope_type": "longrope", "rope_theta": 10000.0},
    "rope_theta of rope_parameters is a number, but got '1e4'": {"rope_theta": "1e4"},
    "short_factor of rope_parameters is a list, but got 2": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": 2.0,
        "long_factor": 2.0,
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_read_is_refused_in_a_sentence(why: str) -> None:
    config = llama({"rope_theta": 10000.0})
    config.rope_parameters = REFUSED[why]
    with pytest.raises(UserError, match=why) as told:
        ropes(config)
    assert str(told.value).endswith(".")


def test_a_scaling_that_needs_the_maximum_says_so() -> None:
    config = AutoConfig.for_model("recurrent_gemma")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UserError, match="need max_position_embeddings"):
        ropes(config)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_for_a_text_mrope_is_rope(kind: str) -> None:
    """Three equal positions rotate as one does, whichever pair takes which."""
    sections = {"rope_theta": 1e6, "mrope_section": [8, 12, 12], "rope_type": "default"}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    config = AutoConfig.for_model(kind, text_config={**sizes, "rope_parameters": sections})
    text = config.get_text_config()
    assert text.rope_parameters["mrope_section"] == [8, 12, 12]
    rope = ropes(config)[None]
    assert rope and rope.base == 1e6 and rope.frequencies == Unscaled()
    positions, x = torch.arange(9)[None], torch.zeros(1, 9, 1)
    cos, _ = rotary(text)(x, positions.expand(3, 1, 9))
    inv = rope.frequencies.inv_freq(rope.dim(64), rope.base, 1, dtype=torch.float32)
    plain = (positions[..., None].float() * inv).cos()
    assert torch.equal(cos, torch.cat([plain, plain], -1))


def test_a_share_that_a_file_leaves_out_is_its_classs() -> None:
    for kind, share in {"qwen3_5_text": 0.25, "glm": 0.5, "llama": 1.0}.items():
        raw = {"model_type": kind, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        (one,), rope = rope_dicts(raw), read(raw)[None]
        assert rope and one.share == rope.fraction == share


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for held, why in ((None, "No such file"), ("{", "Expecting"), ("[1]", "should hold a JSON")):
        if held:
            file.write_text(held)
        with pytest.raises(UserError, match=why):
            read_json(file)


def test_a_model_that_transformers_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="has no model_type 'longest': `inspect` and `lint` read"):
        read({"model_type": "longest"})
    for raw in (
        {"rope_theta": 5.0},
        {"model_type": "llama", "hidden_size": "x"},
    ):
        with pytest.raises(UserError, match="transformers refuses a configuration of model_type"):
            read(raw)


@pytest.mark.parametrize("inside", [False, True])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(inside):
    raw = {"model_type": "gemma3_text", "num_hidden_layers": 10**9}
    with pytest.raises(UserError, match="num_hidden_layers is 1000000000, but no model"):
        make_config({"model_type": "gemma3", "text_config": raw} if inside else raw)
