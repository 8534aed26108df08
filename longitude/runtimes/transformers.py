"""transformers: `rope_parameters` of version 5, `rope_theta` and `rope_scaling` of version 4.

src/transformers/modeling_rope_utils.py of 5.22.2, 4.57.6, 4.51.3 and 4.44.2. Version 5 takes
`rope_scaling` for the whole where both are given; version 4 never looks into `rope_parameters`.
From 4.45 to 4.55 YaRN's factor is the ratio of the lengths where the original one is given; before,
its ramp runs over `max_position_embeddings`.

transformers: a config.json in both spellings, which a folder is written around.

`rope_parameters` is version 5's, `rope_theta` and `rope_scaling` version 4's. Versions about 4.51
take YaRN's factor from max_position_embeddings / original, so that the first is the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longitude.hf.rope_config import ORIGINAL, RopeDict, is_number, main_rope_dict
from longitude.parts import Ntk, Yarn
from longitude.runtimes.effective import (
    Effective,
    Read,
    Refused,
    before,
    computed,
    frequencies,
    longrope_attention,
    turned_dims,
    yarn_attention,
)
from longitude.runtimes.rope_dictionaries import both, either
from longitude.runtimes.settings import TOKENIZER, Model, Spelling
from longitude.runtimes.target import Wanted, of_text

SCALED = ("llama3", "yarn", "longrope")
THETA = 10000.0


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What transformers computes; keywords of `from_pretrained` are under that name."""
    given = config.get("from_pretrained") or {}
    if before(version, "5"):
        return made(version4(overridden(config, given, "from_pretrained"), version), version)
    return made(version5(config, given))


def overridden(
    config: Mapping[str, Any], given: Mapping[str, Any], under: str
) -> Mapping[str, Any]:
    """A configuration with entries in place of its own, whole dictionaries too."""
    held = {key: value for key, value in config.items() if key != under}
    inside = next((k for k, v in held.items() if v is of_text(config) and v is not config), None)
    return {**held, inside: {**held[inside], **given}} if inside else {**held, **given}


