"""Attention under a scheme equals the attention modules of transformers, with copied weights.

A whole tiny model runs, with its own masks, tables and cache; one of its attention modules is
watched, and `attention` is given that module's inputs and weights. transformers' rotary tables and
most of its softmaxes are float32 whatever the model's dtype, so there the bound is 5e-6 on outputs
of size one; where a module works in float64 throughout it is 1e-12.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from longitude import Scheme, attention
from longitude.parts import (
    T5,
    Alibi,
    Bidirectional,
    Chunked,
    Deberta,
    DynamicNtk,
    Linear,
    Llama3,
    Llama4Temperature,
    LongRope,
    Rope,
    Shaw,
    TransformerXl,
    Window,
    Yarn,
)

from .models import Call, joined, ready, split, watched
from .scripted import deberta, deberta_v2

FLOAT32, FLOAT64 = 5e-6, 1e-12
BATCH, LENGTH, VOCABULARY = 2, 24, 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0}


def tokens(n: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, n))


def close(ours: Tensor, theirs: Tensor, bound: float) -> None:
    assert theirs.std() > 0.05, "nothing to compare"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def projected(scheme: Scheme, module: Any, hidden: Tensor, new: int = LENGTH, **options: Any):
    """Our attention between a module's own q, k, v and output projections, for the last queries."""
    d, n = module.head_dim, hidden.shape[1]
    q, k, v = (p(hidden) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (split(x, x.shape[-1] // d) for x in (q, k, v))
    pos = options.pop("pos", range(n))
    last = pos[-new:] if isinstance(pos, range) else pos[:, -new:]
    out = attention(scheme, q[:, :, -new:], k, v, last, pos, backend="eager", **options)
    return module.o_proj(joined(out))


def decoded(made: nn.Module, module: nn.Module) -> tuple[list[Call], Tensor]:
    """The calls of a module for a prompt and one more token with the cache, and all its inputs."""
    ids = tokens()
    with watched(module) as calls:
        past = made(ids[:, :-1], use_cache=True).past_key_values
        made(ids[:, -1:], past_key_values=past)
    return calls, torch.cat([c.hidden for c in calls], 1)


LONG = {"short_factor": [1.0 + i / 9 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
ORIGINAL = {"original_max_position_embeddings": 8}
ROPES = {
    "default": ({}, Rope(500.0)),
    "linear": ({"factor": 3.0}, Rope(500.0, frequencies=Linear(3.0))),
    "yarn": (
        {"factor": 4.0, "beta_fast": 8.0, **ORIGINAL},
        Rope(500.0, frequencies=Yarn(4.0, original=8, fast=8.0)),
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        Rope(500.0, frequencies=Llama3(8.0, original=8)),
    ),
    "dynamic": ({"factor": 2.0}, Rope(500.0, frequencies=DynamicNtk(16, 2.0))),
    "longrope": (
        {"factor": 4.0, **LONG, **ORIGINAL},
        Rope(
            500.0,
            frequencies=LongRope(*map(tuple, LONG.values()), original=8, factor=4.0),
        ),
    ),
}


def llama(kind: str) -> tuple[nn.Module, Scheme]:
    given, rope = ROPES[kind]
    parameters = {"rope_type": kind, "rope_theta": 500.0, **given}
    config = hf.LlamaConfig(**GROUPED, max_position_embeddings=16, rope_parameters=parameters)
    return ready(hf.LlamaModel(config)), Scheme.of(rope)


@pytest.mark.parametrize("kind", ROPES)
def test_llama(kind: str) -> None:
    model, scheme = llama(kind)
    module = model.layers[1].self_attn
    with watched(module) as calls:
        model(tokens())
        close(projected(scheme, module, calls[0].hidden), calls[0].out, FLOAT32)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_llama_decodes(kind: str) -> None:
    model, scheme = llama(kind)
    module = model.layers[0].self_attn
    (prompt, step), hidden = decoded(model, module)
    with torch.no_grad():
        close(projected(scheme, module, hidden, new=1), step.out, FLOAT32)
        whole = projected(scheme, module, hidden)
    close(whole[:, :-1], prompt.out, FLOAT32)


def test_llama_with_padding_on_the_left() -> None:
    model, scheme = llama("yarn")
    module = model.layers[0].self_attn
    real = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    real[0, :5] = 0
    pos = (real.cumsum(-1) - 1).clamp(min=0)
    with watched(module) as calls:
        model(tokens(), attention_mask=real, position_ids=pos)
        ours = projected(scheme, module, calls[0].hidden, pos=pos, key_padding=real == 0)
    close(ours[real == 1], calls[0].out[real == 1], FLOAT32)


def test_gpt_neox_turns_a_quarter_of_each_head() -> None:
    parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    model = ready(hf.GPTNeoXModel(hf.GPTNeoXConfig(**SMALL, rope_parameters=parameters)))
    module = model.layers[1].attention
    with watched(module) as calls:
        model(tokens())
        fused = split(module.query_key_value(calls[0].hidden), 4)
        q, k, v = fused.chunk(3, -1)
        pos = range(LENGTH)
        out = attention(Scheme.of(Rope(500, 0.25)), q, k, v, pos, pos, backend="eager")
        close(module.dense(joined(out)), calls[0].out, FLOAT32)


@pytest.mark.parametrize("family", ["Cohere", "Glm"])
def test_adjacent_pairs(family: str) -> None:
    made, model = getattr(hf, f"{family}Config"), getattr(hf, f"{family}Model")
    fraction = {"Cohere": 1.0, "Glm": 0.5}[family]
    parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": fraction}
    sizes = GROUPED | {"head_dim": 8}  # Cohere divides the hidden size by the heads
    model = ready(model(made(**sizes, rope_parameters=parameters)))
    module = model.layers[1].self_attn
    scheme = Scheme.of(Rope(500.0, fraction, "adjacent"))
    with watched(module) as calls:
        model(tokens())
        close(projected(scheme, module, calls[0].hidden), calls[0].out, FLOAT32)


def test_roformer() -> None:
    config = hf.RoFormerConfig(**SMALL, max_position_embeddings=64, embedding_size=32)
    model = ready(hf.RoFormerModel(config))
    module = model.encoder.layer[1].attention.self
    scheme = Scheme.of(Rope(pairs="adjacent"), Bidirectional())
    with watched(module) as calls:
        model(tokens())
        projections = (module.query, module.key, module.value)
        q, k, v = (split(p(calls[0].hidden), 4) for p in projections)
        out = attention(scheme, q, k, v, range(LENGTH), range(LENGTH), backend="eager")
        close(joined(out), calls[0].out, FLOAT32)


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_gemma2_caps_its_logits(layer: int) -> None:
    config = hf.Gemma2Config(
        **GROUPED,
        sliding_window=5,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=1.5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = ready(hf.Gemma2Model(config))
    module = model.layers[layer].self_attn
    scheme = Scheme.of(Rope(500), *([Window(5)] if layer == 0 else []))
    with watched(module) as calls:
        model(tokens())
        ours = projected(scheme, module, calls[0].hidden, scale=20**-0.5, softcap=1.5)
        close(ours, calls[0].out, FLOAT32)
        uncapped = projected(scheme, module, calls[0].hidden, scale=20**-0.5)
        assert (uncapped - ours).abs().max() > 0.01


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "full"])
def test_gpt_oss_has_a_sink_in_every_head(layer: int) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False}
    config = hf.GptOssConfig(
        **GROUPED,
        sliding_window=5,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=parameters | {"original_max_position_embeddings": 16},
    )
    model = ready(hf.GptOssModel(config))
    module = model.layers[layer].self_attn
    rope = Rope(500, frequencies=Yarn(4, original=16, truncate=False))
    scheme = Scheme.of(rope, *([Window(5)] if layer == 0 else []))
    with watched(module) as calls:
        model(tokens())
        ours = projected(scheme, module, calls[0].hidden, sink_logits=module.sinks)
        close(ours, calls[0].out, FLOAT32)
        assert (projected(scheme, module, calls[0].hidden) - ours).abs().max() > 0.01


@pytest.mark.parametrize("layer", [0, 1], ids=["chunked rope", "temperature"])
def test_llama4(layer: int) -> None:
    config = hf.Llama4TextConfig(
        **GROUPED,
        intermediate_size_mlp=8,
        moe_layers=[],
        no_rope_layers=[1, 0],
        attention_chunk_size=7,
        use_qk_norm=False,
        floor_scale=4,
        attn_scale=0.4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = ready(hf.Llama4TextModel(config))
    module = model.layers[layer].self_attn
    parts = [[Rope(500, pairs="adjacent"), Chunked(7)], [Llama4Temperature(4, 0.4)]][layer]
    with watched(module) as calls:
        model(tokens())
        ours = projected(Scheme.of(*parts), module, calls[0].hidden)
        close(ours, calls[0].out, FLOAT32)
        without = projected(Scheme.of(*parts[:-1]), module, calls[0].hidden)
        assert (without - ours).abs().max() > 0.01


def test_ministral3_counts_its_temperature_from_zero() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
    parameters |= {"original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.4}
    config = hf.Ministral3Config(**GROUPED, sliding_window=None, rope_parameters=parameters)
    model = ready(hf.Ministral3Model(config))
    module = model.layers[1].self_attn
    scheme = Scheme.of(
        Rope(500, frequencies=Yarn(4, original=6)), Llama4Temperature(6, 0.4, offset=0)
    )
    with watched(module) as calls:
        model(tokens())
        close(projected(scheme, module, calls[0].hidden), calls[0].out, FLOAT32)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_bloom(heads: int, padded: bool) -> None:
    config = hf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, n_layer=2, n_head=heads, pad_token_id=0
    )
    model = ready(hf.BloomModel(config))
    module = model.h[1].self_attention
    real = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    real[0, : 5 * padded] = 0
    pos = (real.cumsum(-1) - 1).clamp(min=0)
    with watched(module) as calls:
        model(tokens(), attention_mask=real)
        q, k, v = split(module.query_key_value(calls[0].hidden), heads).chunk(3, -1)
        out = attention(
            Scheme.of(Alibi()), q, k, v, pos, pos, backend="eager", key_padding=real == 0
        )
        ours = module.dense(joined(out)) + calls[0].args[1]  # the residual is added inside
    close(ours[real == 1], calls[0].out[real == 1], FLOAT32)


@pytest.mark.parametrize("heads", [4, 6])
def test_mpt(heads: int) -> None:
    config = hf.MptConfig(
        vocab_size=VOCABULARY, d_model=8 * heads, n_layers=2, n_heads=heads, max_seq_len=32
    )
    model = ready(hf.MptModel(config))
    module = model.blocks[1].attn
    (prompt, step), hidden = decoded(model, module)
    with torch.no_grad():
        q, k, v = (split(x, heads) for x in module.Wqkv(hidden).chunk(3, -1))
        pos = range(LENGTH)
        out = attention(Scheme.of(Alibi()), q, k, v, pos, pos, backend="eager")
        ours = module.out_proj(joined(out))
    close(ours[:, :-1], prompt.out, FLOAT32)
    close(ours[:, -1:], step.out, FLOAT32)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5(side: str, layer: int) -> None:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=12,
        d_ff=8,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        attn_implementation="eager",
    )
    model = ready(hf.T5Model(config)).double()
    stack = getattr(model, side)
    module = stack.block[layer].layer[0].SelfAttention
    table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # for all layers
    real = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    real[0, 17:] = 0
    bias = T5(8, 20, bidirectional=side == "encoder")
    scheme = Scheme.of(bias, *([Bidirectional()] if side == "encoder" else []))
    with watched(module) as calls:
        model(
            tokens(),
            attention_mask=real,
            decoder_input_ids=tokens(),
            decoder_attention_mask=real,
        )
        q, k, v = (split(p(calls[0].hidden), 4) for p in (module.q, module.k, module.v))
        out = attention(
            scheme, q, k, v, range(LENGTH), range(LENGTH), {"t5.table": table},
            backend="eager", scale=1.0, key_padding=real == 0,
        )  # fmt: skip
        close(module.o(joined(out))[real == 1], calls[0].out[real == 1], FLOAT64)


@pytest.mark.parametrize("clamp", [0, 6])
@pytest.mark.parametrize("way", ["bi", "uni"])
@pytest.mark.parametrize("memory", [0, 9])
def test_xlnet(way: str, memory: int, clamp: int) -> None:
    config = hf.XLNetConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=8,
        attn_type=way,
        clamp_len=clamp or -1,
        mem_len=memory or None,
    )
    model = ready(hf.XLNetModel(config)).double()
    module = model.layer[1].rel_attn
    scheme = Scheme.of(TransformerXl(clamp), *([Bidirectional()] if way == "bi" else []))
    weights = {
        "transformer_xl.relative": module.r.permute(1, 2, 0),
        "transformer_xl.u": module.r_w_bias,
        "transformer_xl.v": module.r_r_bias,
    }
    with watched(module) as calls:
        mems = model(tokens(memory), use_mems=True).mems if memory else None
        model(tokens(), mems=mems)
        hidden = calls[-1].hidden
        seen = torch.cat([mems[1], hidden]) if mems else hidden
        q, k, v = (
            torch.einsum("nbm,mhd->bhnd", x, w)
            for x, w in ((hidden, module.q), (seen, module.k), (seen, module.v))
        )
        all_pos = range(memory + LENGTH)
        out = attention(scheme, q, k, v, all_pos[memory:], all_pos, weights, backend="eager")
        ours = module.post_attention(hidden, out.permute(2, 0, 1, 3))
        close(ours, calls[-1].out, 1e-6)  # transformers' sinusoids are float32


def padded_at_the_end() -> Tensor:
    real = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    real[0, 19:] = 0
    return real


TYPES = [["c2p", "p2c"], ["c2p"], ["p2c"]]


def sized(types: list[str]) -> dict[str, Any]:
    """Sizes at which √(d · terms) is whole: transformers takes that root in float32."""
    return SMALL | {"hidden_size": 4 * (12 if len(types) == 2 else 8)}


@pytest.mark.parametrize("types", TYPES, ids="|".join)
@pytest.mark.parametrize("span", [10, 64])
def test_deberta(types: list[str], span: int) -> None:
    config = hf.DebertaConfig(
        **sized(types),
        relative_attention=True,
        max_relative_positions=span,
        pos_att_type=types,
        position_biased_input=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ready(deberta.DebertaModel(config)).double()
    module, real = model.encoder.layer[1].attention.self, padded_at_the_end()
    with watched(module) as calls:
        model(tokens(), attention_mask=real)
        q, k, v = split(module.in_proj(calls[0].hidden), 4).chunk(3, -1)
        q, v = (x + split(b[None, None], 4) for x, b in ((q, module.q_bias), (v, module.v_bias)))
        table = model.encoder.rel_embeddings.weight[None]
        weights = {}
        if "c2p" in types:
            weights["deberta.keys"] = split(module.pos_proj(table), 4)[0]
        if "p2c" in types:
            weights["deberta.queries"] = split(module.pos_q_proj(table), 4)[0]
        bias = Deberta(span, c2p="c2p" in types, p2c="p2c" in types)
        compare_deberta(bias, q, k, v, weights, calls[0].out, real)


@pytest.mark.parametrize("types", TYPES, ids="|".join)
@pytest.mark.parametrize("buckets", [-1, 6])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_deberta_v2(types: list[str], buckets: int, share: bool) -> None:
    config = hf.DebertaV2Config(
        **sized(types),
        relative_attention=True,
        max_relative_positions=16,
        position_buckets=buckets,
        share_att_key=share,
        norm_rel_ebd="layer_norm",
        pos_att_type=types,
        position_biased_input=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ready(deberta_v2.DebertaV2Model(config)).double()
    module, real = model.encoder.layer[1].attention.self, padded_at_the_end()
    with watched(module) as calls:
        model(tokens(), attention_mask=real)
        own = (module.query_proj, module.key_proj, module.value_proj)
        q, k, v = (split(p(calls[0].hidden), 4) for p in own)
        table = model.encoder.get_rel_embedding()[None]
        weights = {}
        if "c2p" in types:
            key = module.key_proj if share else module.pos_key_proj
            weights["deberta.keys"] = split(key(table), 4)[0]
        if "p2c" in types:
            query = module.query_proj if share else module.pos_query_proj
            weights["deberta.queries"] = split(query(table), 4)[0]
        bias = Deberta(16, max(buckets, 0), c2p="c2p" in types, p2c="p2c" in types)
        compare_deberta(bias, q, k, v, weights, calls[0].out, real)


def compare_deberta(
    bias: Deberta, q: Tensor, k: Tensor, v: Tensor, weights: Any, theirs: Tensor, real: Tensor
) -> None:
    scheme, pos = Scheme.of(bias, Bidirectional()), range(LENGTH)
    out = attention(scheme, q, k, v, pos, pos, weights, backend="eager", key_padding=real == 0)
    close(joined(out)[real == 1], theirs[real == 1], FLOAT64)


def test_shaw_is_wav2vec2_berts_relative_key() -> None:
    config = hf.Wav2Vec2BertConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"},
        position_embeddings_type="relative_key",
        left_max_position_embeddings=5,
        right_max_position_embeddings=5,
    )
    model = ready(hf.Wav2Vec2BertModel(config)).double()
    module = model.encoder.layers[1].self_attn
    weights = {"shaw.keys": module.distance_embedding.weight}
    with watched(module) as calls:
        model(torch.randn(BATCH, LENGTH, config.feature_projection_input_dim).double())
        q, k, v = (
            split(p(calls[0].hidden), 4)
            for p in (module.linear_q, module.linear_k, module.linear_v)
        )
        scheme, pos = Scheme.of(Shaw(5), Bidirectional()), range(LENGTH)
        out = attention(scheme, q, k, v, pos, pos, weights, backend="eager")
        close(module.linear_out(joined(out)), calls[0].out, FLOAT64)
