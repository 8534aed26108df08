"""A scheme in words to copy: its text, the code that uses it, and each runtime's own settings.

The settings are `longitude.export`'s, for the model that was picked or, where none was, for a plain
Llama (or a GGUF file of one) of the page's sizes.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.explorer.methods import made
from longitude.explorer.options import Asked
from longitude.hf.gguf_reader import Header
from longitude.hf.rope_config import read as read_ropes
from longitude.hf.rope_config import rope_parameters
from longitude.hf.source import Source
from longitude.parts import Rope
from longitude.runtimes.checkpoint import Opened, opened
from longitude.runtimes.export import OF_GGUF, Export, Wish, exports
from longitude.runtimes.settings import Model, called
from longitude.runtimes.write import RUNTIMES

MODEL = "MODEL"  # where none was picked
CODE = """import torch
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
SHORT = 1024  # tokens that the code to copy runs on: enough to try it


def words(asked: Asked, index: int) -> dict[str, Any]:
    """The text, the code and the exports of a column of the page."""
    if not 0 <= index < len(asked.columns):
        raise UserError(
            f"column {index + 1} was asked for, but there are {len(asked.columns)}: give 1 to "
            f"{len(asked.columns)}."
        )
    found = made(asked.columns[index], asked)
    text = dump(found.scheme)
    target = round((found.factor or asked.stretch) * asked.window)
    return {
        "scheme": text,
        "code": code(asked, text),
        "target": target,
        "exports": [_plain(one, asked, target) for one in exported(asked, text, target)],
    }


def code(asked: Asked, text: str) -> list[dict[str, str]]:
    """Programs and commands that use a scheme."""
    model = asked.model or MODEL
    whole = CODE.format(
        text=_quoted(text), length=min(asked.length, SHORT), heads=asked.heads, dim=asked.dim
    )
    layered = "layers(" in text
    to = ["--to", str(asked.length)]
    measure = ["longitude", "extend", model, *to, "--methods", text]
    write = ["longitude", "export", model, *to, "--for", "all", "--scheme", text]
    return [
        *([] if layered else [{"title": "Attention in PyTorch", "text": whole}]),
        {
            "title": "A Hugging Face model",
            "text": PATCH.format(model=_quoted(model), text=_quoted(text)),
        },
        {"title": "Draw it in the terminal", "text": f"longitude show {shlex.quote(text)}\n"},
        {"title": "Measure it on the model", "text": shlex.join(measure) + "\n"},
        {"title": "Write it for every runtime", "text": shlex.join(write) + "\n"},
    ]


def _quoted(text: str) -> str:
    """A text as Python writes it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def exported(asked: Asked, text: str, target: int) -> list[Export]:
    """What each runtime is told, or why there is nothing to tell it."""
    folder, file = _folder(asked), _file(asked)
    found: dict[str, Export] = {}
    for place, names in ((folder, set(RUNTIMES) - {*OF_GGUF}), (file, {*OF_GGUF})):
        wishes = [Wish(name, text) for name in RUNTIMES if name in names]
        found |= {one.wish.runtime: one for one in exports(place, wishes, target)}
    return [found[name] for name in RUNTIMES]


def _plain(one: Export, asked: Asked, target: int) -> dict[str, Any]:
    said, name = one.spelling, f"{_stem(asked)}-{target}"
    text = said.text.replace("{folder}", name).replace("{file}", f"{name}.gguf") if said else None
    return {
        "runtime": called(one.wish.runtime),
        "version": said.version if said else None,
        "text": text,
        "config": _changed(said.config) if said else None,
        "notes": list(said.notes) if said else [],
        "refused": one.refused,
    }


def _changed(config: Any) -> dict[str, Any] | None:
    """Of a config.json that is written anew, the entries that tell of positions."""
    if config is None:
        return None
    named = ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings")
    return {k: config[k] for k in (*named, "longitude") if config.get(k) is not None}


def _folder(asked: Asked) -> Opened:
    """The model that was picked by name, or one of the page's sizes."""
    if asked.model:
        try:
            found = opened(asked.model)
            if found.model.header is None:
                return found
        except UserError:
            pass  # a configuration that was dropped onto the page has a name and no place
    return _opened(asked, Model(asked.model or MODEL, config_of(asked)))


def _file(asked: Asked) -> Opened:
    """A GGUF file of the page's sizes."""
    config = config_of(asked)
    own = {
        "context_length": asked.window,
        "embedding_length": asked.dim * asked.heads,
        "attention.head_count": asked.heads,
        "attention.key_length": asked.dim,
        "rope.dimension_count": _rope(asked).dim(asked.dim),
        "rope.freq_base": _rope(asked).base,
    }
    keys = {"general.architecture": "llama"} | {f"llama.{k}": v for k, v in own.items()}
    header = Header(Path(f"{_stem(asked)}.gguf"), keys, {})
    return _opened(asked, Model(str(header.path), config, header=header))


def _stem(asked: Asked) -> str:
    """What files made of the model are called. A link may say anything, and this stands unquoted
    in commands to copy."""
    return re.sub(r"[^\w.-]+", "-", Path(asked.model).name.removesuffix(".gguf")) or MODEL


def _opened(asked: Asked, model: Model) -> Opened:
    return Opened(model, Source(model.name, model.name), Path(), read_ropes(model.config))


def config_of(asked: Asked) -> dict[str, Any]:
    """The config.json of a plain model with the page's sizes and its own rotation."""
    rope = _rope(asked)
    return {
        "model_type": "llama" if rope.fraction == 1 else "stablelm",
        "hidden_size": asked.dim * asked.heads,
        "num_attention_heads": asked.heads,
        "head_dim": asked.dim,
        "max_position_embeddings": asked.window,
        "rope_parameters": rope_parameters(rope),
    }


def _rope(asked: Asked) -> Rope:
    """The rotation of the layers that see everything."""
    own = parse(asked.own)
    each = [own.layer(n) for n in range(len(own))]
    full = [one for one in each if one.rotary and len(one.mask) == 1] or [
        one for one in each if one.rotary
    ]
    return full[0].rotary or Rope() if full else Rope()
