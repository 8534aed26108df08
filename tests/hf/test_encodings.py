"""Encodings told from configurations, beside what the models' papers, modules and layers say."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longitude.core.text import parse
from longitude.hf.encodings import KINDS, Encoding, encodings, read_encodings
from longitude.hf.patch import own_scheme
from longitude.hf.rope_config import ropes
from tests.hf.tiny import DECODERS, LINEAR, ROUTED, SHAPE, SHARED, capped, config_of, decoder, sharp

KIND = {  # by the models' papers and cards
    "rope": """llama mistral mixtral ministral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma
        gemma2 gemma3_text phi phi3 phimoe gpt_neox gptj codegen falcon stablelm persimmon
        starcoder2 olmo olmo2 olmo3 olmoe granite granitemoe cohere cohere2 deepseek_v2 deepseek_v3
        llama4_text smollm3 gpt_oss glm glm4 glm4_moe ernie4_5 apertus seed_oss lfm2 nemotron
        helium exaone4 modernbert eurobert roformer nomic_bert dbrx recurrent_gemma moonshine
        bitnet arcee dots1 minimax jetmoe diffllama hunyuan_v1_dense mimi qwen2_vl_text pixtral""",
    "learned": """gpt2 gpt_neo gpt_bigcode openai-gpt bert roberta xlm-roberta albert electra
        distilbert camembert ernie bart mbart opt biogpt blenderbot led longformer big_bird
        clip_text_model clip_vision_model siglip_text_model vit deit dinov2 layoutlm mobilebert
        squeezebert xlm flaubert rembert reformer trocr imagegpt esm""",
    "sinusoidal": "marian pegasus pegasus_x xglm m2m_100 nllb-moe fsmt ctrl speech_to_text detr",
    "t5": "t5 mt5 umt5 longt5 switch_transformers pop2piano mpnet",
    "alibi": "bloom mpt",
    "transformer-xl": "xlnet parakeet_encoder fastspeech2_conformer",
    "relative": "swin swinv2 beit levit wav2vec2-bert",
    "convolution": "wav2vec2 hubert sew segformer",
    "none": "jamba mamba mamba2 rwkv zamba resnet convnext",
}
SCHEMES = {  # transformers' defaults, as the classes' own documentation has them
    "gpt2": "learned(1024)",
    "bert": "learned(512) + bidirectional()",
    "opt": "learned(2048, offset=2)",
    "bart": "learned(1024, offset=2)",
    "gpt_neox": "rope(fraction=0.25)",
    "phi": "rope(fraction=0.5)",
    "gptj": "rope(fraction=0.25, pairs='adjacent')",
    "mixtral": "rope(base=1000000)",
    "mistral": "rope() + window(4096)",
    "cohere": "rope(base=500000, pairs='adjacent')",
    "glm": "rope(fraction=0.5, pairs='adjacent')",
    "glm4_moe": "rope(fraction=0.5)",
    "ernie4_5": "rope(base=500000, pairs='adjacent')",
    "roformer": "rope(pairs='adjacent') + bidirectional()",
    "apertus": "rope(base=12000000, frequencies=llama3(8, original=8192))",
    "qwen3_next": "rope(fraction=0.25)",
    "deepseek_v2": "rope(fraction=0.3333333333333333, pairs='adjacent')",
    "deepseek_v4": "rope(base=160000, fraction=0.125, pairs='adjacent')",
    "xlnet": "transformer_xl() + bidirectional()",
    "xglm": "sinusoidal(layout='concatenated', spacing='endpoint')",
    "marian": "sinusoidal(layout='concatenated')",
    "bloom": "alibi()",
}
TURNED = """llama mistral mixtral ministral ministral3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
    gemma gemma2 gemma3_text gemma3n_text vaultgemma phi phi3 phimoe gpt_neox gpt_neox_japanese
    falcon stablelm persimmon starcoder2 olmo olmo2 olmo3 olmoe flex_olmo granite granitemoe
    granitemoeshared cohere cohere2 deepseek_v3 smollm3 gpt_oss glm glm4 glm4_moe ernie4_5
    ernie4_5_moe apertus seed_oss lfm2 nemotron helium exaone4 modernbert modernbert-decoder
    eurobert dbrx recurrent_gemma moonshine bitnet arcee dots1 minimax minimax_m2 jetmoe diffllama
    hunyuan_v1_dense hunyuan_v1_moe mimi csm_depth_decoder_model mllama_text_model aria_text
    chameleon falcon_h1 longcat_flash cwm doge""".split()


MROPE = {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}}
ENTRIES = {"glm4_moe": {"head_dim": 128}}  # its defaults leave an odd number to turn


def default(kind: str, **entries: Any) -> Any:
    return AutoConfig.for_model(kind, **entries)


def known_models(names: Sequence[str]) -> list[str]:
    """Those that this version of transformers has."""
    return [name for name in names if name in CONFIG_MAPPING]


def first(config: Any) -> Encoding:
    return encodings(config)[0]


@pytest.mark.parametrize("kind", KIND)
def test_each_type_has_the_encoding_of_its_paper(kind: str) -> None:
    names = known_models(KIND[kind].split())
    assert {name: first(default(name)).kind for name in names} == dict.fromkeys(names, kind)


def test_enough_types_are_told() -> None:
    assert sum(len(known_models(names.split())) for names in KIND.values()) >= 120
    assert len(known_models(TURNED)) >= 60
    assert KIND.keys() <= KINDS.keys()


@pytest.mark.parametrize("kind", known_models([*SCHEMES]))
def test_schemes_of_defaults(kind: str) -> None:
    assert first(default(kind)).scheme == SCHEMES[kind]


def rotary(config: Any) -> Any:
    """The model's own rotary embedding, of its text."""
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    found = [
        cls
        for name, cls in vars(import_module(home)).items()
        if name.endswith("RotaryEmbedding") and cls.__module__ == home
        if not any(word in name for word in ("Vision", "Audio"))
        if "config" in inspect.signature(cls).parameters
    ]
    return found[0](config)


