"""A model as the page starts from it: its own scheme, its window and its sizes.

From a name, a folder or a file that the command line takes, or from a config.json that was dropped
onto the page. Nothing of the weights is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longitude.explore.asked import LONGEST, OWN, TEXT, Asked, Column
from longitude.explore.methods import kind as kind_of
from longitude.export.opened import opened
from longitude.export.wanted import head_size, of_text, trained_length
from longitude.fields import Mistake, shown
from longitude.hf.configs.ropes import layer_types, read
from longitude.hf.configs.stated import stated
from longitude.parts import Alibi, Learned, Rope, Window
from longitude.scheme import Layers, Scheme
from longitude.text import dump, parse

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
TABLES = ("gpt2", "opt", "bert", "roberta", "gpt_neo", "bart", "albert")
AHEAD = 4  # times the window, as far as the page then draws


@dataclass(frozen=True)
class Picked:
    """What the page is to start from."""

    model: str
    own: str
    window: int
    dim: int
    heads: int
    notes: tuple[str, ...] = ()

    @property
    def asked(self) -> Asked:
        """A fresh page for this model."""
        first = Asked(self.model, self.own, self.window, dim=self.dim, heads=self.heads)
        return replace(first, length=min(AHEAD * self.window, LONGEST), columns=_columns(self.own))

    def plain(self) -> dict[str, Any]:
        """As the page is told."""
        return {**asdict(self), "link": self.asked.link}


def by_name(name: str) -> Picked:
    """The model of a name on the Hub, a folder, a config.json, a .gguf file, or one of ours."""
    if Path(name).suffix == ".json" and Path(name).is_file():
        return picked(stated(name), name)
    return picked(opened(name).model.config, name)


def picked(config: Mapping[str, Any], name: str = "") -> Picked:
    """The model of a config.json."""
    text = of_text(config)
    own = _own(config, text)
    if len(own) > TEXT:
        raise Mistake(
            f"the scheme of this model takes {len(own):,} characters to write: the page takes "
            f"{TEXT:,}, the command line more."
        )
    heads = next((text[key] for key in HEADS if isinstance(text.get(key), int)), Asked.heads)
    return Picked(name, own, _window(config, text), head_size(config), heads)


def _own(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The scheme that the model was trained with."""
    ropes = read(config)
    if any(ropes.values()):
        kinds = layer_types(config) if None not in ropes else [None]
        return dump(_period([_layer(ropes.get(kind), kind, text) for kind in kinds or list(ropes)]))
    if text.get("alibi") or text.get("model_type") in ("bloom", "mpt"):
        return dump(Scheme.of(Alibi()))
    rows = text.get("n_positions") or text.get("max_position_embeddings")
    if text.get("model_type") in TABLES and isinstance(rows, int):
        return dump(Scheme.of(Learned(rows)))
    raise Mistake(
        f"the page knows rotations, ALiBi and learned tables, and finds none in a configuration of "
        f"model_type {shown(config.get('model_type'))}: write the model's own scheme as a text."
    )


def _layer(rope: Rope | None, kind: str | None, text: Mapping[str, Any]) -> Scheme:
    size = text.get("sliding_window") if kind == "sliding_attention" else None
    near = [Window(size)] if isinstance(size, int) and size > 0 else []
    return Scheme.of(*([rope] if rope else []), *near)


def _period(each: list[Scheme]) -> Scheme | Layers:
    """Layers as short as they tile the model."""
    count = len(each)
    for n in range(1, count + 1):
        if count % n == 0 and each == each[:n] * (count // n):
            return each[0] if n == 1 else Layers(tuple(each[:n]))
    return Layers(tuple(each))


def _window(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    ropes = [rope for rope in read(config).values() if rope]
    stated = text.get("n_positions") or text.get("seq_length") or text.get("max_seq_len")
    if isinstance(stated, int) and "max_position_embeddings" not in text:
        return min(stated, LONGEST)
    return min(trained_length(config, ropes[0].frequencies if ropes else None), LONGEST)


def _columns(own: str) -> tuple[Column, ...]:
    """The methods to start with: the model as it is, and two ways past its window."""
    kind = kind_of(parse(own))
    first = {
        "rope": ("yarn", "leaky_rerope"),
        "alibi": ("alibi_interpolated", "ntk_alibi"),
        "learned": ("hierarchical", "learned_interpolated"),
    }
    return (Column(OWN), *(Column(name) for name in first.get(kind or "", ())))
