"""transformers: `rope_parameters` of version 5, `rope_theta` and `rope_scaling` of version 4.

Source: modeling_rope_utils.py of 5.23.0, 5.22.2, 4.57.6, 4.51.3 and 4.44.2. If both are given,
version 5 reads only `rope_scaling`; version 4 never reads `rope_parameters`. From 4.45 to
4.55 YaRN's factor is max_position_embeddings / original if the latter is given; before, its ramp
runs over `max_position_embeddings`. An export writes config.json in both spellings.

The settings contain keyword arguments of `from_pretrained` under that name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from longitude import __version__
from longitude.core.scheme import Layers, Scheme
from longitude.core.store import read_json
from longitude.core.validate import UserError
from longitude.hf.rope_config import (
    FULL,
    ORIGINAL,
    RopeDict,
    is_number,
    main_rope_dict,
    make_config,
    rope_parameters,
    rope_type,
    ropes,
    sections_of,
)
from longitude.hf.source import SCHEME
from longitude.parts import DynamicNtk, Ntk, Rope, Yarn
from longitude.runtimes import Question, Runner, Runtime, Settings, TopTokens
from longitude.runtimes.checkpoint import TOKENIZER, Checkpoint
from longitude.runtimes.effective import (
    DEFAULT_BASE,
    DoesNotStart,
    Effective,
    RopeEntries,
    before,
    rotated_dims,
)
from longitude.runtimes.rope_dictionaries import both_spellings, listed, named_or_listed
from longitude.runtimes.target import Target, head_size, required, text_config

START = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""
WITH_LONGITUDE = """import longitude.hf as lh

model, tokenizer = lh.load("{folder}")

# or, on a model that your own code has loaded:
lh.apply(model, "{scheme}")
"""


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    if "general.architecture" in config:  # from a GGUF file it reads the base and drops the scaling
        from longitude.runtimes import llama_cpp  # imports `version5` from here

        dropped = [k for k in config if ".rope.scal" in k or k.startswith("rope_")]
        read = {k: v for k, v in config.items() if k not in dropped and not k.startswith("-")}
        effective = llama_cpp.from_keys(read)
        gemma = str(config["general.architecture"]).startswith("gemma")
        bos = config.get("tokenizer.ggml.add_bos_token") or gemma
        issues = ["scaling dropped"] * bool(dropped) + ["no BOS"] * bool(bos)
        return Effective(effective.inv_freq, effective.attention, effective.length, tuple(issues))
    keywords = config.get("from_pretrained") or {}
    if before(version, "5"):
        return computed(version4(overridden(config, keywords, "from_pretrained"), version))
    return computed(version5(config, keywords))


def overridden(
    config: Mapping[str, Any], given: Mapping[str, Any], under: str
) -> Mapping[str, Any]:
    """Return a configuration with entries replaced, dictionaries as a whole."""
    rest = {key: value for key, value in config.items() if key != under}
    text = text_config(config)
    inside = next((k for k, v in rest.items() if v is text and v is not config), None)
    return {**rest, inside: {**rest[inside], **given}} if inside else {**rest, **given}


def version5(config: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> RopeEntries:
    """Return the rotation as a configuration of version 5 holds it, with the keywords `given` set.
    A given rope dictionary replaces the existing one and does not inherit its theta. A theta given
    beside the dictionary is not read, since the one inside takes precedence."""
    given, text = given or {}, text_config(config)
    own = main_rope_dict(text.get("rope_scaling") or text.get("rope_parameters"))
    rope = _standardized(text, own, default_theta(text))
    if not given:
        return rope
    new = main_rope_dict(given.get("rope_scaling") or given.get("rope_parameters"))
    beside = not new and given.get("rope_theta") not in (None, rope.base)
    lost = bool(new) and new.get("rope_theta") is None
    base = None if lost else rope.base
    rope = _standardized({**text, **given}, dict(new) if new else rope.entries, base, bool(new))
    return rope.noting("no theta" if lost else None, "theta beside" if beside else None)


def default_theta(text: Mapping[str, Any]) -> float:
    """The base for a rope dictionary without one: the file's, or its class's default."""
    stated = text.get("rope_theta", text.get("rotary_emb_base"))
    if not is_number(stated):
        stated = getattr(RopeDict(text, {}, {}, "").model, "default_theta", DEFAULT_BASE)
    if isinstance(stated, Mapping):  # by type of layer, full attention first: Gemma 3, ModernBERT
        stated = next(iter(stated.values()))
    return float(stated) if is_number(stated) else DEFAULT_BASE


def _standardized(
    text: Mapping[str, Any], own: Mapping[str, Any], theta: float | None, given: bool = False
) -> RopeEntries:
    """Fill in the base and the original length, as `standardize_rope_params` does. The type of a
    dictionary that is given at the start is not renamed."""
    inside = own.get("rope_theta")
    base = float(inside) if is_number(inside) else theta
    kind, stated = rope_type(own), RopeDict(text, own, own, "")
    entries = {**own, "rope_type": kind if given else stated.kind}  # Phi-3 renames yarn of its file
    if kind in ("llama3", "yarn", "longrope"):
        longest = text.get("max_position_embeddings")
        entries[ORIGINAL] = text.get(ORIGINAL) or own.get(ORIGINAL) or longest
    gain = own.get("long_mscale")
    if stated.model and is_number(gain) and stated.named("long_mscale"):  # Phi-3.5-MoE
        entries["attention_factor"] = gain
    dims = _rotated_dims(text, own, kind)
    return RopeEntries(text, {**entries, "rope_theta": base}, base, dims)


def _rotated_dims(text: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> int:
    """The rotated dimensions of a head; a model's own code may not read the stated share."""
    stated = RopeDict(text, own, own, "")
    named = "rotary_dim" in text or stated.named("partial_rotary_factor")
    unread = kind == "default" and not named
    return rotated_dims(text, 1.0 if unread or kind == "proportional" else stated.share)


