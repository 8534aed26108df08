"""Which position encoding a configuration has, for every model that transformers knows.

The entries of a configuration say how a rotation turns and how long a table is; whether the model
has the one or the other often stands in its code alone, which is read and never imported (code.py,
clues.py). Falcon keeps `rope_parameters` under ALiBi, RoFormer names nothing, OPT counts positions
from 2. Of a model whose code is not there the entries alone are asked, in this order: ALiBi's
flags, relative positions, rotations, tables, or none.

Every model type that transformers knows, with its encoding; well-known models first.

A type's row is that of the configuration that its class makes by itself. Named models differ from
those in an entry or two, and some are not in transformers at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from longitude.core.validate import UserError
from longitude.hf.absolute_config import LAYERS, WIDTH, describe_absolute, entry, stated_window
from longitude.hf.device import quiet_transformers
from longitude.hf.modeling_source import alive, code_of, inner_configs, kinds, roots_of
from longitude.hf.rope_config import make_config
from longitude.hf.rotary_config import describe_rotary

KINDS = {
    "rope": "rotary: queries and keys are turned by their positions",
    "alibi": "a penalty that grows with distance, at a slope a head",
    "learned": "a learned vector for each position, added to the embeddings",
    "sinusoidal": "sines and cosines of the position, added to the embeddings",
    "t5": "a learned bias for each bucket of distances",
    "transformer-xl": "relative: content and sinusoidal offsets, each with a bias",
    "deberta": "disentangled: content against relative positions, both ways",
    "relative": "a learned bias, or vector, for each offset",
    "convolution": "convolutions over neighbours",
    "unknown": "neither its entries nor code that is here say",
    "none": "nothing but the causal mask, recurrence or convolutions tells positions apart",
}
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct")
ROTARY += ("partial_rotary_factor",)
SIZES = ("hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers")
SIZES += ("max_position_embeddings",)
HALF = "its code is not here: pairs are taken to lie half a head apart, in all layers alike"
FIRST = ("text_config", "thinker_config", "llm_config", "language_config", "decoder")


@dataclass(frozen=True)
class Encoding:
    """How one part of a model knows positions."""

    kind: str  # one of KINDS
    part: str = ""  # where in the configuration, or encoder or decoder; all of it where empty
    scheme: str | None = None  # the written form, where it has one
    base: float | None = None
    pairs: str | None = None  # how rotary pairs lie in a head
    fraction: float | None = None  # the share of a head that turns
    scaling: str | None = None  # frequencies other than RoPE's own
    head_dim: int | None = None
    heads: int | None = None
    window: int | None = None  # tokens, as the configuration allows
    window_from: str | None = None  # the entry that says so
    original: int | None = None  # tokens, before a scaling
    where: str = ""  # what told: entries, or a file of code
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # what they have, where layers differ
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without what is not said."""
        told = {k: v for k, v in vars(self).items() if v not in (None, "", ())}
        if self.layers:
            told["layers"] = [{"scheme": s, "layers": list(n)} for s, n in self.layers]
        return told


