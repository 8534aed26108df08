"""A model as the page starts from it: its own scheme, its window and its sizes.

From a name, a folder or a file that the command line takes, or from a config.json that was dropped
onto the page. Nothing of the weights is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.explorer.methods import kind
from longitude.explorer.options import HEADS, LONGEST, OWN, TEXT, WIDEST, Asked, Column
from longitude.hf.encodings import KINDS, Encoding, read_encodings
from longitude.hf.rope_config import read_config
from longitude.runtimes.checkpoint import opened

AHEAD = 4  # times the window, as far as the page then draws
FIRST = {  # two ways past the window, to begin with
    "rope": ("yarn", "leaky_rerope"),
    "alibi": ("alibi_interpolated", "ntk_alibi"),
    "learned": ("hierarchical", "learned_interpolated"),
}


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
        """A fresh page for this model: as it is, and past its window."""
        ways = FIRST.get(kind(parse(self.own)) or "", ())
        return Asked(
            model=self.model,
            own=self.own,
            window=self.window,
            length=min(AHEAD * self.window, LONGEST),
            dim=self.dim,
            heads=self.heads,
            columns=(Column(OWN), *map(Column, ways)),
        )

    def plain(self) -> dict[str, Any]:
        """As the page is told."""
        return {**asdict(self), "link": self.asked.link}


def by_name(name: str) -> Picked:
    """The model of a name on the Hub, a folder, a config.json, a .gguf file, or one of ours."""
    if Path(name).suffix == ".json" and Path(name).is_file():
        return picked(read_config(name), name)
    return picked(opened(name).model.config, name)


def picked(config: Mapping[str, Any], name: str = "") -> Picked:
    """The model of a config.json."""
    every = read_encodings(config)
    told = next((one for one in every if one.scheme), None)
    if told is None or told.scheme is None:
        found = every[0].kind
        raise UserError(
            f"the positions of model_type {shown(config.get('model_type'))} can't be drawn "
            f"({found}: {KINDS[found]}): write a scheme as the model's own instead."
        )
    others = [f"Besides, it has {KINDS[one.kind]}." for one in every if one.kind != told.kind]
    return replace(_sized(told, name), notes=(*told.notes, *dict.fromkeys(others)))


def _sized(told: Encoding, name: str) -> Picked:
    """An encoding within the page's bounds."""
    own = dump(shortest(parse(told.scheme or "")))
    if len(own) > TEXT:
        raise UserError(
            f"the scheme of this model takes {len(own):,} characters to write: the page takes "
            f"{TEXT:,}, the command line more."
        )
    window = told.window or told.original or Asked.window  # with its own scaling, if it has one
    return Picked(
        name,
        own,
        window=min(max(window, 2), LONGEST),
        dim=min(told.head_dim or Asked.dim, WIDEST),
        heads=min(told.heads or Asked.heads, HEADS),
    )


def shortest(scheme: Scheme | Layers) -> Scheme | Layers:
    """Layers as few as tile the model."""
    each = [scheme.layer(n) for n in range(len(scheme))]
    for n in range(1, len(each) + 1):
        if len(each) % n == 0 and each == each[:n] * (len(each) // n):
            return each[0] if n == 1 else Layers(tuple(each[:n]))
    return scheme
