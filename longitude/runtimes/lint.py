"""What runtimes would compute from one model's settings, beside what the settings mean.

A config.json means what the newest transformers computes from it; the keys of a GGUF file mean
themselves, heeded or not; a scheme, if one is given, means more than either. What is said at the
start of a server means an entry in place of the file's, with the file's base kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.faults import Fault, faults
from longitude.hf.gguf_reader import read_header
from longitude.hf.peft import ADAPTER_JSON
from longitude.hf.rope_config import ORIGINAL, is_number, main_rope_dict, read_config, rope_dicts
from longitude.hf.source import find, raw_config
from longitude.runtimes import llama_cpp
from longitude.runtimes.adapters import beside, trained_for
from longitude.runtimes.diff import Difference, difference
from longitude.runtimes.effective import Effective, Refused
from longitude.runtimes.emulate import BROKEN, COMPUTES, effective, is_gguf
from longitude.runtimes.issues import TRAPS, Trap
from longitude.runtimes.settings import NEWEST
from longitude.runtimes.target import head_size, of_text, wanted
from longitude.runtimes.transformers import overridden

OF_FOLDERS = ("transformers", "vllm", "sglang", "llama.cpp", "mlx", "exllama", "tensorrt-llm")
OF_GGUF = ("llama.cpp", "ollama", "transformers")
TOLD = ("--hf-overrides", "--json-model-override-args", "model_kwargs", "model_config")
TOLD += ("from_pretrained", "overrides_of_model_config")
LENGTHS = ("--max-model-len", "--context-length", "max_seq_len", "sequence_len")
ROPE = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Row:
    """One runtime's numbers, and how they differ."""

    runtime: str
    version: str
    found: Effective
    apart: Difference


@dataclass(frozen=True)
class Lint:
    """What a model's settings mean, and what becomes of it."""

    meant: Effective  # without frequencies where they mean nothing
    faults: tuple[Fault, ...]
    rows: tuple[Row, ...]
    notes: tuple[Trap, ...]

    @property
    def same(self) -> bool:
        """Whether every runtime computes what is meant."""
        right = self.meant.starts and not any(fault.serious for fault in self.faults)
        return right and all(row.apart.same for row in self.rows)


def settings_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """A model's settings: of a config.json, a folder, a name on the Hub, or a GGUF file."""
    if Path(name).is_file() and Path(name).suffix == ".json":
        file, raw = Path(name), read_config(name)
    else:
        source = find(name, revision)
        if source.gguf is not None:
            header = read_header(source.gguf)
            return {**header.keys, **header.divisors, **beside(source)}
        file, raw = raw_config(source)
        raw |= beside(source)
    cut = file.parent / "tokenizer_config.json"
    return {**raw, **({cut.name: read_config(cut)} if cut.is_file() else {})}


def lint(
    settings: Mapping[str, Any],
    runtimes: Sequence[str] = (),
    scheme: Scheme | None = None,
    known_faults: Sequence[Fault] = (),
) -> Lint:
    """What runtimes, as "vllm" or "vllm==0.28.0", compute from settings beside what they mean."""
    if not is_gguf(settings):
        _check(settings)
    named = runtimes or (OF_GGUF if is_gguf(settings) else OF_FOLDERS)
    intent = meant(settings, scheme)
    rows = []
    for name in named:
        runtime, _, version = name.partition("==")
        found = effective(runtime, settings, version or None)
        if ADAPTER_JSON in settings:
            found = replace(found, traps=("adapter alone", *found.traps))
        apart = difference(intent.inv_freq, intent.attention, intent.length, found)
        rows.append(Row(runtime, version or NEWEST[runtime], found, apart))
    wrong = () if is_gguf(settings) else tuple(faults(_plain(settings)))
    static = _scaled(settings) and intent.starts
    return Lint(
        intent, (*known_faults, *wrong), tuple(rows), (TRAPS["short inputs"],) if static else ()
    )