@pytest.mark.parametrize("kind", known_models(TURNED))
def test_frequencies_are_the_models_own(kind: str) -> None:
    config = default(kind, **ENTRIES.get(kind, {}))
    encoding, module = first(config), rotary(config)
    assert encoding.scheme and encoding.head_dim
    scheme, types = parse(encoding.scheme), getattr(config, "layer_types", None) or [None]
    attending = [t for t in types if t is None or ("attention" in t and "linear" not in t)]
    seen = set()
    for n, each in enumerate(attending or [None]):
        rope = scheme.layer(n, len(attending) or 1).rotary
        theirs = getattr(module, f"{each}_inv_freq", getattr(module, "inv_freq", None))
        if rope is None or theirs is None or each in seen:
            continue
        seen.add(each)
        dim = rope.dim(encoding.head_dim)
        ours = rope.frequencies.inv_freq(dim, rope.base, encoding.window or 2)
        torch.testing.assert_close(theirs.double(), ours, rtol=1e-6, atol=0)
    assert seen


MORE = """
    afmoe aria_text axk2 bart beam bert bert-generation big_bird biogpt blenderbot-small bloom
    camembert cohere2_moe cwm data2vec-text electra ernie ernie4_5_moe exaone_moe falcon_h1
    flex_olmo flint gemma4_unified_text glm4_moe glm4_moe_lite gpt-sw3 gpt2
    granite_swa granitemoe_swa granitemoeshared hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hy_v4 hyperclovax jais2 kolibri1 laguna mbart megatron-bert mellum minicpm3 minimax_m2
    minimax_m3_vl_text ministral3 modernbert-decoder moshi mpt nanochat olmo_hybrid openai-gpt
    opt phimoe recurrent_gemma rembert roberta roberta-prelayernorm roc_bert solar_open xlm
    xlm-roberta xlm-roberta-xl xmod
""".split()  # which can be made tiny by common entries
COMMON = {**SHAPE, **SHARED, **ROUTED, **LINEAR, "n_embd": 64, "n_head": 4, "n_layer": 4}
COMMON |= {"n_positions": 64, "d_model": 64, "n_heads": 4, "n_layers": 4}
PROBED = ["smollm3", "cohere2", "exaone4", "llama4_text", "gemma3_text", "deepseek_v3", "mistral"]
CASES = [pytest.param(kind, marks=() if kind in PROBED else pytest.mark.slow) for kind in DECODERS]


