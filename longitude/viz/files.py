"""Charts and pages as files: the name's ending decides. Pages are self-contained, and follow the
reader's theme.

Jinja2 escapes whatever is put into a page. Its content security policy names our scripts by their
hashes and allows no address at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from subprocess import run
from typing import Any

import vl_convert
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from longitude import __version__
from longitude.core.store import atomic_file
from longitude.core.validate import UserError
from longitude.viz.vega import Spec, themes

KINDS = (".html", ".png", ".svg")
THEMES = themes()


def check_kind(path: Path) -> None:
    """Raise unless the name says which kind of file to write."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"--out {path} names no kind of file: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )


def write_spec(spec: Spec, title: str, path: Path, configs: Mapping[str, Spec] = THEMES) -> None:
    """Write a Vega-Lite document as HTML, PNG or SVG; `configs` are those of light and dark."""
    check_kind(path)
    if path.suffix.lower() == ".html":
        charts = {"figure": {"section": 0, "spec": spec, "actions": {"export": True}}}
        text = page("figure.html", charts, [configs], title=title)
        return replace_file(path, text.encode())
    look = {**configs["light"], "background": "white", "padding": 24}
    drawn = json.dumps({**spec, "config": look})
    if path.suffix.lower() == ".png":
        return replace_file(path, vl_convert.vegalite_to_png(drawn, scale=2))
    return replace_file(path, vl_convert.vegalite_to_svg(drawn).encode())


def page(template: str, charts: Spec, themes: Sequence[Mapping[str, Spec]], **values: Any) -> str:
    """A page of this package with its charts; a chart's section is the index of its theme."""
    values |= {"charts": {"charts": charts, "themes": themes}, "version": __version__}
    css = Markup(asset("longitude.viz", "page.css"))
    return render("longitude.viz", template, ["page.js"], css=css, **values)


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
    loader = FunctionLoader(partial(asset, package))
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made.get_template(name)


@cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed, from the installed vl-convert: in a process of its own, since
    no other thread would run for the seconds that it takes. Ctrl-C does not reach it."""
    make = "import vl_convert as v; print(v.javascript_bundle('window.vegaEmbed = vegaEmbed;'))"
    command = [sys.executable, "-Xutf8", "-c", make]
    bundle = run(command, capture_output=True, check=True, start_new_session=True).stdout
    return bundle.decode().replace("\r\n", "\n")  # as a browser reads it before it takes the hash


def asset(package: str, name: str) -> str:
    """The text of a file beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")
