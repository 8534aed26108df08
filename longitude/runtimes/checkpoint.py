"""A checkpoint opened for export: its settings, its own scheme, and where its files are.

No weights are read. A GGUF file's header gives what a config.json would: sizes, the trained length
and the rotation, its scaling included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from longitude.core.scheme import Layers, Scheme
from longitude.core.store import read_json
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.gguf_config import LATENT, fix_config
from longitude.hf.gguf_reader import Header, read_header
from longitude.hf.merge_scheme import local_masks, merge_scheme
from longitude.hf.rope_config import FULL, layer_types, read
from longitude.hf.source import SCHEME, Source, find, raw_config
from longitude.parts import Rope
from longitude.runtimes.target import LENGTHS, own_windows, text_config, with_sizes

Entries = dict[str, Any]
TOKENIZER = "tokenizer_config.json"  # also its key among the settings that `emulate` reads
SLIDING = "sliding_attention"
# llama.cpp's own numbers for files that leave them out (src/models of b11549): how often a layer
# sees everything, and the base of all others
PERIODS, LOCAL_BASE = {"gemma3": 6, "gemma3n": 5}, 1e4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's settings, its own rotations, and where it is."""

    name: str  # as commands call it
    config: Mapping[str, Any]  # config.json, or the same from the header of a GGUF file
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    header: Header | None = None  # of a GGUF file
    source: Source = field(default_factory=lambda: Source("", ""))
    home: Path = Path()  # of its small files: the folder, or its place in the Hub's cache
    ropes: Mapping[str | None, Rope | None] = field(default_factory=dict)  # by type of layer; None:
    # of all
    saved: Mapping[str, Any] = field(default_factory=dict)  # the scheme it was saved or tuned with
    others: Mapping[str, Rope | None] = field(default_factory=dict)  # where types of layers differ:
    # the rotations of all but full attention

    @property
    def needs_conversion(self) -> str | None:
        """What it is, if there is no folder of it that a runtime could read."""
        if self.source.adapter is not None:
            return "an adapter"
        return "a GGUF file" if self.source.gguf is not None else None

    @property
    def own(self) -> Scheme | None:
        """Its own rotation, that of its full-attention layers; None if it has none."""
        rope = self.ropes.get(FULL, next(iter(self.ropes.values()), None))
        return None if rope is None else Scheme.of(rope)

    @property
    def trained(self) -> int | None:
        """The longest input by its configuration."""
        stated = (text_config(self.config).get(key) for key in LENGTHS)
        return next((length for length in stated if isinstance(length, int)), None)

    @property
    def limit(self) -> int | None:
        """The tokenizer's longest input; placeholders of 1e30 are none."""
        length = self.tokenizer.get("model_max_length")
        return int(length) if isinstance(length, int | float) and length < 1e9 else None

    def resolve(self, text: str) -> Resolved:
        """A scheme on this model; what the text leaves out is the model's own. How pairs lie in a
        head stands in no configuration, nor which keys are visible but for a window: both are
        as the text has them."""
        scheme, typed = parse(text), FULL in self.ropes
        layered = isinstance(scheme, Layers)
        if self.own is None or (layered and not typed):
            return Resolved(scheme, self.own, self)
        types: Sequence[str | None] = layer_types(self.config) if layered else list(self.ropes)
        before = []
        for n, kind in enumerate(types):  # each layer's own rotation, with the text's pairs, masks
            rope, given = self.ropes.get(kind), scheme.layer(n, len(types))
            pairs = given.rotary.pairs if given.rotary else "half"
            own = Scheme() if rope is None else Scheme.of(replace(rope, pairs=pairs))
            kept = own_windows(self.config, kind)
            mask = tuple(m for m in given.mask if m in kept or m not in local_masks(given))
            before.append(replace(own, mask=mask))
        saved: list[Scheme] = before
        if self.saved:  # what the text leaves out is of the scheme that it was saved under
            forced = bool(self.saved.get("force"))
            saved = merge_scheme(str(self.saved["scheme"]), before, self.trained, forced)
        after = merge_scheme(text, saved, self.trained)
        first = {kind: n for n, kind in reversed([*enumerate(types)])}
        if any(after[n] != after[first[kind]] for n, kind in enumerate(types)):
            raise UserError(
                f"settings give layers of one type one rotation, but {text} gives them different "
                f"ones: write the same for all layers of a type."
            )
        main = first[FULL] if typed else 0
        others = {kind: n for kind, n in first.items() if kind is not None and kind != FULL}
        ropes = {kind: after[n].rotary for kind, n in others.items()}
        changed = tuple((after[n], before[n]) for n in others.values() if after[n] != before[n])
        return Resolved(after[main], before[main], replace(self, others=ropes), changed)