def version4(config: Mapping[str, Any], version: str | None) -> RopeEntries:
    """Return the rotation as version 4 holds it: `rope_theta` beside `rope_scaling`."""
    text = text_config(config)
    own = main_rope_dict(text.get("rope_scaling"))
    unread = bool(text.get("rope_parameters")) and (not own or not text.get("rope_theta"))
    kind = rope_type(own)
    entries, dims = {**own, "rope_type": kind}, _rotated_dims(text, {}, kind)
    rope = RopeEntries(text, entries, default_theta(text), dims)
    rope = rope.noting("rope_parameters unread" if unread else None)
    original, longest = own.get(ORIGINAL), rope.max_length
    match kind:
        case "longrope":  # the original length is beside it, or else the maximum
            beside = rope.config.get(ORIGINAL)
            factor = longest / beside if beside else own.get("factor")
            rope = rope.updated(**{ORIGINAL: beside or longest}, factor=factor)
            if not beside and before(version, "4.45") and (rope.optional("factor") or 1.0) > 1:
                rope = rope.updated(short_factor=own.get("long_factor"))  # factor selects the list
            return rope.noting(None if beside else "other original")
        case "yarn" if before(version, "4.45"):
            issue = "other original" if original != longest else None
            plain = rope.updated(mscale=None, truncate=None, **{ORIGINAL: longest})
            return plain.noting(issue, *rope.ignoring("truncate"))
        case "yarn" if before(version, "4.56") and original:
            factor = longest / float(original)
            issue = "factor from lengths" if factor != own.get("factor") else None
            plain = rope.updated(factor=factor, truncate=None)
            return plain.noting(issue, *rope.ignoring("truncate"))
        case "llama3" | "yarn":
            return rope.updated(**{ORIGINAL: original or longest})
    return rope


def computed(rope: RopeEntries, length: int | None = None) -> Effective:
    """Return what transformers computes from these entries. Dynamic NTK has no length of its own:
    it is evaluated at its factor times the maximum."""
    if rope.base is None:
        raise DoesNotStart("no theta")
    length = length or rope.max_length
    match rope.kind:
        case "dynamic":
            alpha = rope.optional("alpha")
            if alpha and RopeDict(rope.config, {}, {}, "").named("alpha"):  # Hunyuan stretches once
                return rope.computed(length, Ntk(alpha))
            return rope.computed(length * rope.number("factor"), issues=["decode differs"])
    return rope.computed(length)


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield config.json with a named rope type, or with a list of factors."""
    f, notes = target.rope.frequencies, ()
    if isinstance(f, Yarn) and f.factor * f.original != target.length:
        notes = (
            f"transformers 4.45 to 4.55 uses {target.length / f.original:g} for YaRN's factor, not "
            f"{f.factor:g}: export with --to {f.factor * f.original:.0f} for those versions.",
        )
    gains = dict.fromkeys(("short_mscale", "long_mscale"), target.attention)  # for Phi-3.5-MoE
    for parameters in (*named_or_listed(target), *listed(target, **gains)):
        config = both_spellings(model, parameters, target.length)
        if not _reads(config, target):
            continue
        limit = {TOKENIZER: dict(model.tokenizer) | {"model_max_length": target.length}}
        yield Settings(config | limit, config=config, notes=notes)


def _reads(config: Mapping[str, Any], target: Target) -> bool:
    """Whether the model's own class computes the target from a config.json: Phi-3's accepts no type
    but longrope, and others validate entries in ways that no formula shows."""
    rotations = _ropes(config)
    rope = rotations.get(FULL) or next(filter(None, rotations.values()), None)
    if rope is None or rope.dim(head_size(config)) != target.dims:
        return False
    read = target.under(rope)
    same = map(math.isclose, read.inv_freq, target.inv_freq)
    return all(same) and math.isclose(read.attention, target.attention)


def _ropes(config: Mapping[str, Any]) -> Mapping[str | None, Rope | None]:
    """The rotations that the model's own class reads from a config.json; {} if it rejects it."""
    from longitude.hf.device import quiet_transformers

    text = text_config(config)
    try:
        with quiet_transformers(bars=False):
            return ropes(make_config(text if "model_type" in text else config))
    except UserError:
        return {}


