"""Homes: the stock model of transformers, if there is one, that computes what a lab model computes.

RoPE with the llama block is a Llama (Touvron et al. 2023), learned positions with the gpt block are
a GPT-2 (Radford et al. 2019), ALiBi with the gpt block and a norm behind the embedding is a BLOOM
(Le Scao et al. 2022). The weights are the same numbers under other names: Llama keeps q, k and v
apart, GPT-2 multiplies from the other side (transposed), BLOOM lays q, k and v out head by head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from longitude.core.atomic_io import atomic_checkpoint
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.rope_config import rope_parameters
from longitude.hf.tokenizer import byte_tokenizer
from longitude.parts import Alibi, DynamicNtk, Learned, Rope, Sequential

Kind = Literal["llama", "gpt2", "bloom"]
NAME: dict[Kind, str] = {"llama": "Llama", "gpt2": "GPT-2", "bloom": "BLOOM"}
BLOCK: dict[Kind, str] = {"llama": "llama", "gpt2": "gpt", "bloom": "gpt"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # byte 0 is all three
EPSILON = 1e-5
HEAD = "lm_head.weight"  # tied: the embedding's own weights, not stored twice
MODULES: dict[Kind, dict[str, str]] = {  # a lab model's modules by their names in each home
    "llama": {
        "tokens": "model.embed_tokens",
        "blocks": "model.layers",
        "norm1": "input_layernorm",
        "attend.qkv": "self_attn.{}_proj",
        "attend.out": "self_attn.o_proj",
        "norm2": "post_attention_layernorm",
        "feed.gate": "mlp.gate_proj",
        "feed.up": "mlp.up_proj",
        "feed.down": "mlp.down_proj",
        "norm": "model.norm",
    },
    "gpt2": {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "norm1": "ln_1",
        "attend.qkv": "attn.c_attn",
        "attend.out": "attn.c_proj",
        "norm2": "ln_2",
        "feed.up": "mlp.c_fc",
        "feed.down": "mlp.c_proj",
        "norm": "transformer.ln_f",
    },
    "bloom": {
        "tokens": "transformer.word_embeddings",
        "norm_in": "transformer.word_embeddings_layernorm",
        "blocks": "transformer.h",
        "norm1": "input_layernorm",
        "attend.qkv": "self_attention.query_key_value",
        "attend.out": "self_attention.dense",
        "norm2": "post_attention_layernorm",
        "feed.up": "mlp.dense_h_to_4h",
        "feed.down": "mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
    },
}


@dataclass(frozen=True)
class Home:
    """The stock model a lab model can be written as, and a sentence to say so before training."""

    kind: Kind | None
    why: str


def home_of(scheme: Scheme | Layers, block: str) -> Home:
    """The home of a scheme with this block. The scheme is the one the model is read with: a remap
    made for training (inverse_leaky) is left out by then."""
    if block not in BLOCK.values():
        raise UserError(f"no block is called {block!r}: use llama or gpt.")
    kind, obstacle = _kind(scheme)
    if kind is None:
        return Home(None, f"{shown(scheme)} has no home in stock transformers: {obstacle}.")
    if BLOCK[kind] != block:
        return Home(
            None,
            f"{shown(scheme)} has no home in stock transformers with the {block} block: "
            f"the {BLOCK[kind]} block makes it a {NAME[kind]}.",
        )
    return Home(
        kind, f"{shown(scheme)} trains a {NAME[kind]}: stock transformers loads the result."
    )


def _kind(scheme: Scheme | Layers) -> tuple[Kind | None, str]:
    """The home under the right block, or what stands in its way."""
    one = scheme.layer(0)
    if any(scheme.layer(i) != one for i in range(len(scheme))):
        return None, "its layers differ, and a stock model's are alike"
    if not isinstance(one.positions.ids(1), range):  # randomized spreads them when it tests, too
        return None, f"it is read at the positions of {one.positions}, a stock model at 0, 1, 2, …"
    match replace(one, positions=Sequential()).parts if one.causal else ():
        case (Rope() as rope,):
            obstacle = _not_llama(rope)
            return (None, obstacle) if obstacle else ("llama", "")
        case (Learned(offset=0),):
            return "gpt2", ""
        case (bias,) if bias == Alibi():
            return "bloom", ""
    return None, "rope(…), learned(…) and alibi() have one, each alone and causal"


def _not_llama(rope: Rope) -> str:
    """Why a Llama does not turn its heads so, if it doesn't."""
    if rope.pairs != "half":
        return "a Llama pairs the halves of a head, as rope(pairs='half') does"
    if rope.fraction != 1:
        return "a Llama turns whole heads, as rope(fraction=1) does"
    if isinstance(rope.frequencies, DynamicNtk):
        return "a Llama's dynamic NTK begins at its window, whatever length rope(…) has it begin at"
    try:
        rope_parameters(rope)
    except UserError as mistake:
        return str(mistake).rstrip(".")
    return ""


@dataclass(frozen=True)
class _Sizes:
    layers: int
    dim: int
    heads: int
    hidden: int
    length: int


