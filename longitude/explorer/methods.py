"""The methods that the page offers, each as text, code and settings to copy.

They are every candidate of `longitude extend`, and every preset. A candidate's windows and groups
follow its paper's rule, and it is merged into the model's own scheme; a preset takes the page's
base, factor and window if it has arguments of these names. The settings to copy are those of
`longitude export`, for the model that was picked or, without one, for a plain Llama (or a GGUF file
of one) of the page's sizes.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from longitude.core.lengths import Lengths
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.explorer.state import OWN, WRITTEN, Column, PageState, kind
from longitude.extension.candidates import full_layers, proposals
from longitude.hf.gguf_reader import Header
from longitude.hf.merge_scheme import as_layers, merge_scheme
from longitude.hf.rope_config import read as read_ropes
from longitude.hf.rope_config import rope_parameters
from longitude.hf.source import Source
from longitude.inspection.catalogue import parts, presets
from longitude.parts import Rope
from longitude.presets import PRESETS
from longitude.runtimes import runtimes
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import Export, exports
from longitude.runtimes.files import filled

MAX_LAYERS = 512
TABLE_FIELDS = ("buckets", "dim", "hidden", "clip", "span")  # sizes of the tables that biases learn
MAX_TABLE = 4096  # larger fresh tables would fill the memory
Either = Scheme | Layers
MODEL = "MODEL"  # stands for the model if none was picked
ATTENTION = """import torch
from longitude import attention, parse

scheme = parse({text})
n = {length}
q, k, v = torch.randn(3, 1, {heads}, n, {dim})  # batch, heads, tokens, head dimension
out = attention(scheme, q, k, v, q_pos=range(n), k_pos=range(n))
"""
PATCH = """import longitude.hf as lh

model, tokenizer = lh.load({model})
lh.apply(model, {text})
"""
EXAMPLE_LENGTH = 1024  # tokens that the copied code runs on
CONFIG_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")


@dataclass(frozen=True)
class Resolved:
    """The scheme of a column, and the values of its controls (None: no such control)."""

    scheme: Either
    base: float | None
    factor: float | None


def choices(own_text: str) -> list[dict[str, Any]]:
    """The methods for a model of this scheme, in groups, each with its meaning."""
    extending = _candidates(parse(own_text), 1024, 4)
    meanings = {row.name: row.meaning for row in (*parts(), *presets())}
    groups = {
        "Model": [{"name": OWN, "what": "The model’s own scheme."}],
        "Context extension": [{"name": n, "what": meanings[n]} for n in extending],
        "Other encodings": [
            {"name": p.name, "what": p.meaning}
            for p in presets()
            if p.scheme and p.name not in extending
        ],
        "Custom": [{"name": WRITTEN, "what": "A scheme that you write."}],
    }
    return [{"group": name, "methods": methods} for name, methods in groups.items() if methods]


def resolve(column: Column, state: PageState) -> Resolved:
    """The scheme of a column; raises where there is none."""
    return _resolve(replace(column, layer=None), state.own, state.window, state.stretch)


parse_cached = lru_cache(maxsize=256)(parse)


@lru_cache(maxsize=1024)
def _resolve(column: Column, own_text: str, window: int, stretch: float) -> Resolved:
    own, factor = _checked(parse_cached(own_text)), column.factor or stretch
    if column.method == WRITTEN:
        scheme = _checked(parse(column.text))
        return Resolved(scheme, base_of(scheme), None)
    rebased, candidates = with_base(own, column.base), _candidates(own, window, factor)
    if column.method == OWN:
        return Resolved(rebased, base_of(rebased), None)
    if column.method in candidates:
        text = candidates[column.method]
        scheme = _checked(_merged(full_layers(text, own), rebased, window))
        depends = text != _candidates(own, window, 2 * factor + 1)[column.method]
        return Resolved(scheme, base_of(scheme), factor if depends else None)
    if column.method in PRESETS:
        return _preset(column, window, factor)
    methods = [OWN, *candidates, *PRESETS, WRITTEN]
    near = difflib.get_close_matches(column.method, methods, n=3, cutoff=0.4) or methods[:4]
    raise UserError(
        f"no method of this model is called {shown(column.method)}: use {', '.join(near)}, or "
        f"{WRITTEN} with a text."
    )


@lru_cache(maxsize=64)
def _candidates(own: Either, window: int, factor: float) -> dict[str, str]:
    """The candidates of `longitude extend`, the first of each name."""
    lengths = Lengths(window, max(window + 1, round(factor * window)))
    texts: dict[str, str] = {}
    for method in ("candidates", "more_candidates") if kind(own) else ():
        for candidate in proposals(kind(own) or "", lengths, method):
            texts.setdefault(candidate.name, candidate.text or "")
    if isinstance(own, Layers):  # reduced to the layers that repeat: too few to split
        texts.pop("split", None)
    return texts


def _merged(text: str, own: Either, window: int) -> Either:
    """A candidate merged into the model's own scheme, layer by layer."""
    scheme = parse(text)
    if (first := scheme.layer(0)).embed is not None:
        return replace(first, mask=own.layer(0).mask)
    count = max(len(own), len(scheme))
    return as_layers(merge_scheme(text, [own.layer(n) for n in range(count)], window), scheme)


