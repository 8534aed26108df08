"""Charts to files: the ending of the name decides how. Pages load nothing from anywhere."""

from __future__ import annotations

import html
import json
from pathlib import Path
from string import Template
from typing import Any

import vl_convert

from longitude.core.atomic_io import atomic_file
from longitude.core.validate import UserError
from longitude.inspection.rows import Page
from longitude.viz.figures import page_spec

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>body { margin: 0; background: white } #page { overflow-x: auto }</style>
<script>$script</script>
</head>
<body>
<main id="page"></main>
<script>
vegaEmbed("#page", $spec, {mode: "vega-lite", renderer: "svg",
  actions: {export: true, source: false, compiled: false, editor: false}});
</script>
</body>
</html>
""")
KINDS = (".html", ".png", ".svg")


def check_kind(path: Path) -> None:
    """Raise unless the name says which kind of file to write."""
    if path.suffix.lower() not in KINDS:
        raise UserError(
            f"--out {path} names no kind of file: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )


def write(page: Page, path: Path) -> None:
    """Write a scheme's page as HTML, PNG or SVG."""
    check_kind(path)
    write_spec(page_spec(page), page.written, path)


def write_spec(spec: dict[str, Any], title: str, path: Path) -> None:
    """Write a Vega-Lite document as HTML, PNG or SVG: the whole file, or the old one stays."""
    check_kind(path)
    replace_file(path, _drawn(json.dumps(spec), title, path.suffix.lower()))


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file beside the target and put it in its place."""
    with atomic_file(path) as part:
        part.write_bytes(content)


def _drawn(spec: str, title: str, kind: str) -> bytes:
    if kind == ".png":
        return vl_convert.vegalite_to_png(spec, scale=2)
    text = _html(title, spec) if kind == ".html" else vl_convert.vegalite_to_svg(spec)
    return text.encode()


def _html(title: str, spec: str) -> str:
    inline = spec.replace("<", "\\u003c")  # text must not end the script, nor open a comment in it
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return PAGE.substitute(title=html.escape(title), script=script, spec=inline)
