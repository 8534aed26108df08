"""A scheme's charts as SVG files: one a chart, so that a phone shows one under the other.

They are the charts of `longitude show`. Each file carries the colours of both lights and follows
the reader's; it is named after what it draws, so that the next build takes over what did not
change.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vectors
import vl_convert

from longitude.core.scheme import Layers, Scheme
from longitude.inspection.page import page
from longitude.inspection.rows import Page, Sheet
from longitude.parts import Bidirectional, Causal
from longitude.viz import figures as draw
from longitude.viz.text import spans
from longitude.viz.theme import DARK

INK, SOFT, LINE, PALE = "#e8e6e3", "#a9a6a1", "#353331", "#2f2d2b"
AT_NIGHT = {
    **dict.fromkeys(("#000", "#222222", "black"), INK),
    **dict.fromkeys(("#555", "#888"), SOFT),
    **{"#eee": LINE, "#ddd": LINE, draw.PALE: PALE, draw.GREY: DARK[0], draw.BLUE: DARK[1]},
    **{draw.VERMILION: DARK[2], draw.GREEN: DARK[3], draw.PURPLE: DARK[4], draw.ORANGE: DARK[5]},
}
PADDING = {"left": 4, "top": 4, "right": 26, "bottom": 4}  # browsers set legends wider
LABELS = re.compile(r' (?:aria-[a-z]+|role)="[^"]*"')  # no reader of an image file hears them
Make = Callable[..., Any]


@dataclass(frozen=True)
class Picture:
    """A file of the site, and what it shows in words."""

    file: str
    alt: str
    width: int
    height: int


@dataclass(frozen=True)
class Drawn:
    """The pictures of one kind of layer; `layers` are named where they differ."""

    layers: str
    notes: tuple[str, ...]
    pictures: tuple[Picture, ...]


@dataclass
class Gallery:
    """Where pictures are put: `folder` is being built, `old` holds those of the last build."""

    folder: Path
    old: Path
    made: dict[str, Picture] = field(default_factory=dict)

    def draw(self, scheme: Scheme | Layers, whole: bool = False) -> tuple[list[Drawn], Page]:
        """Every chart of a scheme; `whole` draws its mask though it be the usual one, and first."""
        rows, first = page(scheme), draw.visible_pairs if whole else None
        schemes = [scheme] if isinstance(scheme, Scheme) else list(dict.fromkeys(scheme.schemes))
        return [
            Drawn(
                f"Layer {spans(sheet.layers)}" if sheet.layers else "",
                sheet.notes,
                tuple(self._chart(make, sheet, rows) for make in _makers(s, sheet, first)),
            )
            for sheet, s in zip(rows.sheets, schemes, strict=True)
        ], rows

    def _chart(self, make: Make, sheet: Sheet, rows: Page) -> Picture:
        spec = draw.document(lambda put: draw.inner(make(sheet, rows, put)))
        title = spec.pop("title")  # the page says it, in its own letters
        spec["config"] = {**draw.LOOK, "background": None, "padding": PADDING}
        text = json.dumps(spec)
        file = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.svg"
        if file not in self.made:
            self.made[file] = self._file(text, file, str(title))
        return self.made[file]

    def _file(self, spec: str, file: str, title: str) -> Picture:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.old / file).is_file():
            shutil.copyfile(self.old / file, self.folder / file)
        else:
            (self.folder / file).write_text(_svg(spec), encoding="utf-8")
        head = (self.folder / file).read_text(encoding="utf-8")[:400]
        size = re.search(r'width="([\d.]+)" height="([\d.]+)"', head)
        assert size, "vl_convert writes the size of its pictures"
        return Picture(f"pictures/{file}", title, *(round(float(n)) for n in size.groups()))


def _makers(scheme: Scheme, sheet: Sheet, first: Make | None) -> list[Make]:
    """The charts that a scheme has rows for, one of them `first`; its mask if it has no other."""
    every = {
        draw.distance_map: sheet.distances,
        draw.bias_curves: sheet.bias,
        draw.wavelength_plot: sheet.wavelengths,
        draw.decay_curve: sheet.decay,
        draw.scale_curve: sheet.scale,
        draw.visible_pairs: _shows(scheme) or first,
    }
    shown: list[Make] = [make for make, rows in every.items() if rows]
    if scheme.embed:
        shown = [lambda sheet, rows, put: vectors.chart(scheme, put), *shown]
    return sorted(shown, key=lambda make: make is not first) or [draw.visible_pairs]


def _shows(scheme: Scheme) -> bool:
    """Whether there is more to see of the pairs than that they are all there, or half of them."""
    rope = scheme.rotary
    moved = rope is not None and rope.remap is not None
    return moved or any(not isinstance(m, Causal | Bidirectional) for m in scheme.mask)


def _svg(spec: str) -> str:
    """A chart whose colours follow the reader's light."""
    drawn = LABELS.sub("", vl_convert.vegalite_to_svg(spec))
    rules = "".join(
        f'[{a}="{day}"]{{{a}:{night}}}' for day, night in AT_NIGHT.items() for a in _PAINTED
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    end = drawn.index(">") + 1
    return drawn[:end] + style + drawn[end:]


_PAINTED = ("fill", "stroke")