def write_home(
    folder: Path,
    kind: Kind,
    scheme: Scheme | Layers,
    weights: dict[str, Tensor],
    *,
    layers: int,
    dim: int,
    heads: int,
    hidden: int,
    length: int,
    dtype: str = "float32",
) -> None:
    """Write a lab model as a checkpoint that stock transformers loads, with its tokenizer.

    Files appear whole and config.json last: a folder that has it has everything.
    """
    _check_kind(kind, scheme)
    if dtype not in DTYPES:
        raise UserError(f"no home is written in {dtype}: use {' or '.join(DTYPES)}.")
    sizes = _Sizes(layers, dim, heads, hidden, length)
    config = _config(kind, scheme.layer(0), sizes, dtype)
    tensors = {
        theirs: w.detach().to("cpu", DTYPES[dtype]).contiguous()
        for ours, weight in weights.items()
        for theirs, w in _laid_out(kind, ours, weight, heads)
    }
    _check_tensors(kind, config, tensors)
    with atomic_checkpoint(folder) as part:
        _write(part, config, tensors, length)


def _check_kind(kind: Kind, scheme: Scheme | Layers) -> None:
    home = home_of(scheme, BLOCK[kind])
    if home.kind is None:
        raise UserError(home.why)
    if home.kind != kind:
        raise UserError(f"{shown(scheme)} is no {NAME[kind]}'s: write it as a {NAME[home.kind]}.")


def _config(kind: Kind, scheme: Scheme, sizes: _Sizes, dtype: str) -> Any:
    from transformers import AutoConfig

    entries = {"llama": _llama, "gpt2": _gpt2, "bloom": _bloom}[kind](scheme, sizes)
    shared = {"vocab_size": 256, "tie_word_embeddings": True, "dtype": dtype}
    return AutoConfig.for_model(kind, **entries, **shared, **SPECIAL)


def _llama(scheme: Scheme, sizes: _Sizes) -> dict[str, Any]:
    assert scheme.rotary  # home_of has seen to it
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": sizes.length,
        "rms_norm_eps": EPSILON,
        "rope_parameters": rope_parameters(scheme.rotary),
    }


def _gpt2(scheme: Scheme, sizes: _Sizes) -> dict[str, Any]:
    assert isinstance(scheme.embed, Learned)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": sizes.dim,
        "n_inner": sizes.hidden,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_positions": scheme.embed.length,  # the table may be longer than the window
        "layer_norm_epsilon": EPSILON,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _bloom(scheme: Scheme, sizes: _Sizes) -> dict[str, Any]:
    if sizes.hidden != 4 * sizes.dim:
        raise UserError(
            f"a BLOOM's feed-forward is four times as wide as the model, but got {sizes.hidden} "
            f"for {sizes.dim}: make it {4 * sizes.dim}."
        )
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": sizes.dim,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "seq_length": sizes.length,
        "layer_norm_epsilon": EPSILON,
    }


def _laid_out(kind: Kind, name: str, w: Tensor, heads: int) -> Iterator[tuple[str, Tensor]]:
    """One of our weights under its home's name and in its layout."""
    name = "positions.weight" if name == "positions.weights.table" else name
    found = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if not found or found[2] not in MODULES[kind]:
        raise UserError(f"a {NAME[kind]} has no place for the weight {name}: train without it.")
    index, ours, leaf = found.groups()
    theirs = MODULES[kind][ours] + "." + leaf
    theirs = theirs if index is None else f"{MODULES[kind]['blocks']}.{index}.{theirs}"
    if ours == "attend.qkv" and kind == "llama":
        for letter, own in zip("qkv", w.chunk(3), strict=True):
            yield theirs.format(letter), own
    elif ours == "attend.qkv" and kind == "bloom":
        yield theirs, w.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    else:
        yield theirs, w.T if kind == "gpt2" and index is not None and w.dim() == 2 else w


def _check_tensors(kind: Kind, config: Any, tensors: dict[str, Tensor]) -> None:
    """Raise unless these are the weights of the home: it would fill in others at random."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name != HEAD}
    given = {name: tuple(w.shape) for name, w in tensors.items()}
    for name in sorted(shapes | given):
        if shapes.get(name) != given.get(name):
            raise UserError(
                f"the weights are not those of this {NAME[kind]}: {name} should be "
                f"{shapes.get(name, 'left out')}, but is {given.get(name, 'missing')}."
            )


def _write(part: Path, config: Any, tensors: dict[str, Tensor], length: int) -> None:
    from transformers import GenerationConfig

    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(length).save_pretrained(part)
    GenerationConfig(**SPECIAL).save_pretrained(part)
    config.save_pretrained(part)
    # what transformers 4 reads in their place; frequencies that are scaled need transformers 5
    _amend(part / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if config.model_type == "llama":
        _amend(part / "config.json", rope_theta=config.rope_parameters["rope_theta"])


def _amend(file: Path, **entries: Any) -> None:
    held = json.loads(file.read_text(encoding="utf-8")) | entries
    file.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")
