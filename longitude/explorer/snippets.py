"""A scheme to copy: its text, code that uses it, and each runtime's settings.

The settings are those of `longitude export`, for the model that was picked or, without one, for a
plain Llama (or a GGUF file of one) of the page's sizes.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.explorer.methods import resolve
from longitude.explorer.state import PageState
from longitude.hf.gguf_reader import Header
from longitude.hf.rope_config import read as read_ropes
from longitude.hf.rope_config import rope_parameters
from longitude.hf.source import Source
from longitude.parts import Rope
from longitude.runtimes import runtimes
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import Export, exports
from longitude.runtimes.files import filled

MODEL = "MODEL"  # where none was picked
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
    return {
        "scheme": text,
        "code": _code(state, text),
        "target": target,
        "exports": [_export_json(one, state, target) for one in _exports(state, text, target)],
    }


def _code(state: PageState, text: str) -> list[dict[str, str]]:
    model, to = state.model or MODEL, ["--to", str(state.length)]
    quoted = json.dumps(text, ensure_ascii=False)
    sizes = {"length": min(state.length, EXAMPLE_LENGTH), "heads": state.heads, "dim": state.dim}
    patch = PATCH.format(model=json.dumps(model, ensure_ascii=False), text=quoted)
    measure = ["longitude", "extend", model, *to, "--methods", text]
    write = ["longitude", "export", model, *to, "--for", "all", "--scheme", text]
    texts = {
        "Attention in PyTorch": ATTENTION.format(text=quoted, **sizes),
        "A Hugging Face model": patch,
        "Draw it in the terminal": f"longitude show {shlex.quote(text)}\n",
        "Measure it on the model": shlex.join(measure) + "\n",
        "Write it for every runtime": shlex.join(write) + "\n",
    }
    if text.startswith(("layers(", "split(")):
        del texts["Attention in PyTorch"]
    return [{"title": title, "text": text} for title, text in texts.items()]


def _exports(state: PageState, text: str, target: int) -> list[Export]:
    """What each runtime needs, or why it can't run the scheme."""
    done: dict[str, Export] = {}
    for gguf, checkpoint in ((False, _folder(state)), (True, _file(state))):
        readers = [r for r in runtimes().values() if (r.reads == "gguf") == gguf]
        requests = [Export(runtime, text) for runtime in readers]
        done |= {one.runtime.name: one for one in exports(checkpoint, requests, target)}
    return [done[name] for name in runtimes()]


def _export_json(one: Export, state: PageState, target: int) -> dict[str, Any]:
    name = f"{_stem(state)}-{target}"
    one = filled(one, name, Path(f"{name}.gguf"))
    config, named = one.config, (*CONFIG_KEYS, "longitude")  # the entries about positions
    return {
        "runtime": one.runtime.title,
        "version": one.version,
        "text": one.text,
        "config": config and {k: config[k] for k in named if config.get(k) is not None},
        "notes": list(one.settings.notes) if one.settings else [],
        "refused": one.refused,
    }


def _folder(state: PageState) -> Checkpoint:
    """The model that was picked by name, or one of the page's sizes."""
    if state.model:
        try:
            found = open_checkpoint(state.model)
            if found.header is None:
                return found
        except UserError:
            pass  # a configuration that was dropped onto the page has a name and no path
    return _opened(state.model or MODEL, config_of(state))


def _file(state: PageState) -> Checkpoint:
    """A GGUF file of the page's sizes."""
    rope = _rope(state)
    own = {
        "context_length": state.window,
        "embedding_length": state.dim * state.heads,
        "attention.head_count": state.heads,
        "attention.key_length": state.dim,
        "rope.dimension_count": rope.dim(state.dim),
        "rope.freq_base": rope.base,
    }
    keys = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in own.items()}
    header = Header(Path(f"{_stem(state)}.gguf"), keys, {})
    return _opened(str(header.path), config_of(state), header)


def _stem(state: PageState) -> str:
    """The name of files made from the model. A link may say anything, and this stands unquoted in
    commands to copy."""
    return re.sub(r"[^\w.-]+", "-", Path(state.model).name.removesuffix(".gguf")) or MODEL


def _opened(name: str, config: dict[str, Any], header: Header | None = None) -> Checkpoint:
    source, ropes = Source(name, name), read_ropes(config)
    return Checkpoint(name, config, header=header, source=source, ropes=ropes)


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
    """The rotation of the layers without a window, if the model has one."""
    own = parse(state.own)
    rotary = [layer for n in range(len(own)) if (layer := own.layer(n)).rotary]
    full = next((layer for layer in rotary if len(layer.mask) == 1), None)
    first = full or next(iter(rotary), None)
    return (first.rotary if first else None) or Rope()
