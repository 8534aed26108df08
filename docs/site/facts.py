"""What a method's page tells, read off the code: the part itself, and what follows from it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prose import Erratum, Prose

from longitude.core.part import PARTS, Dims, Learned
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.inspection import catalogue, lengths
from longitude.parts import Alibi, Rope
from longitude.parts import Learned as Table
from longitude.runtimes.support import serves

SITES = {
    "positions": ("① positions", "A number for each token."),
    "embed": ("② embed", "Vectors added to, or multiplied into, the embeddings."),
    "rotary": ("③ rotary", "Queries and keys turned by their positions."),
    "frequencies": (
        "③ frequencies",
        "How fast each pair turns: inside rope(frequencies=…).",
    ),
    "remap": ("③ remap", "Which distance the rotation is told: inside rope(remap=…)."),
    "decay": ("③ decay", "Rotary pairs that fade with distance: inside rope(decay=…)."),
    "scale": ("④ scale", "A factor for each query."),
    "bias": ("⑤ bias", "A term added to each score."),
    "mask": ("⑥ mask", "Which keys a query may see, and so what a cache keeps."),
}
LONGEST = 45  # letters of a title; what follows its comma is left to the sentence below it
DIMS = Dims(dim=512, heads=8, head_dim=64)
RUNTIMES = {"transformers": "transformers", "vllm": "vLLM", "sglang": "SGLang"}
USUAL = {"unscaled", "sequential", "causal"}  # what every scheme has that names nothing else


@dataclass(frozen=True)
class Method:
    """A part or a preset, and all that its page says."""

    name: str
    kind: str  # a site, or "presets"
    written: str
    meaning: str
    paper: str
    details: str
    scheme: Scheme | Layers
    text: str  # the scheme that is drawn, as one writes it
    prose: Prose
    parts: tuple[str, ...]
    errata: tuple[Erratum, ...]
    results: tuple[str, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name that the first sentence begins with; a preset has only that of its function."""
        head, colon, _ = self.meaning.partition(":")
        if not colon or self.kind == "presets":
            return self.name
        return head if len(head) <= LONGEST else head.partition(",")[0]

    @property
    def sentence(self) -> str:
        """The meaning without the title that stands above it."""
        rest = self.meaning.removeprefix(f"{self.title}:").strip()
        return rest[0].upper() + rest[1:] if re.match(r"(a |[a-z]{2,}\b)(?![_(^])", rest) else rest

    @property
    def file(self) -> str:
        return f"{'presets' if self.kind == 'presets' else 'methods'}/{self.name}.html"


def every(
    said: Mapping[str, Prose], errata: tuple[Erratum, ...], results: Mapping[str, Path]
) -> dict[str, Method]:
    """Every part, then every preset, by name."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in results.items()}
    made = [
        *(_part(row, said[row.name]) for row in catalogue.parts()),
        *(_preset(row, said.get(row.name, Prose())) for row in catalogue.presets()),
    ]
    return {
        name: Method(
            name=name,
            **fields,
            errata=tuple(e for e in errata if name in e.methods),
            results=tuple(r for r, text in texts.items() if re.search(rf"\b{name}\(", text)),
        )
        for name, fields in made
    }


def _part(row: Any, prose: Prose) -> tuple[str, dict[str, Any]]:
    scheme = parse(prose.example)
    cls: Any = PARTS[row.name]
    _, _, rest = (sys.modules[cls.__module__].__doc__ or "").partition("\n\n")
    return row.name, {
        "kind": row.site,
        "written": row.written,
        "meaning": row.meaning,
        "paper": row.paper,
        "details": rest,
        "scheme": scheme,
        "text": prose.example,
        "prose": prose,
        "parts": (),
        "facts": _facts(row.name, scheme),
    }


def _preset(row: Any, prose: Prose) -> tuple[str, dict[str, Any]]:
    text = prose.example or f"{row.name}()"
    scheme = parse(text)
    named = dict.fromkeys(p.name for s in _schemes(scheme) for p in lengths.every(s))
    own = [n for n in named if n not in USUAL]
    return row.name, {
        "kind": "presets",
        "written": row.call,
        "meaning": row.meaning,
        "paper": row.paper,
        "details": "",
        "scheme": scheme,
        "text": text,
        "prose": prose,
        "parts": tuple(own or ["causal"]),
    }


def _schemes(scheme: Scheme | Layers) -> tuple[Scheme, ...]:
    return (scheme,) if isinstance(scheme, Scheme) else scheme.schemes


def _facts(name: str, scheme: Scheme | Layers) -> dict[str, str]:
    """What can be computed: learned numbers, and which runtimes serve it by their own settings."""
    found = [p for s in _schemes(scheme) for p in [*lengths.every(s), *s.mask] if p.name == name]
    part: Any = next(iter(found), None)
    facts = {}
    if isinstance(part, Learned):
        count = sum(w.numel() for w in part.init(DIMS, None).values())
        where = "model" if getattr(part, "site", "") == "embed" else "layer"
        facts["Learned numbers"] = f"{count:,} for a {where} of 8 heads of 64" if count else "none"
    if part is not None and (asked := _asked(part, scheme)):
        able = [RUNTIMES.get(r, r) for r in serves(*asked)]
        facts["Served by"] = ", ".join(able) if able else "Longitude alone"
    if getattr(part, "by_length", False):
        facts["Depends on"] = "the length of the call, which is an input"
    return facts


def _asked(part: Any, scheme: Scheme | Layers) -> tuple[Scheme, Scheme] | None:
    """The part alone on a model that is otherwise plain, and that model as it is."""
    if not isinstance(scheme, Scheme):
        return None
    if part.site in ("frequencies", "remap") and scheme.rotary:
        bare = Rope(scheme.rotary.base, scheme.rotary.fraction, scheme.rotary.pairs)
        return Scheme.of(scheme.rotary), Scheme.of(bare)
    if part.name in ("hierarchical", "learned_tiled", "learned_interpolated"):
        return Scheme.of(part), Scheme.of(Table(part.length, part.offset))
    if part.name in ("alibi_interpolated", "ntk_alibi"):
        return Scheme.of(part), Scheme.of(Alibi())
    return None
