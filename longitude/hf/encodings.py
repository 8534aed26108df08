"""The position encodings of every model that transformers knows.

A configuration's entries give the parameters of a rotation and the length of a table; whether the
model has either is often stated in its source only (modeling_source.py, encoding_config.py): Falcon
has `rope_parameters` even with ALiBi, RoFormer names no encoding, OPT counts positions from 2. For
a model without source the entries decide, in this order: ALiBi's flags, relative positions,
rotations, tables, or none.

`known_models` lists well-known models, then every model type with the encodings of its class's
default configuration. Well-known models differ from that default in an entry or two; some are not
in transformers at all.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.device import quiet_transformers
from longitude.hf.encoding_config import (
    LAYERS,
    WIDTH,
    describe,
    entry,
    stated_window,
    without_positions,
)
from longitude.hf.merge_scheme import as_layers, merge_scheme
from longitude.hf.modeling_source import inner_configs, kinds, live_source, roots_of, source_of
from longitude.hf.rope_config import SHARE, SHARES, THETAS, RopeDict, is_number, make_config
from longitude.hf.source import SCHEME
from longitude.parts import Unscaled

_TABLE = tomllib.loads(Path(__file__).with_name("encodings.toml").read_text(encoding="utf-8"))
KINDS: dict[str, str] = _TABLE["kinds"]
NAMED_MODELS: dict[str, dict[str, Any]] = _TABLE["models"]
SIZES = ("hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers")
SIZES += ("max_position_embeddings",)
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim")
# for models without source: the entries that indicate each encoding
BY_ENTRY = (
    ("alibi", ("alibi",)),
    ("deberta", ("relative_attention",)),
    ("t5", ("relative_attention_num_buckets",)),
    ("rope", ("rope_parameters", "rope_scaling", *THETAS, "rotary_dim", *SHARES)),
)  # fmt: skip
ASSUMED = "its source is not here: pairs are assumed half a head apart, in all layers alike"
TEXT_FIRST = ("text_config", "thinker_config", "llm_config", "language_config", "decoder")


@dataclass(frozen=True)
class Encoding:
    """The position encoding of one part of a model."""

    kind: str  # one of KINDS
    part: str = ""  # an entry of the configuration, encoder or decoder; empty: the whole model
    scheme: str | None = None  # its text form, if it can be expressed
    base: float | None = None
    pairs: str | None = None  # the layout of rotary pairs in a head
    fraction: float | None = None  # the fraction of a head that rotates
    scaling: str | None = None  # of the frequencies; None: plain RoPE
    head_dim: int | None = None
    heads: int | None = None
    window: int | None = None  # the longest input (tokens) that the configuration allows
    window_from: str | None = None  # the entry that states it
    original: int | None = None  # trained length (tokens) before scaling
    where: str = ""  # what this was read from: entries, or a source file
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (scheme, layers) if layers differ
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return a dictionary for JSON, without empty fields."""
        fields = {k: v for k, v in vars(self).items() if v not in (None, "", ())}
        if self.layers:
            fields["layers"] = [{"scheme": s, "layers": list(n)} for s, n in self.layers]
        return fields


def read_encodings(raw: Mapping[str, Any]) -> tuple[Encoding, ...]:
    """Return the encodings of a parsed config.json, the text model's first. If the checkpoint was
    saved with a scheme, that describes the text model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    saved = raw.get(SCHEME)
    saved = saved if isinstance(saved, Mapping) else {}
    raw = {**raw, **{k: v for k, v in saved.items() if k == "rope_parameters"}}
    if str(raw.get("model_type")) not in CONFIG_MAPPING:
        return (by_entries(raw),)
    config = make_config(raw)
    first, *others = (_with_default(each, raw, config) for each in encodings(config))
    if "scheme" not in saved:
        return (first, *others)
    own, text = parse(first.scheme or "nope()"), str(saved["scheme"])
    count = entry(config.get_text_config(), LAYERS) or 1
    own_layers = [own.layer(n, count) for n in range(count)]
    merged = merge_scheme(text, own_layers, first.window, bool(saved.get("force")))
    scheme = as_layers(merged, parse(text))
    note = f"it was saved under {scheme}, which is in force, and not the {own} of its configuration"
    changed: dict[str, Any] = {"scheme": str(scheme), "layers": (), "where": f"the entry {SCHEME}"}
    rope = next((layer.rotary for layer in merged if layer.rotary), None)
    if rope is None and first.kind == "rope":  # the saved scheme dropped its rotation
        changed |= {"kind": "none"} | dict.fromkeys(("base", "pairs", "fraction", "scaling"))
    elif rope is not None:
        scaling = None if rope.frequencies == Unscaled() else str(rope.frequencies)
        original = getattr(rope.frequencies, "original", None)
        changed |= {"base": float(rope.base), "scaling": scaling, "original": original}
    return (replace(first, **changed, notes=(note, *first.notes)), *others)


def _with_default(found: Encoding, raw: Mapping[str, Any], config: Any) -> Encoding:
    """Add a note to an encoding whose window is its class's default, not stated in the file."""
    for name in found.part.split("."):
        inner = raw.get(name)
        if isinstance(inner, Mapping):
            raw, config = inner, getattr(config, name)
    renamed = getattr(config, "attribute_map", {})
    key = found.window_from
    if key is None or any(name in raw for name in (key, renamed.get(key))):
        return found
    note = f"the file states no {key}: {found.window:,} is the default of {type(config).__name__}"
    return replace(found, notes=(*found.notes, note))


