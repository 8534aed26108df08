"""Charts and pages as files: the name's ending decides. Pages are self-contained, and follow the
reader's theme.

Jinja2 escapes whatever is put into a page. Its content security policy names our scripts by their
hashes and allows no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from longitude.core.atomic_io import atomic_file
from longitude.core.validate import UserError
from longitude.inspection.rows import Page
from longitude.viz.scheme_charts import page_spec
from longitude.viz.theme import config
from longitude.viz.vega import Spec

KINDS = (".html", ".png", ".svg")
BOTH = (config(), config(dark=True))


def check_kind(path: Path) -> None:
    """Raise unless the name says which kind of file to write."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"--out {path} names no kind of file: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )


def write(page: Page, path: Path) -> None:
    """Draw the charts of `longitude show` into a file: .html, .png or .svg."""
    write_spec(page_spec(page), page.written, path)


def write_spec(spec: Spec, title: str, path: Path, configs: Sequence[Spec] = BOTH) -> None:
    """Write a Vega-Lite document as HTML, PNG or SVG; `configs` are those of light and dark."""
    check_kind(path)
    if path.suffix.lower() == ".html":
        light, dark = configs
        data = {
            "charts": {"figure": {"section": 0, "spec": spec, "actions": {"export": True}}},
            "themes": [{"light": light, "dark": dark}],
        }
        text = render("longitude.viz", "figure.html", ["page.js"], title=title, charts=data)
        return replace_file(path, text.encode())
    drawn = json.dumps({**spec, "config": {**configs[0], "background": "white", "padding": 24}})
    if path.suffix.lower() == ".png":
        return replace_file(path, vl_convert.vegalite_to_png(drawn, scale=2))
    return replace_file(path, vl_convert.vegalite_to_svg(drawn).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in full beside its target, then put it in its place."""
    with atomic_file(path) as part:
        part.write_bytes(content)


def render(package: str, template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page from a package's template, with Vega, our scripts and their policy inside it."""
    texts = [vega(), *(asset(package, name) for name in scripts)]
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in texts)
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src {allowed}"
    )
    return load_template(package, template).render(
        scripts=[Markup(s) for s in texts], policy=policy, **values
    )


@cache
def load_template(package: str, name: str) -> Any:
    """A template that escapes what is put into it, and refuses numbers that JSON lacks."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made.from_string(asset(package, name))


@cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed, from the installed vl-convert."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("\r\n", "\n")  # as a browser reads it before it takes the hash


def asset(package: str, name: str) -> str:
    """The text of a file beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")