def read_encodings(raw: Mapping[str, Any]) -> tuple[Encoding, ...]:
    """The encodings of what a config.json holds, that of its text first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if str(raw.get("model_type")) not in CONFIG_MAPPING:
        return (by_entries(raw),)
    return encodings(make_config(raw))


def encodings(config: Any) -> tuple[Encoding, ...]:
    """The encodings of a transformers configuration and of those inside it, text first."""
    inside = [
        replace(each, part=".".join(filter(None, (name, each.part))))
        for name, inner in inner_configs(config)
        if entry(inner, WIDTH) or getattr(inner, "sub_configs", None)  # not MPT's attn_config
        for each in encodings(inner)
    ]
    inside.sort(key=lambda each: not each.part.startswith(FIRST))
    known = {each.kind for each in inside}
    layered = entry(config, LAYERS) is not None
    own = [each for each in _own(config) if layered or each.kind not in known]
    told = [each for each in (*own, *inside) if each.kind not in ("none", "unknown")]
    return tuple(told or own) or (_none(config),)


def _own(config: Any) -> Iterator[Encoding]:
    """What a configuration itself says, its two halves apart where they differ."""
    lines = alive(config)
    if not lines:
        yield by_entries(config.to_dict())
        return
    halves = {name: alive(config, [root]) for name, root in _halves(config).items()}
    found = {name: kinds(each, config) for name, each in halves.items()}
    apart = len(halves) == 2 and found["encoder"] != found["decoder"]
    for name, each in halves.items() if apart else ():
        yield from (_described(k, config, each, name) for k in found[name])
    told = {kind for each in found.values() for kind in each} if apart else set()
    yield from (_described(k, config, lines, "") for k in kinds(lines, config) if k not in told)


def _halves(config: Any) -> dict[str, str]:
    """The classes of an encoder and a decoder that share one configuration."""
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    names = roots_of(config)
    ends = ("Encoder", "Decoder")
    found = {e.lower(): [n for n in names if n.endswith(e)] for e in ends}
    return {end: min(n, key=len) for end, n in found.items() if n}


def _described(kind: str, config: Any, lines: Mapping[str, str], part: str) -> Encoding:
    code = code_of(type(config))
    where = code.file.name if code else ""
    if kind == "rope":
        return Encoding(kind, part, **describe_rotary(config, lines, where))
    return Encoding(kind, part, **describe_absolute(kind, config, lines, part, where))


def _none(config: Any) -> Encoding:
    code = code_of(type(config))
    window, key = stated_window(config)
    return Encoding("none", window=window, window_from=key, where=code.file.name if code else "")


def by_entries(raw: Mapping[str, Any]) -> Encoding:
    """What entries say of a model whose code is not here: named after what they name first."""
    kind, key = _entry(raw)
    where = f"{key} of the configuration" if key else "no entry of the configuration"
    if kind == "unknown":
        return Encoding(kind, where=where)
    if kind != "rope":
        return Encoding(kind, **describe_absolute(kind, SimpleNamespace(**raw), {}, "", where))
    told = {name: raw[name] for name in (*SIZES, *ROTARY) if raw.get(name) is not None}
    partial = told.keys() & {"partial_rotary_factor", "rotary_pct"}
    # the plainest of transformers' models that turns whole heads, or a share of them
    config = make_config({"model_type": "stablelm" if partial else "llama", **told})
    found = describe_rotary(config, {}, where) | {"where": where, "notes": (HALF,)}
    return Encoding(kind, **found)


def _entry(raw: Mapping[str, Any]) -> tuple[str, str]:
    inner = raw.get("attn_config")
    if raw.get("alibi") or (isinstance(inner, Mapping) and inner.get("alibi")):
        return "alibi", "alibi"
    if raw.get("relative_attention"):
        return "deberta", "relative_attention"
    if raw.get("relative_attention_num_buckets"):
        return "t5", "relative_attention_num_buckets"
    tables = ("max_position_embeddings", "n_positions")
    for kind, keys in (("rope", ROTARY), ("learned", tables)):
        for key in keys:
            if raw.get(key):
                return kind, key
    return "unknown", ""


@dataclass(frozen=True)
class KnownModel:
    """A model, or a type of models, and its encodings."""

    name: str
    model_type: str | None
    encodings: tuple[Encoding, ...]
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        found = [each.plain() for each in self.encodings]
        return {"name": self.name, "model_type": self.model_type, "encodings": found} | (
            {"note": self.note} if self.note else {}
        )


DEBERTA = {
    "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1, "position_biased_input": False,
}  # fmt: skip
GPT3 = Encoding("learned", scheme="learned(2048)", window=2048, where="Brown et al. 2020")
PALM = Encoding("rope", scheme="rope()", base=10000.0, window=2048, where="Chowdhery et al. 2022")
SEVEN = Encoding("rope", scheme="rope()", base=10000.0, window=4096, where="its remote code")
THIRTEEN = Encoding("alibi", scheme="alibi()", window=4096, where="its remote code")
Row = tuple[str, str | None, dict[str, Any] | Encoding, str]
NAMED_MODELS: tuple[Row, ...] = (
    ("GPT-2", "gpt2", {}, ""),
    ("GPT-3", None, GPT3, "not in transformers; every other layer attends in sparse bands"),
    ("BERT", "bert", {}, "position_embedding_type is no longer read"),
    ("T5", "t5", {}, "in the first layer alone, for all; scores are not divided by √d"),
    ("XLNet", "xlnet", {}, "Transformer-XL's encoding, read both ways"),
    ("ALBERT", "albert", {}, "the table is as wide as the factored embedding"),
    ("RoBERTa", "roberta", {"max_position_embeddings": 514}, "learned, too; counted from row 2"),
    ("DeBERTa-v3", "deberta-v2", DEBERTA, "the first DeBERTa adds absolute positions at its end"),
    ("PaLM", None, PALM, "not in transformers"),
    ("LLaMA", "llama", {}, ""),
    ("Llama 2", "llama", {"max_position_embeddings": 4096}, "Code Llama's base is 1,000,000"),
    ("Vicuna, Alpaca", "llama", {}, "LLaMA's"),
    ("BLOOM", "bloom", {}, "added after scores are divided by √d"),
    ("ERNIE 3.0", "ernie", {}, "as released; its paper speaks of Transformer-XL"),
    ("Falcon 7B, 40B, 180B", "falcon", {}, "RoPE: ALiBi is Falcon-RW's alone"),
    ("Falcon-RW", "falcon", {"alibi": True}, ""),
    ("BART", "bart", {}, "two rows are left free"),
    ("MPT", "mpt", {}, "transformers reads neither alibi nor alibi_bias_max"),
    ("Baichuan 7B", None, SEVEN, "remote code"),
    ("Baichuan 13B", None, THIRTEEN, "remote code; 40 heads, no power of two"),
)


def known_models() -> Iterator[KnownModel]:
    """The named models, then every type in transformers' auto mapping."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet_transformers(bars=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that contradict each other
        for name, kind, entries, note in NAMED_MODELS:
            if isinstance(entries, Encoding):
                yield KnownModel(name, kind, (entries,), note)
            elif kind in CONFIG_MAPPING:
                yield _row(name, str(kind), entries, note)
        for kind in CONFIG_MAPPING:
            yield _row(kind, kind, {}, "")


def _row(name: str, kind: str, entries: dict[str, Any], note: str) -> KnownModel:
    try:
        config = make_config({"model_type": kind, **entries})
    except UserError:  # it has no defaults that it takes itself
        told = Encoding("unknown", where="its class makes no configuration by itself")
        return KnownModel(name, kind, (told,), note)
    return KnownModel(name, kind, encodings(config), note)