def _preset(column: Column, window: int, factor: float) -> Resolved:
    """A preset with the page's numbers for those of its arguments that have the same meaning."""
    build = PRESETS[column.method]
    values: dict[str, Any] = {"base": column.base, "factor": column.factor}
    values |= dict.fromkeys(("train", "original", "length", "mean"), window)
    values |= dict.fromkeys(("target", "max"), round(factor * window))
    parameters = inspect.signature(build).parameters
    try:
        scheme = build(**{k: v for k, v in values.items() if k in parameters and v is not None})
    except TypeError:
        raise UserError(
            f"{column.method} needs arguments that the page has no controls for: write it out as "
            f"a text."
        ) from None
    if "factor" in parameters:
        shown_factor = column.factor or parameters["factor"].default
    else:
        shown_factor = factor if {"target", "max"} & parameters.keys() else None
    return Resolved(_checked(scheme), base_of(scheme), shown_factor)


def base_of(scheme: Either) -> float | None:
    """The base of the rotation; the largest, where layers differ."""
    return max((float(layer.rotary.base) for layer in scheme.schemes if layer.rotary), default=None)


def with_base(scheme: Either, base: float | None) -> Either:
    """Replace the base that `base_of` returns by another, in every layer that has it."""
    old = base_of(scheme)
    if base is None or old is None:
        return scheme
    schemes = [
        replace(s, rotary=replace(s.rotary, base=base)) if s.rotary and s.rotary.base == old else s
        for s in scheme.schemes
    ]
    return replace(scheme, schemes=tuple(schemes)) if isinstance(scheme, Layers) else schemes[0]


def _checked(scheme: Either) -> Either:
    """Raise for what would take too much memory or time to draw."""
    if len(scheme) > MAX_LAYERS:
        raise UserError(f"{len(scheme)} layers are too many here: write {MAX_LAYERS} at most.")
    for part in {bias for layer in scheme.schemes for bias in layer.bias}:
        if max(getattr(part, name, 0) for name in TABLE_FIELDS) > MAX_TABLE:
            raise UserError(
                f"{shown(part)} has a table too large for the page: write at most {MAX_TABLE:,}."
            )
    return scheme


