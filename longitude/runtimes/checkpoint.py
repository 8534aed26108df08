"""A checkpoint opened for export: its settings, its own scheme, and where its files are.

Nothing of the weights is read. A GGUF file's header says what a config.json would: sizes, the
trained length, and the rotation, its scaling included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.gguf_config import fix_config
from longitude.hf.gguf_reader import Header, read_header
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.rope_config import FULL, layer_types, read, rope_parameters
from longitude.hf.source import SCHEME, Source, find, raw_config
from longitude.parts import Rope
from longitude.runtimes.settings import TOKENIZER, Model
from longitude.runtimes.target import of_text

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class Asked(NamedTuple):
    """What a text asks of the layers that see everything, what they have of their own, and the
    model, with the rotations of its other layers where types of layers differ."""

    scheme: Scheme | Layers
    own: Scheme | None
    model: Model
    moved: bool = False  # whether the other layers are to turn otherwise, too


@dataclass(frozen=True)
class Opened:
    """A checkpoint's settings, the scheme it has of its own, and where it lies."""

    model: Model
    source: Source
    home: Path  # of its small files: the folder, or what the Hub's cache has of it
    ropes: Mapping[str | None, Rope | None]  # of each type of layer, or of all
    saved: Mapping[str, Any] = field(default_factory=dict)  # the scheme it was saved or tuned with

    @property
    def apart(self) -> str | None:
        """What it is, where no folder of it exists that a runtime could read."""
        if self.source.adapter is not None:
            return "an adapter"
        return "a GGUF file" if self.source.gguf is not None else None

    @property
    def own(self) -> Scheme | None:
        """Its own rotation, of the layers that see everything; None where nothing turns."""
        return _alone(self.ropes.get(FULL, next(iter(self.ropes.values()))))

    def asked(self, text: str) -> Asked:
        """What a text asks of this model, what it leaves out taken from the model's own.

        How pairs lie and which keys are seen stands in no configuration: it is as the text says.
        """
        asked, apart = parse(text), FULL in self.ropes
        if self.own is None or (isinstance(asked, Layers) and not apart):
            return Asked(asked, self.own, self.model)
        types: Sequence[str | None] = list(self.ropes)
        if isinstance(asked, Layers):
            types = layer_types(self.model.config)
        before = [
            _as_asked(self.ropes.get(kind), asked.layer(n, len(types)))
            for n, kind in enumerate(types)
        ]
        after = merge_scheme(text, before, self.trained)
        first = {kind: n for n, kind in reversed([*enumerate(types)])}
        if any(after[n] != after[first[kind]] for n, kind in enumerate(types)):
            raise UserError(
                f"settings give layers of one type one rotation, but {text} tells them apart: "
                f"write the same for all of a type."
            )
        at = first[FULL] if apart else 0
        beside = {k: after[n].rotary for k, n in first.items() if k is not None and k != FULL}
        moved = any(after[n] != before[n] for k, n in first.items() if k in beside)
        kinds = {k: rope_parameters(rope) for k, rope in beside.items() if rope}
        return Asked(after[at], before[at], replace(self.model, kinds=kinds), moved)

    @property
    def trained(self) -> int | None:
        """The positions that its configuration allows, as it stands."""
        stated = (of_text(self.model.config).get(key) for key in LENGTHS)
        return next((most for most in stated if isinstance(most, int)), None)


def opened(name: str, revision: str | None = None) -> Opened:
    """The checkpoint of this name: a folder, a GGUF file, a name on the Hub, or one of ours."""
    source = find(name, revision)
    if source.gguf is not None:
        header = read_header(source.gguf)
        config = gguf_config(header)
        model = Model(str(source.gguf), config, header=header)
        saved = (source.adapter.entry if source.adapter else None) or {}
        return Opened(model, source, source.gguf.parent, read(config), saved)
    file, config = raw_config(source)
    config, saved = _as_before(config)
    place = name if source.folder is None else str(source.folder)
    model = Model(place, config, held(file.parent / TOKENIZER))
    return Opened(model, source, file.parent, read(config), saved)


def _as_before(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config.json as it was before `save` wrote a scheme into it, and that scheme's entry."""
    entry = config.get(SCHEME)
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), str):
        return config, {}
    kept = {k: v for k, v in config.items() if k != SCHEME}
    return kept | {k: v for k, v in entry.items() if k == "rope_parameters"}, entry


def held(file: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}): write it anew.") from None
    return found if isinstance(found, dict) else {}


def gguf_config(header: Header) -> dict[str, Any]:
    """A GGUF file's header as the config.json of a model that turns the same way."""
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    heads = max(heads) if isinstance(heads, list) else heads
    head = header.own("attention.key_length") or (width // heads if width and heads else None)
    if not head or not header.own("context_length"):
        raise UserError(
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
    fix_config(turns, header)
    partial = "partial_rotary_factor" in turns.rope_parameters
    # the plainest of transformers' models that turns whole heads, or a share of them
    return {"model_type": "stablelm" if partial else "llama", **vars(turns)}


def _alone(rope: Rope | None) -> Scheme | None:
    return None if rope is None else Scheme.of(rope)


def _as_asked(rope: Rope | None, asked: Scheme) -> Scheme:
    """A rotation as the scheme of a layer: what no configuration says of it is as asked."""
    pairs = asked.rotary.pairs if asked.rotary else "half"
    turned = Scheme() if rope is None else Scheme.of(replace(rope, pairs=pairs))
    return replace(turned, mask=asked.mask)