def write_any(
    text: str, scheme: Scheme | Layers, own: Scheme | None, model: Checkpoint
) -> Settings:
    """Return config.json with the scheme itself, for `longitude.hf.load`. Dynamic NTK is stated as
    transformers' own type as well, which begins at max_position_embeddings."""
    _check_patch(text, model.config)
    entry: dict[str, Any] = {"scheme": text, "version": __version__}
    config: Mapping[str, Any] = model.config
    note = "stock transformers reads this folder with the model's own scheme: load it as shown."
    rope = scheme.layer(0).rotary
    if rope and own and own.rotary and isinstance(rope.frequencies, DynamicNtk):
        if required(scheme, own) is not None:
            sections = sections_of(text_config(model.config))
            parameters = sections | rope_parameters(rope)
            stated = both_spellings(model, parameters, rope.frequencies.original)
            if any(r and r.frequencies == rope.frequencies for r in _ropes(stated).values()):
                config = stated
                entry["rope_parameters"] = sections | rope_parameters(own.rotary)
                note = (
                    "transformers rotates new keys by a larger base and keeps the old ones: "
                    "decoding differs from prefill; longitude.hf.load with the scheme does not."
                )
    start = WITH_LONGITUDE.replace("{scheme}", text.replace('"', '\\"'))
    return Settings(config, start, {**config, SCHEME: entry}, (note,))


def _check_patch(text: str, config: Mapping[str, Any]) -> None:
    """Raise if the scheme can't be applied to the model, as far as can be told without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from longitude.hf.device import quiet_transformers
    from longitude.hf.patch import patched

    try:
        with quiet_transformers(bars=False), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_config(config))
    except Exception:  # not a language model, or one with custom code
        return
    inner = [m for m in model.modules() if hasattr(m, "_can_set_attn_implementation")]
    try:
        with patched(model, text, check=False):
            return
    except UserError as error:
        why = str(error)
    except Exception:  # most attention is recognised by its outputs, which a meta model lacks
        if not inner or any(m._can_set_attn_implementation() for m in inner):
            return
        why = f"no attention of {type(model).__name__} goes through transformers' interface."
    raise UserError(f"longitude.hf.load would refuse the folder: {why}")


def top_tokens(question: Question) -> TopTokens:
    """Run transformers, with `longitude.hf.load` if the folder contains a scheme."""
    import torch

    from longitude.hf.device import quiet_transformers

    path = Path(question["path"])
    if saved := read_json(path / "config.json", optional=True).get(SCHEME):
        from longitude.hf.loading import load
        from longitude.hf.patch import apply

        model, _ = load(str(path), device="cpu", dtype="float32", quiet=True)
        apply(model, saved["scheme"], length=question["length"], force=bool(saved.get("force")))
    else:
        auto = import_module("transformers").AutoModelForCausalLM
        kwargs = dict(question["settings"].get("from_pretrained") or {})
        place = question["path"]
        if path.suffix == ".gguf":
            place, kwargs = str(path.parent), {**kwargs, "gguf_file": path.name}
        with quiet_transformers(bars=False):
            model = auto.from_pretrained(place, dtype=torch.float32, **kwargs).eval()
    last = torch.tensor(question["lengths"]) - 1
    with torch.no_grad():
        logits = model(torch.tensor([question["ids"]]), logits_to_keep=last).logits[0]
    best, tokens = logits.log_softmax(-1).topk(min(question["top"], logits.shape[-1]))
    rows = zip(tokens.tolist(), best.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


RUNTIME = Runtime(
    name="transformers",
    title="transformers",
    versions=("4.44.2", "4.51.3", "4.57.6", "5.22.2", "5.23.0"),
    emulate=emulate,
    write=write,
    rank=1,
    start=START,
    file="load.py",
    writes="folder",
    supports=frozenset({"fixed", "proportional", "dynamic_ntk", "learned_table"}),
    layers="all",
    lints=("config.json", "gguf"),
    overrides="from_pretrained",
    write_any=write_any,
    runner=Runner("transformers", "transformers", top_tokens),
)
