"""Compare what runtimes compute from a model's settings with what the settings mean.

A config.json means what the newest transformers computes from it. The keys of a GGUF file are taken
literally, whether llama.cpp reads them or not. A given scheme takes precedence over both. Start
options of a server override entries of the file, but keep the file's base.

peft stores no rotation, so a runtime that loads a base and an adapter rotates by the base's
settings. The scheme that the adapter was trained under is in longitude.json beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from longitude.core.progress import TextResult
from longitude.core.scheme import Scheme
from longitude.core.store import read_json
from longitude.core.validate import UserError, short
from longitude.hf.encodings import read_encodings
from longitude.hf.faults import Fault, check, faults
from longitude.hf.gguf_reader import Header, read_header
from longitude.hf.peft import ADAPTER_JSON, LONGITUDE_JSON
from longitude.hf.rope_config import (
    FULL,
    ORIGINAL,
    is_number,
    main_rope_dict,
    make_config,
    rope_dicts,
    rope_type,
)
from longitude.hf.source import SCHEME, find, raw_config
from longitude.runtimes import Issue, Runtime, llama_cpp, runtimes, transformers
from longitude.runtimes.checkpoint import (
    LOCAL_BASE,
    SLIDING,
    TOKENIZER,
    layer_bases,
    open_checkpoint,
)
from longitude.runtimes.effective import ISSUES, Difference, Effective, difference, emulated
from longitude.runtimes.target import LENGTHS, head_size, make_target, text_config, with_sizes

ARCHITECTURE = "general.architecture"  # in every GGUF file, and in no config.json
ROPE = ("rope_parameters", "rope_scaling")
SCALED = {"linear", "yarn", "longrope", "su", "llama3"}  # at all lengths, short inputs included
ADAPTER_WITHOUT_ROTATION = Fault(
    "adapter without its rotation",
    f"there is no {LONGITUDE_JSON} beside {ADAPTER_JSON}, and peft stores no rotation: on its "
    "unmodified base the adapter may rotate by other angles than it was trained with; save it by "
    "longitude.hf.save_adapter.",
    True,
)


@dataclass(frozen=True)
class Row:
    """What one runtime computes, and how that differs from what is meant."""

    runtime: str
    version: str
    found: Effective
    difference: Difference
    issues: tuple[Issue, ...]  # issues that explain the difference
    notes: tuple[Issue, ...]  # issues that affect no number

    @property
    def same(self) -> bool:
        return not self.difference.affects


@dataclass(frozen=True)
class LintResult(TextResult):
    """What a model's settings mean, and what runtimes compute from them."""

    meant: Effective  # without frequencies if the settings are invalid
    faults: tuple[Fault, ...]
    rows: tuple[Row, ...]
    notes: tuple[Issue, ...]
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()  # each rotation of a GGUF file whose
    # layers differ, and its layers; all other fields are about the first

    @property
    def same(self) -> bool:
        right = self.meant.starts and not any(fault.serious for fault in self.faults)
        return right and all(row.same for row in self.rows)

    def show(self, console: Console) -> None:
        """Print a row per runtime, then the issues with their fixes."""
        from longitude.viz.checkpoint import show_lint

        show_lint(self, console)

    def to_json(self) -> dict[str, Any]:
        """Return the frequencies, factor and length that are meant, and those of each runtime."""

        def listed(issues: Sequence[Issue]) -> list[dict[str, str]]:
            return [{"name": i.name, "sentence": i.sentence, "cure": i.fix} for i in issues]

        meant = {name: getattr(self.meant, name) for name in ("attention", "length", "remap")}
        return {
            "same": self.same,
            "meant": {**meant, "inv_freq": list(self.meant.inv_freq)},
            "faults": [vars(fault) for fault in self.faults],
            "notes": listed(self.notes),
            "layers": [{"rotation": what, "layers": list(n)} for what, n in self.layers],
            "runtimes": [
                {
                    "runtime": row.runtime,
                    "version": row.version,
                    "same": row.same,
                    "starts": row.difference.starts,
                    "frequencies_off": off if math.isfinite(off) else None,
                    "attention": row.found.attention,
                    "length": row.found.length,
                    "remap": row.found.remap,
                    "inv_freq": list(row.found.inv_freq),
                    "traps": listed(row.issues),
                    "notes": listed(row.notes),
                }
                for row in self.rows
                for off in [row.difference.frequencies]
            ],
        }