def encodings(config: Any) -> tuple[Encoding, ...]:
    """Return the encodings of a configuration and of the ones nested in it, text model first."""
    inside = [
        replace(each, part=".".join(filter(None, (name, each.part))))
        for name, inner in inner_configs(config)
        if entry(inner, WIDTH) or getattr(inner, "sub_configs", None)  # not MPT's attn_config
        for each in encodings(inner)
    ]
    inside.sort(key=lambda each: not each.part.startswith(TEXT_FIRST))
    inner_kinds = {each.kind for each in inside}
    has_layers = entry(config, LAYERS) is not None
    direct = [each for each in _of_one_config(config) if has_layers or each.kind not in inner_kinds]
    positional = [each for each in (*direct, *inside) if each.kind not in ("none", "unknown")]
    if positional or direct:
        return tuple(positional or direct)
    source, (window, key) = source_of(type(config)), stated_window(config)
    stated = {"window": window, "window_from": key, "where": source.file.name if source else ""}
    return (Encoding("none", **stated, **without_positions(config)),)


def _of_one_config(config: Any) -> Iterator[Encoding]:
    """Yield the encodings of one configuration, for encoder and decoder apart if they differ."""
    source, code = source_of(type(config)), live_source(config)
    if not code or source is None:
        yield by_entries(config.to_dict())
        return
    code_of = {}
    if getattr(config, "is_encoder_decoder", False):
        for end in ("Encoder", "Decoder"):
            names = [name for name in roots_of(config) if name.endswith(end)]
            if names:
                code_of[end.lower()] = live_source(config, [min(names, key=len)])
    kinds_of = {part: kinds(each, config) for part, each in code_of.items()}
    if len(set(kinds_of.values())) < 2:
        code_of, kinds_of = {}, {}
    listed = {kind for each in kinds_of.values() for kind in each}
    rest = [kind for kind in kinds(code, config) if kind not in listed]
    for part, names in {**kinds_of, "": rest}.items():
        for kind in names:
            fields = describe(kind, config, code_of.get(part, code), part, source.file.name)
            yield Encoding(kind, part, **fields)


def by_entries(raw: Mapping[str, Any]) -> Encoding:
    """Return the first encoding that the entries of a model without source indicate."""
    inner = raw.get("attn_config")
    nested = isinstance(inner, Mapping) and inner.get("alibi")
    raw = {**raw, "alibi": True} if nested else raw
    named = ((kind, key) for kind, keys in BY_ENTRY for key in keys if raw.get(key))
    kind, key = next(named, ("unknown", ""))
    if kind == "unknown" and raw.get("position_embedding_type") == "absolute":
        kind, key = "learned", "position_embedding_type"
    where = f"{key} of the configuration" if key else "no entry of the configuration"
    if kind == "unknown":
        window, entry_name = stated_window(SimpleNamespace(**raw))
        return Encoding(kind, window=window, window_from=entry_name, where=where)
    if kind != "rope":
        return Encoding(kind, **describe(kind, SimpleNamespace(**raw), {}, "", where))
    names = (*SIZES, *LATENT, "rope_parameters", "rope_scaling")
    entries = {name: raw[name] for name in names if raw.get(name) is not None}
    base = next((raw[name] for name in THETAS if is_number(raw.get(name))), None)
    entries |= {} if base is None else {"rope_theta": base}
    share = RopeDict(raw, {}, {}, "").share
    # the simplest model of transformers that rotates whole heads, or a fraction of each
    model = "llama" if share == 1 else "stablelm"
    entries |= {} if share == 1 else {SHARE: share}
    model = "deepseek_v3" if entries.keys() & {*LATENT} else model
    config = make_config({"model_type": model, **entries})
    fields = describe(kind, config, {}, "", where) | {"where": where, "notes": (ASSUMED,)}
    return Encoding(kind, **fields)


@dataclass(frozen=True)
class KnownModel:
    """A model or a model type, and its encodings."""

    name: str
    model_type: str | None
    encodings: tuple[Encoding, ...]
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        listed = [each.plain() for each in self.encodings]
        return {"name": self.name, "model_type": self.model_type, "encodings": listed} | (
            {"note": self.note} if self.note else {}
        )


def known_models() -> Iterator[KnownModel]:
    """Yield the named models, then every model type in transformers' auto mapping."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet_transformers(bars=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults that contradict each other
        types: dict[str, dict[str, Any]] = {kind: {"type": kind} for kind in CONFIG_MAPPING}
        for name, model in (*NAMED_MODELS.items(), *types.items()):
            kind = model.get("type")
            if kind is None:
                results = (Encoding(**model["encoding"]),)
            elif kind in CONFIG_MAPPING:
                try:
                    config = make_config({"model_type": kind, **model.get("entries", {})})
                    results = encodings(config)
                except UserError:  # its class refuses its own defaults
                    why = "its class makes no configuration by itself"
                    results = (Encoding("unknown", where=why),)
            else:
                continue
            yield KnownModel(name, kind, results, model.get("note", ""))
