"""A checkpoint opened for export: its settings, its own scheme, and where its files are.

Nothing of the weights is read. A GGUF file's header says what a config.json would: sizes, the
trained length, and the rotation, its scaling included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longitude.export.spelling.value import TOKENIZER, Model
from longitude.export.wanted import of_text
from longitude.fields import Mistake, shown
from longitude.hf.configs.ropes import read
from longitude.hf.loading.gguf import Header, read_header
from longitude.hf.loading.mend import mend
from longitude.hf.loading.source import Source, find, raw_config
from longitude.hf.patching.inherit import inherit
from longitude.parts import Rope
from longitude.scheme import Layers, Scheme
from longitude.text import parse


@dataclass(frozen=True)
class Opened:
    """A checkpoint's settings, the scheme it has of its own, and where it lies."""

    model: Model
    source: Source
    home: Path  # of its small files: the folder, or what the Hub's cache has of it
    own: Scheme | None  # None where nothing turns

    def asked(self, text: str) -> tuple[Scheme | Layers, Scheme | None]:
        """What a text asks of this model, what it leaves out taken from the model's own; and that.

        How pairs lie and which keys are seen stands in no configuration: it is as the text says.
        """
        asked = parse(text)
        if self.own is None or self.own.rotary is None or isinstance(asked, Layers):
            return asked, self.own
        pairs = asked.rotary.pairs if asked.rotary else self.own.rotary.pairs
        own = replace(self.own, rotary=replace(self.own.rotary, pairs=pairs), mask=asked.mask)
        return inherit(text, [own], self.trained)[0], own

    @property
    def trained(self) -> int | None:
        """The positions that its configuration allows, as it stands."""
        most = of_text(self.model.config).get("max_position_embeddings")
        return most if isinstance(most, int) else None


def opened(name: str, revision: str | None = None) -> Opened:
    """The checkpoint of this name: a folder, a GGUF file, a name on the Hub, or one of ours."""
    source = find(name, revision)
    if source.gguf is not None:
        header = read_header(source.gguf)
        config = gguf_config(header)
        model = Model(str(source.gguf), config, header=header)
        return Opened(model, source, source.gguf.parent, _own(config))
    file, config = raw_config(source)
    place = name if source.folder is None else str(source.folder)
    model = Model(place, config, held(file.parent / TOKENIZER))
    return Opened(model, source, file.parent, _own(config))


def held(file: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Mistake(f"{file} is no JSON ({error}): write it anew.") from None
    return found if isinstance(found, dict) else {}


def gguf_config(header: Header) -> dict[str, Any]:
    """A GGUF file's header as the config.json of a model that turns the same way."""
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    heads = max(heads) if isinstance(heads, list) else heads
    head = header.own("attention.key_length") or (width // heads if width and heads else None)
    if not head or not header.own("context_length"):
        raise Mistake(
            f"{header.path} does not say how large its heads or how long its inputs are "
            f"(attention.head_count, context_length): convert the model again."
        )
    turns = SimpleNamespace(
        hidden_size=width,
        num_attention_heads=heads,
        head_dim=head,
        max_position_embeddings=header.own("context_length"),
        sliding_window=header.own("attention.sliding_window"),
        rope_parameters={"rope_type": "default", "rope_theta": header.own("rope.freq_base", 1e4)},
    )
    mend(turns, header)
    partial = "partial_rotary_factor" in turns.rope_parameters
    # the plainest of transformers' models that turns whole heads, or a share of them
    return {"model_type": "stablelm" if partial else "llama", **vars(turns)}


def _own(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a configuration, as far as that says it: one rotation."""
    found = {rope for rope in read(config).values() if rope is not None}
    if len(found) > 1:
        raise Mistake(
            f"types of layers turn differently in this model ({shown(_one(found))} and others), "
            f"and an export says one rotation for all: use longitude.hf.save instead."
        )
    return Scheme.of(found.pop()) if found else None


def _one(found: set[Rope]) -> Rope:
    return min(found, key=str)
