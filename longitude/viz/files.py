"""Charts and pages as files, in the format that the suffix names. Pages are self-contained and
follow the reader's light or dark theme.

Jinja2 escapes whatever is inserted into a page. Its content security policy allows our scripts, by
their hashes, and no address at all.
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
    """Raise unless the suffix names a kind of file that can be written."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"--out {path} names no kind of file: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )


def write_spec(spec: Spec, title: str, path: Path, configs: Mapping[str, Spec] = THEMES) -> None:
    """Write a Vega-Lite document as HTML, PNG or SVG; `configs` are the light and dark themes."""
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
    """Render a page of this package; a chart's `section` is the index of its theme in `themes`."""
    values |= {"charts": {"charts": charts, "themes": themes}, "version": __version__}
    css = Markup(asset("longitude.viz", "page.css"))
    return render("longitude.viz", template, ["page.js"], css=css, **values)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in full beside its target, then move it into place."""
    with atomic_file(path) as part:
        part.write_bytes(content)


def render(package: str, template: str, scripts: Sequence[str], **values: Any) -> str:
    """Render a package's template, with Vega, our scripts and their security policy inlined."""
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
    """Load a template that escapes what is inserted, and rejects numbers that JSON lacks."""
    loader = FunctionLoader(partial(asset, package))
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    env.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return env.get_template(name)


@cache
def vega() -> str:
    """The bundle of Vega, Vega-Lite and vega-embed from the installed vl-convert. A subprocess that
    Ctrl-C does not reach builds it: here it would block all other threads for seconds."""
    code = "import vl_convert as v; print(v.javascript_bundle('window.vegaEmbed = vegaEmbed;'))"
    command = [sys.executable, "-Xutf8", "-c", code]
    bundle = run(command, capture_output=True, check=True, start_new_session=True).stdout
    return bundle.decode().replace("\r\n", "\n")  # as a browser does before it computes the hash


def asset(package: str, name: str) -> str:
    """The text of a file beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")