@pytest.mark.parametrize("kind", CASES)
def test_layers_are_what_the_probe_finds_in_the_model(kind: str) -> None:
    assert first(config_of(kind)).scheme == str(own_scheme(decoder(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", known_models(MORE))
def test_more_layers_are_what_the_probe_finds(kind: str) -> None:
    torch.manual_seed(0)
    config = default(kind, **COMMON)
    model = AutoModelForCausalLM.from_config(config, **capped(config))
    assert first(config).scheme == str(own_scheme(sharp(model)))


def test_halves_that_differ_are_told_apart() -> None:
    told = {e.part: (e.kind, e.window) for e in encodings(default("whisper"))}
    assert told == {"encoder": ("sinusoidal", 1500), "decoder": ("learned", 448)}


def test_parts_of_several_models_text_first() -> None:
    told = [(e.part, e.kind) for e in encodings(default("llava"))]
    assert told == [("text_config", "rope"), ("vision_config", "learned")]


@pytest.mark.parametrize(
    ("kind", "entries", "expected"),
    [
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {}, "rope"),
        ("esm", {"position_embedding_type": "rotary"}, "rope"),
        ("xlm", {"sinusoidal_embeddings": True}, "sinusoidal"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal"),
        ("deberta-v2", {"relative_attention": True, "pos_att_type": ["c2p"]}, "deberta"),
        ("deberta-v2", {}, "learned"),
        ("wav2vec2-conformer", {"position_embeddings_type": "rotary"}, "rope"),
        ("wav2vec2-conformer", {"position_embeddings_type": "relative"}, "transformer-xl"),
        ("zamba2", {"use_mem_rope": True}, "rope"),
        ("granitemoehybrid", {"position_embedding_type": "rope"}, "rope"),
        ("granitemoehybrid", {}, "none"),
    ],
)
def test_an_entry_that_decides(kind: str, entries: dict[str, Any], expected: str) -> None:
    assert first(default(kind, **entries)).kind == expected


def test_falcon_rw_turns_nothing_although_its_configuration_says_how() -> None:
    config = default("falcon", alibi=True)
    (found,) = encodings(config)
    assert config.rope_parameters and found.scheme == "alibi()"
    assert "divided by √d" in found.notes[0]


def test_what_the_scheme_does_not_say_is_noted() -> None:
    scaling = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    config = default("deepseek_v3", rope_scaling=scaling, max_position_embeddings=163840)
    told = " ".join(first(config).notes)
    assert "adjacent in its weights" in told and "multiplied by (0.1 · mscale_all_dim" in told
    assert "Llama 4's temperature" in " ".join(first(default("llama4_text")).notes)
    found = first(default("qwen2_vl", **MROPE))
    assert (
        "M-RoPE, sections [16, 24, 24]" in found.notes[0] and found.scheme == "rope(base=1000000)"
    )


@pytest.mark.skipif(not known_models(["deepseek_v4"]), reason="of later versions of transformers")
def test_deepseek_v4_turns_layers_of_a_window_by_another_base() -> None:
    types = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    entries = {"layer_types": types, "num_hidden_layers": 3, "rope_scaling": scaling}
    found = first(default("deepseek_v4", **entries))
    near, pressed = (set(layers) for _, layers in found.layers)
    assert (near, pressed) == ({0}, {1, 2})
    assert found.layers[0][0] == "rope(fraction=0.125, pairs='adjacent') + window(128)"
    assert found.base == 160000 and str(found.scaling).startswith("yarn(16, original=65536")
    assert any("4 or 128 to one" in note for note in found.notes)


def test_tables_that_count_from_their_padding() -> None:
    config = default("roberta", max_position_embeddings=514, pad_token_id=1)
    assert first(config).scheme == "learned(512, offset=2) + bidirectional()"


def test_deberta_as_released() -> None:
    entries = {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
    config = default("deberta-v2", **entries, position_biased_input=False)
    assert first(config).scheme == "deberta(buckets=256) + bidirectional()"


def test_t5_reads_both_ways_in_its_encoder() -> None:
    halves = [what for what, _ in first(default("t5")).layers]
    assert halves == ["encoder: t5(bidirectional=True) + bidirectional()", "decoder: t5()"]


@pytest.mark.parametrize(
    ("raw", "kind", "where"),
    [
        ({"model_type": "baichuan", "rope_theta": 1e4, "num_attention_heads": 4}, "rope", "theta"),
        ({"model_type": "jais", "alibi": True, "n_head": 8}, "alibi", "alibi"),
        ({"model_type": "mpt-old", "attn_config": {"alibi": True}}, "alibi", "alibi"),
        ({"model_type": "made-up", "position_embedding_type": "absolute"}, "learned", "type"),
        ({"model_type": "baichuan", "max_position_embeddings": 4096}, "unknown", "no entry"),
        ({"model_type": "umbrella", "relative_attention_num_buckets": 32}, "t5", "buckets"),
        ({"model_type": "made-up"}, "unknown", "no entry"),
    ],
)
def test_models_without_code_are_told_by_their_entries(
    raw: dict[str, Any], kind: str, where: str
) -> None:
    (found,) = read_encodings(raw)
    assert found.kind == kind and where in found.where


@pytest.mark.parametrize(
    ("entries", "scheme"),
    [  # the first Qwen's, StableLM's, and one in dimensions
        ({"rotary_pct": 1.0, "rotary_emb_base": 50000}, "rope(base=50000)"),
        ({"rope_pct": 0.25, "rope_theta": 10000}, "rope(fraction=0.25)"),
        ({"rotary_dim": 16}, "rope(fraction=0.5)"),
    ],
)
def test_a_rotation_of_remote_code_under_older_names(entries: dict[str, Any], scheme: str) -> None:
    (found,) = read_encodings(
        {"model_type": "qwen", "hidden_size": 128, "num_attention_heads": 4} | entries
    )
    assert found.scheme == scheme


def test_a_rotation_of_remote_code_is_scaled_as_its_entries_say() -> None:
    raw = {"model_type": "internlm", "hidden_size": 64, "num_attention_heads": 2}
    scaling = {"type": "dynamic", "factor": 2.0}
    raw |= {"max_position_embeddings": 2048, "rope_theta": 5e4, "rope_scaling": scaling}
    (found,) = read_encodings(raw)
    assert found.scheme == "rope(base=50000, frequencies=dynamic_ntk(2048, factor=2))"
    assert "source is not here" in found.notes[0]


def test_latent_attention_of_remote_code_rotates_a_piece_of_each_head() -> None:
    raw = {"model_type": "kimi_k2", "hidden_size": 7168, "num_attention_heads": 64}
    raw |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 50000.0}
    (found,) = read_encodings(raw)
    assert (found.head_dim, found.fraction, found.pairs) == (192, 64 / 192, "half")


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="a later transformers")
def test_latent_attention_whose_pieces_differ_by_layer() -> None:
    """As of dots3_note in transformers 5.23: such entries are read from a layer's configuration."""
    types = ["full_attention", "sliding_attention"]
    config = CONFIG_MAPPING["deepseek_v3"](
        num_hidden_layers=2, layer_types=types, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 1e4} for kind in types},
        per_layer_config={1: {"qk_nope_head_dim": 192}},
    )  # fmt: skip
    fractions = {kind: rope and rope.fraction for kind, rope in ropes(config).items()}
    assert fractions == {"full_attention": 64 / 192, "sliding_attention": 64 / 256}
    found = first(config)
    assert found.head_dim == 256 and found.scheme is not None


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="a later transformers")
def test_heads_that_differ_by_layer() -> None:
    config = default("gemma4_text")
    found = first(config)
    full = config.layer_types.index("full_attention")
    assert found.head_dim == config.per_layer_config[full].head_dim
    assert [len(layers) for _, layers in found.layers] == [25, 5]


def test_windows_and_where_they_are_from() -> None:
    llama31 = {
        "model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    (found,) = read_encodings(llama31)
    assert (found.window, found.window_from) == (131072, "max_position_embeddings")
    assert (found.original, found.base, found.fraction) == (8192, 5e5, 1)
    assert found.scaling == "llama3(8, original=8192)"
    json.dumps(found.plain())


def test_no_modelling_file_is_imported() -> None:
    def imported() -> set[str]:
        return {name for name in sys.modules if ".modeling_" in name}

    before = imported()
    for kind in ("lilt", "splinter", "mvp", "kosmos-2", "udop"):  # which nothing else here imports
        read_encodings({"model_type": kind})
    assert imported() == before


@pytest.mark.slow
def test_every_type_is_told_without_an_error() -> None:
    from longitude.hf.encodings import known_models as every

    rows = list(every())
    assert len(rows) > 500
    unknown = [r.name for r in rows if r.encodings[0].kind == "unknown"]
    assert len(unknown) < 20
    for row in rows:
        for each in row.encodings:
            assert each.kind in KINDS
            assert each.scheme is None or str(parse(each.scheme)) == each.scheme
