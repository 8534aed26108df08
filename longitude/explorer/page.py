"""The page itself: one document with its style and scripts, live behind the server or still.

The live page asks the server for its numbers; the still one has those of one state inside it, and
needs nobody. Neither may load anything from elsewhere: the policy allows no other address, and of
scripts only our own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.core.validate import UserError, shown
from longitude.explorer.charts import charts, themes
from longitude.explorer.options import COLUMNS
from longitude.explorer.vega import NAMES

SCRIPTS = ("charts.js", "page.js")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FIGURES = (
    (
        "map",
        "Distance map",
        "Which distance the model believes at each true one. A band: pairs of dimensions are told "
        "different distances, from the least to the greatest. Dotted: the truth; dashed: the "
        "trained window; orange: past it.",
    ),
    (
        "decay",
        "Decay",
        "The mean of the cosine over all pairs: how much of a score is left at a distance. The "
        "band is its swing between two points of the curve.",
    ),
    (
        "wavelengths",
        "Wavelengths",
        "The tokens in which each pair of dimensions turns once. Above the dashed line (orange) a "
        "pair does not turn once in the trained window, and knows but a part of the circle.",
    ),
    (
        "stretch",
        "What becomes of each pair",
        "How many times longer its wavelength is than the model’s own: 1 is kept as it was, the "
        "factor is interpolated whole.",
    ),
    (
        "scale",
        "Query scale",
        "The factor on a query’s logits by its position.",
    ),
    (
        "keys",
        "What the last token sees, and what a cache keeps",
        "Blue: seen, at a distance that training showed. Orange: seen, past what it showed. Grey: "
        "kept, but hidden now. Pale: a cache has dropped it.",
    ),
    (
        "bias",
        "Bias of each head",
        "What a few heads, from the first to the last, add to a score at a distance.",
    ),
    (
        "pairs",
        "Attention mask",
        "Which keys each query sees, darker the further it believes them. Orange: past what "
        "training showed; pale: hidden.",
    ),
)
KINDS = {".js": "text/javascript", ".css": "text/css"}


@lru_cache(maxsize=8)
def live(link: str = "") -> str:
    """The page behind the server; `link` is what it starts from where its address says nothing."""
    return _rendered({"link": link, "still": None}, still=False)


def still(answers: dict[str, Any], link: str) -> str:
    """The page with the numbers of one state inside it."""
    return _rendered({"link": link, "still": answers}, still=True)


@cache
def asset(name: str) -> tuple[str, str]:
    """A script or the style by its name, and what kind of file it is."""
    kind = KINDS.get(Path(name).suffix)
    if name == "vega.js":
        return vega(), KINDS[".js"]
    if kind is None or name not in (*SCRIPTS, "page.css"):
        raise UserError(f"there is nothing at {shown(name)}: open / instead.")
    return _file(name), kind


@cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed, out of the installed vl-convert."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("\r\n", "\n")  # as a browser reads it before it takes the hash


def _rendered(start: dict[str, Any], still: bool) -> str:
    scripts = [vega(), *map(_file, SCRIPTS)] if still else []
    data = {**start, "charts": charts(), "themes": themes()}
    return _template().render(
        version=__version__,
        columns=[(n, NAMES[n - 1]) for n in range(1, COLUMNS + 1)],
        figures=FIGURES,
        data=data,
        still=still,
        policy=_hashed(scripts) if still else None,
        scripts=[Markup(s) for s in scripts],
        names=["vega.js", *SCRIPTS],
        style=Markup(_file("page.css")) if still else None,
    )


def _hashed(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    named = " ".join(f"'sha256-{d}'" for d in digests)
    allowed = f"script-src {named}; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _file(name: str) -> str:
    return files("longitude.explorer").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made.from_string(_file("page.html"))