def lint_settings(
    settings: Mapping[str, Any],
    selected: Sequence[tuple[Runtime, str | None]] = (),
    scheme: Scheme | None = None,
    known_faults: Sequence[Fault] = (),
) -> LintResult:
    """Compare what runtimes (by default all that read the format) compute from settings."""
    gguf = ARCHITECTURE in settings
    kind = "gguf" if gguf else "config.json"
    config_faults = () if gguf else _faults(_config_only(settings))
    states_length = gguf or any(text_config(settings).get(key) for key in LENGTHS)
    if not gguf:
        settings = with_sizes(settings)
        text = text_config(settings)
        if not _rotates(text):
            model = text.get("model_type")
            raise UserError(f"a model of type {model} has no rotation to lint: give one with RoPE.")
        try:
            head_size(text)
        except UserError:
            check(_config_only(settings))  # raises if it has a known fault
            raise
    if not selected:
        readers = [r for r in runtimes().values() if kind in r.lints]
        readers.sort(key=lambda r: gguf and r.reads != kind)  # native readers first
        selected = [(r, None) for r in readers]
    remap = "" if gguf else dual_chunk(text_config(settings))
    intent = replace(meant(settings, scheme), remap=remap)
    rows = []
    for runtime, version in selected:
        effective = emulated(runtime.emulate, settings, version)
        if remap and runtime.dual_chunk(version):
            effective = replace(effective, remap=remap)
        elif remap:
            effective = replace(effective, issues=(*effective.issues, "dual chunk ignored"))
        if ADAPTER_JSON in settings:
            effective = replace(effective, issues=("adapter alone", *effective.issues))
        diff = difference(intent, effective)
        causes, remarks = explain(runtime, effective, diff)
        rows.append(Row(runtime.name, version or runtime.newest, effective, diff, causes, remarks))
    # whether frequencies are scaled for short inputs as well as for long ones
    gguf_scaled = any(k.startswith("rope_f") or k.endswith("rope.scaling.factor") for k in settings)
    kinds = {rope_type(main_rope_dict(text_config(settings).get(key))) for key in ROPE}
    scaled = intent.starts and (gguf_scaled if gguf else bool(kinds & SCALED))
    notes = (ISSUES["short inputs"],) if scaled else ()
    notes += () if states_length else (ISSUES["length by default"],)
    layers = gguf_layers(settings) if gguf else ()
    return LintResult(intent, (*known_faults, *config_faults), tuple(rows), notes, layers)


def _faults(raw: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Return the faults of a config.json; if none is serious, also why transformers rejects it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    result, known = faults(raw), raw.get("model_type") in CONFIG_MAPPING and not raw.get("auto_map")
    if known and not any(fault.serious for fault in result):
        try:
            make_config(raw)
        except UserError as error:
            return (Fault("refused", str(error), True), *result)
    return tuple(result)


def _rotates(text: Mapping[str, Any]) -> bool:
    """Whether a configuration has a rotation. If transformers does not have its class, it must
    state the rotation itself."""
    if text.get("alibi") or text.get("position_embedding_type") == "nope":
        return False
    stated = any(rope_dicts(text)) or "rope_theta" in text
    return stated or "rope" in {each.kind for each in read_encodings(text)}


def gguf_layers(keys: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each rope base with its layers, full attention first; empty if all are equal."""
    header = Header(Path(), dict(keys), {})
    types_and_base = layer_bases(header)
    if types_and_base is None:
        return ()
    types, local = types_and_base
    bases = {FULL: header.own("rope.freq_base", LOCAL_BASE), SLIDING: local}
    window = f", a window of {header.own('attention.sliding_window'):,} tokens"
    windows = {FULL: "", SLIDING: window}
    return tuple(
        (f"base {base:,.10g}{windows[kind]}", tuple(n for n, t in enumerate(types) if t == kind))
        for kind, base in bases.items()
    )


def explain(
    runtime: Runtime, found: Effective, away: Difference
) -> tuple[tuple[Issue, ...], tuple[Issue, ...]]:
    """Return the known issues that explain a difference, and those that affect no number."""
    known = ISSUES | {issue.name: issue for issue in runtime.issues}
    encountered = [known[name] for name in dict.fromkeys(found.issues)]
    causes = [issue for issue in encountered if away.affects & set(issue.affects.split())]
    if away.starts:
        explained = {quantity for issue in causes for quantity in issue.affects.split()}
        causes += [known[f"other {quantity}"] for quantity in sorted(away.affects - explained)]
    return tuple(causes), tuple(issue for issue in encountered if not issue.affects)


def read_settings(name: str, revision: str | None = None) -> dict[str, Any]:
    """Read a model's settings from a config.json, a folder, a name on the Hub, or a GGUF file."""
    file, raw, adapter = read_file(name, revision)
    added: dict[str, Any] = {}  # what an adapter adds to its base's settings
    if adapter:
        added = {ADAPTER_JSON: {"base": adapter.base, "target": adapter.target}}
    if isinstance(raw, Header):
        return {**raw.keys, **raw.divisors, **added}
    if (tokenizer := file.parent / TOKENIZER).is_file():
        added[TOKENIZER] = read_json(tokenizer)
    return {**raw, **added}


def read_file(name: str, revision: str | None) -> tuple[Path, dict[str, Any] | Header, Any]:
    """Return the file with a model's settings, its content (a config.json or the header of a GGUF
    file), and the adapter if the name is an adapter's (the file is then its base's)."""
    if Path(name).is_file() and Path(name).suffix == ".json":
        return Path(name), read_json(Path(name)), None
    source = find(name, revision)
    if source.gguf is not None:
        return source.gguf, read_header(source.gguf), source.adapter
    return *raw_config(source), source.adapter


def saved_scheme(name: str, revision: str | None = None) -> tuple[Scheme | None, tuple[Fault, ...]]:
    """Return the scheme that an adapter or a checkpoint was trained or saved under, if its settings
    do not express it, or else what is wrong. Both are empty for other models."""
    if name.endswith(".json"):
        return None, ()
    source = find(name, revision)
    adapter = source.adapter
    if adapter is not None and not adapter.held:
        return None, (ADAPTER_WITHOUT_ROTATION,)
    entry = adapter.entry if adapter else None
    if adapter is None and source.gguf is None:
        entry = raw_config(source)[1].get(SCHEME)
    expressed = adapter is None and isinstance(entry, dict) and "rope_parameters" in entry
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), str) or expressed:
        return None, ()
    text, checkpoint = entry["scheme"], open_checkpoint(name, revision)
    try:
        scheme = checkpoint.resolve(text).scheme
        if not isinstance(scheme, Scheme):
            raise UserError("its layers differ")
        target = adapter.target if adapter else entry.get("target")
        length = target or checkpoint.trained or 1
        make_target(scheme, checkpoint.config, length)
    except UserError as error:
        why = str(error).rstrip(".")
        sentence = f"it was trained under {short(text)}, which has no settings ({why}): load it "
        sentence += "by longitude.hf.load; below is what the settings mean without it."
        return None, (Fault("scheme beyond settings", sentence, True),)
    return scheme, ()


