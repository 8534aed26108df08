"""Charts to files: the ending of the name decides how. Pages load nothing from anywhere."""

from __future__ import annotations

import html
import json
from pathlib import Path
from string import Template

import vl_convert

from longitude.fields import Mistake
from longitude.inspect.rows import Page
from longitude.report.figures import page_spec

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
        raise Mistake(
            f"--out {path} names no kind of file: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}."
        )


def write(page: Page, path: Path) -> None:
    """Write the page as HTML, PNG or SVG."""
    check_kind(path)
    spec = json.dumps(page_spec(page))
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix.lower():
        case ".html":
            path.write_text(_html(page.written, spec), encoding="utf-8")
        case ".png":
            path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
        case _:
            path.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")


def _html(title: str, spec: str) -> str:
    inline = spec.replace("</", "<\\/")  # text must not end the script
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return PAGE.substitute(title=html.escape(title), script=script, spec=inline)