def known(names: str) -> tuple[str, ...]:
    """The runtimes of a list with commas; none of "all"."""
    if names == "all":
        return ()
    each = tuple(name.strip() for name in names.split(","))
    for name in each:
        if name.partition("==")[0] not in COMPUTES:
            raise UserError(
                f"no runtime is called {shown(name)}: there are {', '.join(COMPUTES)}, each with "
                f"a version if you like, as vllm==0.28.0, or all."
            )
    return each


def meant(settings: Mapping[str, Any], scheme: Scheme | None = None) -> Effective:
    """What settings mean, whoever reads them."""
    asked = next((settings[key] for key in LENGTHS if is_number(settings.get(key))), None)
    asked = asked or trained_for(settings)
    if is_gguf(settings):
        try:
            own = llama_cpp.stated(settings)
        except (Refused, *BROKEN) as error:
            if isinstance(error, UserError):
                raise
            own = Effective((), 0.0, 0, ())
        flag = settings.get("-c", settings.get("--ctx-size", settings.get("num_ctx")))
        own = Effective(own.inv_freq, own.attention, int(flag or own.length), ())
    else:
        own = effective("transformers", _merged(settings))
        own = Effective(own.inv_freq, own.attention, int(asked or own.length), ())
    if scheme is None:
        return own
    w = wanted(scheme, settings if not is_gguf(settings) else _sizes(settings), own.length)
    return Effective(w.inv_freq, w.attention, w.target, ())


def _check(settings: Mapping[str, Any]) -> None:
    text = of_text(settings)
    head_size(text)
    if not any(True for _ in rope_dicts(_plain(settings))) and "rope_theta" not in text:
        kind = text.get("model_type")
        if kind in ("bloom", "mpt", "gpt2", "opt", "bert", "roberta") or text.get("alibi"):
            raise UserError(
                f"nothing turns in a model of type {kind}: there is no rotation to lint."
            )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in config.json itself."""
    said = (*TOLD, *LENGTHS, "tokenizer_config.json", ADAPTER_JSON)
    return {k: v for k, v in settings.items() if k not in said}


def _merged(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The file with what a server is told put into it, dictionaries merged."""
    plain = _plain(settings)
    for key in TOLD:
        given = settings.get(key)
        if not isinstance(given, Mapping):
            continue
        inner = given.get("text_config", given)
        given = dict(inner) if isinstance(inner, Mapping) else {}
        new = next((given[k] for k in ROPE if isinstance(given.get(k), Mapping)), None)
        text = of_text(plain)
        held = next((text[k] for k in reversed(ROPE) if isinstance(text.get(k), Mapping)), {})
        base = (
            given.get("rope_theta")
            or text.get("rope_theta")
            or main_rope_dict(held).get("rope_theta")
        )
        one = {**main_rope_dict(held), **({"rope_theta": base} if base else {})}
        whole = {**({"rope_theta": base} if base else {}), **new} if new else one
        given |= {"rope_parameters": whole or None, "rope_scaling": None}
        plain = dict(overridden(plain, given, key))
    return plain


def _sizes(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What of a GGUF file's keys a scheme must know of the model."""
    arch = keys["general.architecture"]
    own = {k.removeprefix(f"{arch}."): v for k, v in keys.items()}
    head = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    trained = own.get("rope.scaling.original_context_length") or own["context_length"]
    return {"head_dim": head, ORIGINAL: trained, "max_position_embeddings": trained}


def _scaled(settings: Mapping[str, Any]) -> bool:
    """Whether the frequencies are scaled the same for short inputs as for long ones."""
    if is_gguf(settings):
        return any(k.startswith("rope_f") or k.endswith("rope.scaling.factor") for k in settings)
    own = [main_rope_dict(d) for k in ROPE if isinstance(d := of_text(settings).get(k), Mapping)]
    kinds = {str(d.get("rope_type") or d.get("type")) for d in own}
    return bool(kinds & {"linear", "yarn", "longrope", "su", "llama3"})
