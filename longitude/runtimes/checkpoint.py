"""A checkpoint opened for export: its settings, its own scheme, and where its files are.

No weights are read. A GGUF file's header gives what a config.json would: sizes, the trained length
and the rotation with its scaling.
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
TOKENIZER = "tokenizer_config.json"  # also the key for its content in the input of `emulate`
SLIDING = "sliding_attention"
# llama.cpp's defaults for files that leave these out (src/models of b11549): every how many layers
# one has full attention, and the base of the others
PERIODS, LOCAL_BASE = {"gemma3": 6, "gemma3n": 5}, 1e4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's settings, its own rotations, and where it is."""

    name: str  # the path or Hub name that commands use
    config: Mapping[str, Any]  # config.json, or its equivalent from the header of a GGUF file
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    header: Header | None = None  # of a GGUF file
    source: Source = field(default_factory=lambda: Source("", ""))
    home: Path = Path()  # where its small files are: its folder, or its place in the Hub's cache
    ropes: Mapping[str | None, Rope | None] = field(default_factory=dict)  # by type of layer; the
    # key None if all layers have the same
    saved: Mapping[str, Any] = field(default_factory=dict)  # the scheme it was saved or tuned with
    others: Mapping[str, Rope | None] = field(default_factory=dict)  # if types of layers differ,
    # the rotations of all types but full attention

    @property
    def needs_conversion(self) -> str | None:
        """What kind of model it is, if it has no folder that a runtime could read; else None."""
        if self.source.adapter is not None:
            return "an adapter"
        return "a GGUF file" if self.source.gguf is not None else None

    @property
    def own(self) -> Scheme | None:
        """The rotation of the model's full-attention layers; None if it has none."""
        rope = self.ropes.get(FULL, next(iter(self.ropes.values()), None))
        return None if rope is None else Scheme.of(rope)

    @property
    def trained(self) -> int | None:
        """The longest input that its configuration states."""
        stated = (text_config(self.config).get(key) for key in LENGTHS)
        return next((length for length in stated if isinstance(length, int)), None)

    @property
    def limit(self) -> int | None:
        """The tokenizer's longest input; None for placeholders such as 1e30."""
        length = self.tokenizer.get("model_max_length")
        return int(length) if isinstance(length, int | float) and length < 1e9 else None

    def resolve(self, text: str) -> Resolved:
        """Resolve a scheme on this model; what the text leaves out is taken from the model. No
        configuration states the layout of pairs in a head, nor a mask other than a window: both
        are taken from the text."""
        scheme, typed = parse(text), FULL in self.ropes
        layered = isinstance(scheme, Layers)
        if self.own is None or (layered and not typed):
            return Resolved(scheme, self.own, self)
        types: Sequence[str | None] = layer_types(self.config) if layered else list(self.ropes)
        before = []
        for n, kind in enumerate(types):  # the layer's own rotation, the text's pairs and masks
            rope, wanted = self.ropes.get(kind), scheme.layer(n, len(types))
            pairs = wanted.rotary.pairs if wanted.rotary else "half"
            own = Scheme() if rope is None else Scheme.of(replace(rope, pairs=pairs))
            windows = own_windows(self.config, kind)
            mask = tuple(m for m in wanted.mask if m in windows or m not in local_masks(wanted))
            before.append(replace(own, mask=mask))
        saved: list[Scheme] = before
        if self.saved:  # what the text leaves out is taken from the scheme that it was saved under
            forced = bool(self.saved.get("force"))
            saved = merge_scheme(str(self.saved["scheme"]), before, self.trained, forced)
        after = merge_scheme(text, saved, self.trained)
        first = {kind: n for n, kind in reversed([*enumerate(types)])}
        if any(after[n] != after[first[kind]] for n, kind in enumerate(types)):
            raise UserError(
                f"settings can give only one rotation per layer type, but {text} gives layers of "
                f"one type different ones: write the same for all layers of a type."
            )
        main = first[FULL] if typed else 0
        others = {kind: n for kind, n in first.items() if kind is not None and kind != FULL}
        ropes = {kind: after[n].rotary for kind, n in others.items()}
        changed = tuple((after[n], before[n]) for n in others.values() if after[n] != before[n])
        return Resolved(after[main], before[main], replace(self, others=ropes), changed)


class Resolved(NamedTuple):
    """A scheme's text applied to a model: the new and the original scheme of the full-attention
    layers, and the model with the new rotations of its other layer types, if it has several.
    `changes` has a pair (new, original) for each other layer type that changes."""

    scheme: Scheme | Layers
    own: Scheme | None
    model: Checkpoint
    changes: Sequence[tuple[Scheme, Scheme]] = ()


def open_checkpoint(name: str, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: a folder, a GGUF file, a name on the Hub, or a bundled one."""
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
    else:  # `save` wrote a scheme into it: restore what was there before
        config = {k: v for k, v in config.items() if k != SCHEME}
        config |= {k: v for k, v in entry.items() if k == "rope_parameters"}
    name, home = str(source.folder or name), file.parent
    tokenizer = read_json(home / TOKENIZER, optional=True)
    ropes, config = read(config), with_sizes(config)
    return Checkpoint(name, config, tokenizer, None, source, home, ropes, entry)


def layer_bases(header: Header) -> tuple[tuple[str, ...], float] | None:
    """Return the type of each layer of a GGUF file and the base of its sliding-window layers, if it
    differs: scaling and `rope.freq_base` then apply to full-attention layers only. Else None."""
    arch, layers = header.architecture, header.own("block_count")
    pattern = header.own("attention.sliding_window_pattern", PERIODS.get(arch))
    base = header.own("rope.freq_base_swa", LOCAL_BASE if arch in PERIODS else None)
    if not pattern or not layers or not header.own("attention.sliding_window"):
        return None
    if base is None or base == header.own("rope.freq_base", LOCAL_BASE):
        return None
    if not isinstance(pattern, list):  # the last layer of each period has full attention
        pattern = [(n + 1) % pattern != 0 for n in range(layers)]
    return tuple(SLIDING if windowed else FULL for windowed in pattern), float(base)


def gguf_config(header: Header) -> dict[str, Any]:
    """Convert a GGUF file's header to the config.json of a model with the same rotation."""
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
    if latent:  # only a part of each head rotates, which its configuration class sizes separately
        full_head = header.own("attention.key_length_mla", head)
        config.head_dim = config.qk_rope_head_dim = rotated
        config.qk_nope_head_dim = full_head - rotated
    fix_config(config, header)
    if latent:
        return {"model_type": "deepseek_v3", **vars(config)}
    if windowed := layer_bases(header):
        types, base = windowed
        local = {"rope_type": "default", "rope_theta": base}
        config.rope_parameters = {FULL: config.rope_parameters, SLIDING: local}
        config.layer_types, config.num_hidden_layers = list(types), len(types)
        return {"model_type": "gemma3_text", **vars(config)}  # a class whose layers may differ
    partial = "partial_rotary_factor" in config.rope_parameters
    # the simplest of transformers' models that rotates whole heads, or a fraction of each
    return {"model_type": "stablelm" if partial else "llama", **vars(config)}
