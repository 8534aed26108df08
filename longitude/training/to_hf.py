"""Write lab models as checkpoints of stock transformers, where an equivalent model exists.

RoPE with the llama block is a Llama (Touvron et al. 2023), learned positions with the gpt block are
a GPT-2 (Radford et al. 2019), ALiBi with the gpt block and a norm after the embedding is a BLOOM
(Le Scao et al. 2022). The weights keep their values under other names: Llama stores q, k and v
separately, GPT-2 stores transposed matrices, BLOOM interleaves q, k and v head by head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from longitude.core.scheme import Layers, Scheme
from longitude.core.store import atomic_checkpoint, read_json, write_json
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.rope_config import rope_parameters
from longitude.parts import Alibi, DynamicNtk, Learned, Rope, Sequential
from longitude.training.lab.model import EPSILON, DecoderConfig, at_test

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["llama", "gpt2", "bloom"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # byte 0 is all three
END = "\0"
HEAD = "lm_head.weight"  # tied to the embedding, not stored twice


class Architecture(NamedTuple):
    """A stock model: its name, its class, and the lab block that it corresponds to."""

    name: str
    class_name: str
    block: str


ARCHITECTURES: dict[Kind, Architecture] = {
    "llama": Architecture("Llama", "LlamaForCausalLM", "llama"),
    "gpt2": Architecture("GPT-2", "GPT2LMHeadModel", "gpt"),
    "bloom": Architecture("BLOOM", "BloomForCausalLM", "gpt"),
}
# the lab's names of sizes and modules, and those of Llama, GPT-2 and BLOOM; None: it has none
SIZES = {
    "dim": ("hidden_size", "n_embd", "hidden_size"),
    "hidden": ("intermediate_size", "n_inner", None),
    "layers": ("num_hidden_layers", "n_layer", "n_layer"),
    "heads": ("num_attention_heads", "n_head", "n_head"),
    "length": ("max_position_embeddings", None, "seq_length"),
}
MODULES = {
    "tokens": ("model.embed_tokens", "transformer.wte", "transformer.word_embeddings"),
    "positions": (None, "transformer.wpe", None),
    "norm_in": (None, None, "transformer.word_embeddings_layernorm"),
    "blocks": ("model.layers", "transformer.h", "transformer.h"),
    "norm1": ("input_layernorm", "ln_1", "input_layernorm"),
    "attend.qkv": ("self_attn.{}_proj", "attn.c_attn", "self_attention.query_key_value"),
    "attend.out": ("self_attn.o_proj", "attn.c_proj", "self_attention.dense"),
    "norm2": ("post_attention_layernorm", "ln_2", "post_attention_layernorm"),
    "feed.gate": ("mlp.gate_proj", None, None),
    "feed.up": ("mlp.up_proj", "mlp.c_fc", "mlp.dense_h_to_4h"),
    "feed.down": ("mlp.down_proj", "mlp.c_proj", "mlp.dense_4h_to_h"),
    "norm": ("model.norm", "transformer.ln_f", "transformer.ln_f"),
}


def _column(table: Mapping[str, tuple[str | None, ...]], kind: Kind) -> dict[str, str]:
    """Map the lab's names to one stock model's, without those that it lacks."""
    column = [*ARCHITECTURES].index(kind)
    return {ours: theirs[column] for ours, theirs in table.items() if theirs[column]}  # type: ignore[misc]


def stock_model(scheme: Scheme | Layers, block: str) -> tuple[Kind | None, str]:
    """Return the stock model of a scheme with this block, if there is one, and a sentence that says
    so. A remap for training only (inverse_leaky) is dropped, as it is at test time."""
    kind, obstacle = _kind(at_test(scheme))
    refusal = f"{shown(scheme)} has no equivalent in stock transformers"
    if kind is None:
        return None, f"{refusal}: {obstacle}."
    name, _, needed = ARCHITECTURES[kind]
    if needed != block:
        return None, f"{refusal} with the {block} block: the {needed} block makes it a {name}."
    return kind, f"{shown(scheme)} trains a {name}: stock transformers loads the result."


def _kind(scheme: Scheme | Layers) -> tuple[Kind | None, str]:
    """Return the stock model, given the right block, or None and the reason why there is none."""
    spec = scheme.layer(0)
    if len(set(scheme.schemes)) > 1:
        return None, "its layers differ, and a stock model's are alike"
    if not isinstance(spec.positions.ids(1), range):  # randomized spreads them at test time, too
        return None, f"it is read at the positions of {spec.positions}, a stock model at 0, 1, 2, …"
    match replace(spec, positions=Sequential()).parts if spec.causal else ():
        case (Rope() as rope,):
            return _llama(rope)
        case (Learned(offset=0),):
            return "gpt2", ""
        case (bias,) if bias == Alibi():
            return "bloom", ""
    return None, "rope(…), learned(…) and alibi() have one, each alone and causal"


def _llama(rope: Rope) -> tuple[Kind | None, str]:
    """Return a Llama if it can have this rotation, or None and the reason why it can't."""
    if rope.pairs != "half":
        return None, "a Llama pairs the halves of a head, as rope(pairs='half') does"
    if rope.fraction != 1:
        return None, "a Llama rotates full heads, as rope(fraction=1) does"
    if isinstance(rope.frequencies, DynamicNtk):
        reason = "a Llama's dynamic NTK begins at its window"
        return None, f"{reason}, whatever length rope(…) has it begin at"
    try:
        rope_parameters(rope)
    except UserError as error:
        return None, str(error).rstrip(".")
    return "llama", ""


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"--weights is {' or '.join(DTYPES)}, but got {dtype!r}: use one of them.")