class Resolved(NamedTuple):
    """A scheme's text applied to a model: the scheme of the full-attention layers, their own one,
    and the model with the new rotations of its other layers, where types of layers differ. Of those
    that change, the new schemes and the own ones."""

    scheme: Scheme | Layers
    own: Scheme | None
    model: Checkpoint
    changes: Sequence[tuple[Scheme, Scheme]] = ()


def open_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint of this name: a folder, a GGUF file, a name on the Hub, or a bundled one."""
    source = find(name, revision)
    if source.gguf is not None:
        header = read_header(source.gguf)
        config, home, name = gguf_config(header), source.gguf.parent, str(source.gguf)
        saved = (source.adapter.entry if source.adapter else None) or {}
        return Checkpoint(name, config, {}, header, source, home, read(config), saved)
    file, config = raw_config(source)
    entry = config.get(SCHEME)
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), str):
        entry = {}
    else:  # `save` wrote a scheme into it: as it was before
        config = {k: v for k, v in config.items() if k != SCHEME}
        config |= {k: v for k, v in entry.items() if k == "rope_parameters"}
    name, home = str(source.folder or name), file.parent
    tokenizer = read_json(home / TOKENIZER, optional=True)
    ropes, config = read(config), with_sizes(config)
    return Checkpoint(name, config, tokenizer, None, source, home, ropes, entry)


def layer_bases(header: Header) -> tuple[tuple[str, ...], float] | None:
    """The type of each layer of a GGUF file and the base of the windowed ones, if that is another:
    scaling and `rope.freq_base` are of the layers that see everything. None if all are alike."""
    arch, layers = header.architecture, header.own("block_count")
    pattern = header.own("attention.sliding_window_pattern", PERIODS.get(arch))
    base = header.own("rope.freq_base_swa", LOCAL_BASE if arch in PERIODS else None)
    if not pattern or not layers or not header.own("attention.sliding_window"):
        return None
    if base is None or base == header.own("rope.freq_base", LOCAL_BASE):
        return None
    if not isinstance(pattern, list):  # the last of each period sees everything
        pattern = [(n + 1) % pattern != 0 for n in range(layers)]
    return tuple(SLIDING if windowed else FULL for windowed in pattern), float(base)


def gguf_config(header: Header) -> dict[str, Any]:
    """A GGUF file's header as the config.json of a model with the same rotation."""
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    heads = max(heads) if isinstance(heads, list) else heads
    head = header.own("attention.key_length") or (width // heads if width and heads else None)
    if not head or not header.own("context_length"):
        raise UserError(
            f"{header.path} does not state its head size or its longest input "
            f"(attention.head_count, context_length): convert the model again."
        )
    config = SimpleNamespace(
        hidden_size=width,
        num_attention_heads=heads,
        head_dim=head,
        max_position_embeddings=header.own("context_length"),
        sliding_window=header.own("attention.sliding_window"),
        rope_parameters={"rope_type": "default", "rope_theta": header.own("rope.freq_base", 1e4)},
    )
    rotated = header.own("rope.dimension_count")
    latent = header.architecture == LATENT and rotated and header.own("attention.kv_lora_rank")
    if latent:  # only a part of each head rotates, which is a head of its own for its class
        whole = header.own("attention.key_length_mla", head)
        config.head_dim = config.qk_rope_head_dim = rotated
        config.qk_nope_head_dim = whole - rotated
    fix_config(config, header)
    if latent:
        return {"model_type": "deepseek_v3", **vars(config)}
    if found := layer_bases(header):
        types, base = found
        local = {"rope_type": "default", "rope_theta": base}
        config.rope_parameters = {FULL: config.rope_parameters, SLIDING: local}
        config.layer_types, config.num_hidden_layers = list(types), len(types)
        return {"model_type": "gemma3_text", **vars(config)}  # whose layers may differ
    partial = "partial_rotary_factor" in config.rope_parameters
    # the plainest of transformers' models that rotates whole heads, or a share of them
    return {"model_type": "stablelm" if partial else "llama", **vars(config)}