def meant(settings: Mapping[str, Any], scheme: Scheme | None = None) -> Effective:
    """Return what settings mean, independent of the runtime that reads them."""
    gguf = ARCHITECTURE in settings
    readers = [r for r in runtimes().values() if (r.reads == "gguf") == gguf]
    options = (option for runtime in readers for option in runtime.lengths)
    length = next((settings[key] for key in options if is_number(settings.get(key))), None)
    sizes = settings
    if gguf:
        own = emulated(partial(llama_cpp.from_keys, literal=True), settings)
        key = Header(Path(), dict(settings), {}).own
        trained = key("rope.scaling.original_context_length") or key("context_length")
        sizes = {"head_dim": key("attention.key_length"), ORIGINAL: trained}
        sizes["hidden_size"] = key("embedding_length")
        sizes["num_attention_heads"] = key("attention.head_count")
    else:
        length = length or (settings.get(ADAPTER_JSON) or {}).get("target")
        config: Mapping[str, Any] = _config_only(settings)
        for option in (runtime.overrides for runtime in runtimes().values()):
            override = settings.get(option)  # start options of a server: merge rope dictionaries
            if not isinstance(override, Mapping):
                continue
            inner = override.get("text_config", override)
            override = dict(inner) if isinstance(inner, Mapping) else {}
            new = next((override[k] for k in ROPE if isinstance(override.get(k), Mapping)), None)
            text = text_config(config)
            rope = main_rope_dict(text.get("rope_scaling") or text.get("rope_parameters"))
            base = next(filter(None, (d.get("rope_theta") for d in (override, text, rope))), None)
            theta = {"rope_theta": base} if base else {}
            merged = {**theta, **new} if new else {**rope, **theta}
            override |= {"rope_parameters": merged or None, "rope_scaling": None}
            config = transformers.overridden(config, override, option)
        own = emulated(transformers.emulate, config)
    own = Effective(own.inv_freq, own.attention, int(length or own.length))
    if scheme is None:
        return own
    target = make_target(scheme, sizes, own.length)
    return Effective(target.inv_freq, target.attention, target.length)


def dual_chunk(config: Mapping[str, Any]) -> str:
    """Return the remap in configurations such as Qwen2.5-1M's, as a scheme writes it, or ""."""
    entry = config.get("dual_chunk_attention_config")
    sizes = [entry.get(k) for k in ("chunk_size", "local_size")] if isinstance(entry, dict) else []
    return f"dual_chunk({', '.join(map(str, sizes))})" if all(sizes) and sizes else ""


def _config_only(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json itself, without other files and start options."""
    others = {TOKENIZER, ADAPTER_JSON}
    for runtime in runtimes().values():
        others |= {runtime.overrides, *runtime.lengths}
    return {k: v for k, v in settings.items() if k not in others}