def version5(config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> Read:
    """The rotation as a configuration of version 5 holds it, after keywords are set on it.

    A dictionary that is given replaces the one there and inherits no theta from it; a theta that is
    given beside it is not read, for the one inside comes first.
    """
    given, text = given or {}, of_text(config)
    read = _standard(text, _dictionary(text), _theta(text))
    if given:
        text = {**text, **given}
        new = main_rope_dict(given.get("rope_scaling") or given.get("rope_parameters") or {})
        beside = given.get("rope_theta")
        lost = bool(new) and new.get("rope_theta") is None
        ignored = beside is not None and not new and beside != read.base
        own = dict(new) if new else read.own
        read = _standard(text, own, None if lost else read.base)
        read = read.trapped("no theta" if lost else None, "theta beside" if ignored else None)
    return read


def _dictionary(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_scaling` if it is given, or else `rope_parameters`; of layers that differ, those that
    see everything."""
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return main_rope_dict(found) if isinstance(found, Mapping) else {}


def _theta(text: Mapping[str, Any]) -> float:
    """The base for a dictionary without one: the file's, or its class's default."""
    stated = text.get("rope_theta", text.get("rotary_emb_base"))
    if is_number(stated):
        return float(stated)
    found = getattr(RopeDict(text, {}, {}, "").model, "default_theta", THETA)
    return float(found) if is_number(found) else THETA


def _standard(text: Mapping[str, Any], own: Mapping[str, Any], theta: float | None) -> Read:
    said = own.get("rope_theta")
    base = float(said) if is_number(said) else theta
    kind = str(own.get("rope_type") or own.get("type") or "default")
    entries = {**own, "rope_type": kind}
    if kind in SCALED:
        beside, most = text.get(ORIGINAL), text.get("max_position_embeddings")
        entries[ORIGINAL] = beside or own.get(ORIGINAL) or most
    share = _share(text, own, kind)
    return Read(text, {**entries, "rope_theta": base}, base, turned_dims(text, share))


def _share(text: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> float:
    """The share of a head that turns, which a model's own code may not heed."""
    stated = RopeDict(text, own, own, "")
    blind = kind == "default" and not stated.named("partial_rotary_factor")
    return 1.0 if blind or kind == "proportional" else stated.share


def version4(config: Mapping[str, Any], version: str | None) -> Read:
    """The rotation as version 4 holds it: `rope_theta` and `rope_scaling` side by side."""
    text = of_text(config)
    scaling = text.get("rope_scaling")
    own = dict(main_rope_dict(scaling)) if isinstance(scaling, Mapping) else {}
    unread = bool(text.get("rope_parameters")) and (not own or not text.get("rope_theta"))
    kind = str(own.get("rope_type") or own.get("type") or "default")
    share = _share(text, {}, kind)
    read = Read(text, {**own, "rope_type": kind}, _theta(text), turned_dims(text, share))
    read = read.trapped("rope_parameters unread" if unread else None)
    if kind == "longrope":
        return _old_longrope(read, version)
    if kind == "llama3":
        return read.having(**{ORIGINAL: own.get(ORIGINAL) or read.most})
    return _old_yarn(read, version) if kind == "yarn" else read


def _old_longrope(read: Read, version: str | None) -> Read:
    """LongRoPE's entries as version 4 takes them: its original length stands beside, and without
    one it is the maximum; the versions before 4.45 then chose the long list by the factor."""
    beside = read.text.get(ORIGINAL)
    factor = read.most / beside if beside else read.own.get("factor")
    read = read.having(**{ORIGINAL: beside or read.most}, factor=factor)
    if not beside and before(version, "4.45"):
        far = (read.maybe("factor") or 1.0) > 1
        read = read.having(short_factor=read.own.get("long_factor")) if far else read
    return read if beside else read.trapped("other original")


def _old_yarn(read: Read, version: str | None) -> Read:
    """YaRN's entries as the versions before 4.56 take them."""
    own = read.own
    cut = "truncate ignored" if not own.get("truncate", True) else None
    if before(version, "4.45"):
        plain = read.having(mscale=None, truncate=None, **{ORIGINAL: read.most})
        return plain.trapped("other original" if own.get(ORIGINAL) != read.most else None, cut)
    if before(version, "4.56") and own.get(ORIGINAL):
        by_lengths = read.most / float(own[ORIGINAL])
        other = "factor from lengths" if by_lengths != own.get("factor") else None
        return read.having(factor=by_lengths, truncate=None).trapped(other, cut)
    return read.having(**{ORIGINAL: own.get(ORIGINAL) or read.most})


def made(read: Read, version: str | None = None, length: int | None = None) -> Effective:
    """What transformers computes from what it has read; dynamic NTK as at its factor times the
    length, for it has no length of its own."""
    if read.base is None:
        raise Refused("no theta")
    most = length or read.most
    match read.kind:
        case "yarn":
            return computed(read, frequencies(read), attention=yarn_attention(read), length=most)
        case "longrope":
            scale = read.maybe("factor") or read.most / read.number(ORIGINAL)
            stated = read.maybe("attention_factor")
            gain = longrope_attention(read, scale) if stated is None else stated
            switched = ["longrope switch"] if _two_lists(read) else []
            return computed(read, frequencies(read), attention=gain, length=most, traps=switched)
        case "dynamic" if read.maybe("alpha") and RopeDict(read.text, {}, {}, "").named("alpha"):
            return computed(read, Ntk(read.number("alpha")), length=most)  # Hunyuan's, once
        case "dynamic":
            reach = most * read.number("factor")
            return computed(read, frequencies(read), length=reach, traps=["decode differs"])
    return computed(read, frequencies(read), length=most)


def _two_lists(read: Read) -> bool:
    return read.own.get("short_factor") != read.own.get("long_factor")


TEXT = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in either(w, model.config):
        config = both(model, parameters, w.target)
        settings = config | {TOKENIZER: dict(model.tokenizer) | {"model_max_length": w.target}}
        yield Spelling("transformers", version, settings, TEXT, "load.py", config, _ratio(w))


def _ratio(w: Wanted) -> tuple[str, ...]:
    """What versions that take YaRN's factor from two lengths would make of others."""
    f = w.rope.frequencies
    if not isinstance(f, Yarn) or f.factor * f.original == w.target:
        return ()
    return (
        f"transformers about 4.51 takes {w.target / f.original:g} for YaRN's factor, not "
        f"{f.factor:g}: export with --to {f.factor * f.original:.0f} for those.",
    )


def dynamic(model: Model, parameters: dict[str, object], original: int, version: str) -> Spelling:
    """Dynamic NTK, which begins at max_position_embeddings, whatever else is said."""
    config = both(model, parameters, original)
    note = (
        "transformers turns new keys by a larger base and keeps the old ones: what it decodes "
        "differs from what it prefills; longitude.hf.loading with the scheme does not."
    )
    spelling = Spelling("transformers", version, config, TEXT, "load.py", config)
    return replace(spelling, notes=(note,))