def snippets(state: PageState, index: int) -> dict[str, Any]:
    """The text, the code and the exports of a column of the page."""
    if not 0 <= index < len(state.columns):
        raise UserError(
            f"there is no column {index + 1}: there are {len(state.columns)}, so give 1 to "
            f"{len(state.columns)}."
        )
    resolved = resolve(state.columns[index], state)
    text = dump(resolved.scheme)
    target = round((resolved.factor or state.stretch) * state.window)
    model, to = state.model or MODEL, ["--to", str(state.length)]
    quoted = json.dumps(text, ensure_ascii=False)
    sizes = {"length": min(state.length, EXAMPLE_LENGTH), "heads": state.heads, "dim": state.dim}
    patch = PATCH.format(model=json.dumps(model, ensure_ascii=False), text=quoted)
    measure = ["longitude", "extend", model, *to, "--methods", text]
    write = ["longitude", "export", model, *to, "--for", "all", "--scheme", text]
    code = {
        "Attention in PyTorch": ATTENTION.format(text=quoted, **sizes),
        "A Hugging Face model": patch,
        "Draw it in the terminal": f"longitude show {shlex.quote(text)}\n",
        "Measure it on the model": shlex.join(measure) + "\n",
        "Write it for every runtime": shlex.join(write) + "\n",
    }
    if text.startswith(("layers(", "split(")):
        del code["Attention in PyTorch"]
    return {
        "scheme": text,
        "code": [{"title": title, "text": snippet} for title, snippet in code.items()],
        "target": target,
        "exports": _exports(state, text, target),
    }


def _exports(state: PageState, text: str, target: int) -> list[dict[str, Any]]:
    """What each runtime needs, or why it can't run the scheme."""
    # a link's model is arbitrary text, and this goes unquoted into commands to copy
    stem = re.sub(r"[^\w.-]+", "-", Path(state.model).name.removesuffix(".gguf")) or MODEL
    results: dict[str, Export] = {}
    for gguf, checkpoint in enumerate(_checkpoints(state, Path(f"{stem}.gguf"))):
        readers = [r for r in runtimes().values() if (r.reads == "gguf") == gguf]
        requests = [Export(runtime, text) for runtime in readers]
        results |= {result.runtime.name: result for result in exports(checkpoint, requests, target)}
    rows, name = [], f"{stem}-{target}"
    for result in (filled(results[label], name, Path(f"{name}.gguf")) for label in runtimes()):
        config, keys = result.config, (*CONFIG_KEYS, "longitude")  # the entries about positions
        rows.append(
            {
                "runtime": result.runtime.title,
                "version": result.version,
                "text": result.text,
                "config": config and {k: config[k] for k in keys if config.get(k) is not None},
                "notes": list(result.settings.notes) if result.settings else [],
                "refused": result.refused,
            }
        )
    return rows


def _checkpoints(state: PageState, file: Path) -> tuple[Checkpoint, Checkpoint]:
    """The model that was picked, or one with the page's sizes; and a GGUF file with these sizes."""
    config, rope, name = config_of(state), _rope(state), state.model or MODEL
    sizes = {
        "context_length": state.window,
        "embedding_length": state.dim * state.heads,
        "attention.head_count": state.heads,
        "attention.key_length": state.dim,
        "rope.dimension_count": rope.dim(state.dim),
        "rope.freq_base": rope.base,
    }
    keys = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in sizes.items()}
    plain = Checkpoint(name, config, source=Source(name, name), ropes=read_ropes(config))
    source, header = Source(str(file), str(file)), Header(file, keys, {})
    gguf = replace(plain, name=str(file), header=header, source=source)
    if state.model:
        with suppress(UserError):  # a configuration dropped onto the page has a name and no path
            picked = open_checkpoint(state.model)
            return plain if picked.header else picked, gguf
    return plain, gguf


def config_of(state: PageState) -> dict[str, Any]:
    """The config.json of a plain model with the page's sizes and its own rotation."""
    rope = _rope(state)
    return {
        "model_type": "llama" if rope.fraction == 1 else "stablelm",
        "hidden_size": state.dim * state.heads,
        "num_attention_heads": state.heads,
        "head_dim": state.dim,
        "max_position_embeddings": state.window,
        "rope_parameters": rope_parameters(rope),
    }


def _rope(state: PageState) -> Rope:
    """The rotation of a layer without a window, else of any layer, else plain RoPE."""
    rotary = [s for s in parse(state.own).schemes if s.rotary]
    full = next((layer for layer in rotary if len(layer.mask) == 1), None)
    first = full or next(iter(rotary), None)
    return (first.rotary if first else None) or Rope()