def write_checkpoint(
    folder: Path, config: DecoderConfig, weights: Mapping[str, Tensor], dtype: str = "float32"
) -> None:
    """Write a lab model as a checkpoint that stock transformers loads, with its tokenizer. Files
    appear atomically and config.json last: a folder that has it is complete."""
    from transformers import GenerationConfig

    check_dtype(dtype)
    kind, sentence = stock_model(parse(config.scheme), config.block)
    if kind is None:
        raise UserError(sentence)
    stock_config = _stock_config(kind, config, dtype)
    tensors = {
        name: w.detach().to("cpu", DTYPES[dtype]).contiguous()
        for ours, weight in weights.items()
        for name, w in _renamed(kind, ours, weight, config.heads)
    }
    _check_tensors(kind, stock_config, tensors)
    with atomic_checkpoint(folder) as part:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        byte_tokenizer(config.length).save_pretrained(part)
        GenerationConfig(**SPECIAL).save_pretrained(part)
        stock_config.save_pretrained(part)
        # entries that transformers 4 reads instead; scaled frequencies need transformers 5
        legacy = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
        if kind == "llama":
            legacy["config.json"] = {"rope_theta": stock_config.rope_parameters["rope_theta"]}
        for name, entries in legacy.items():
            write_json(part / name, read_json(part / name) | entries)


def _stock_config(kind: Kind, config: DecoderConfig, dtype: str) -> Any:
    from transformers import AutoConfig

    layer, architecture = at_test(parse(config.scheme)).layer(0), ARCHITECTURES[kind]
    entries = {entry: getattr(config, ours) for ours, entry in _column(SIZES, kind).items()}
    if kind == "llama":
        assert layer.rotary is not None
        entries |= {"rms_norm_eps": EPSILON, "rope_parameters": rope_parameters(layer.rotary)}
    else:
        entries["layer_norm_epsilon"] = EPSILON
    if kind == "gpt2":
        assert isinstance(layer.embed, Learned)
        entries |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        entries["n_positions"] = layer.embed.length  # the table may be longer than the window
    if kind == "bloom" and config.hidden != 4 * config.dim:
        raise UserError(
            f"a BLOOM's feed-forward is four times as wide as the model, but got {config.hidden} "
            f"for {config.dim}: make it {4 * config.dim}."
        )
    shared = {"vocab_size": 256, "tie_word_embeddings": True, "dtype": dtype, **SPECIAL}
    return AutoConfig.for_model(kind, architectures=[architecture.class_name], **entries, **shared)


def byte_tokenizer(window: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ids are the bytes of a text: no learned vocabulary, no merges.

    Byte-level BPE (Radford et al. 2019, GPT-2) maps each byte to one printable letter; without
    merges every letter stays a token, and here its id is the byte. Byte 0 ends a document and is
    the padding. It is stored as itself and not as its letter Ā: as a special token, that letter
    would be matched in real text before the text is converted to bytes. The tokenizer warns about
    texts longer than `window`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode().items()
    vocabulary = {END if byte == 0 else letter: byte for byte, letter in letters}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=window,
    )


def _renamed(kind: Kind, name: str, w: Tensor, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield a lab model's weight under the stock model's names and in its layout."""
    name = "positions.weight" if name == "positions.weights.table" else name
    modules = _column(MODULES, kind)
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if not match or match[2] not in modules:
        raise UserError(
            f"a {ARCHITECTURES[kind].name} has no place for the weight {name}: train without it."
        )
    index, ours, leaf = match.groups()
    theirs = f"{modules[ours]}.{leaf}"
    theirs = theirs if index is None else f"{modules['blocks']}.{index}.{theirs}"
    if ours == "attend.qkv" and kind == "llama":
        for letter, part in zip("qkv", w.chunk(3), strict=True):
            yield theirs.format(letter), part
    elif ours == "attend.qkv" and kind == "bloom":
        yield theirs, w.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    else:
        yield theirs, w.T if kind == "gpt2" and index is not None and w.dim() == 2 else w


def _check_tensors(kind: Kind, config: Any, tensors: dict[str, Tensor]) -> None:
    """Raise unless these are the stock model's weights: transformers fills in others at random."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters() if name != HEAD}
    actual = {name: tuple(w.shape) for name, w in tensors.items()}
    for name in sorted(expected | actual):
        if expected.get(name) != actual.get(name):
            raise UserError(
                f"the weights are not those of this {ARCHITECTURES[kind].name}: {name} should be "
                f"{expected.get(name, 'left out')}, but is {actual.get(name, 'missing')}."
            )
