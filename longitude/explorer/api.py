"""`longitude.explore`: schemes side by side on an interactive or static page, or as data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from longitude import __version__
from longitude.core.validate import UserError, shown
from longitude.explorer.data import draw
from longitude.explorer.methods import snippets
from longitude.explorer.state import MAX_COLUMNS, PageState, make_state
from longitude.options import ExploreOptions
from longitude.viz import files
from longitude.viz.scheme_charts import NAMES, explorer_specs
from longitude.viz.vega import themes

PACKAGE = __package__ or "longitude.explorer"
SCRIPTS = ("charts.js", "page.js")


@dataclass(frozen=True)
class ExploreResult:
    state: PageState

    def to_json(self) -> dict[str, Any]:
        """The numbers of every chart: what `--json` prints."""
        return json.loads(draw(self.state))

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """Each scheme, how far training covers it, and what a cache keeps."""
        from longitude.viz.terminal import facts, render

        rows = []
        for column in self.to_json()["columns"]:
            if "mistake" in column:
                rows.append((column["method"], column["mistake"], ""))
                continue
            reach = "everywhere" if column["reach"] is None else f"up to {column['reach']:,}"
            cached = f"{column['kept']:,} of {column['length']:,} tokens cached"
            rows.append((column["label"], column["scheme"], f"known {reach}; {cached}"))
        return render(lambda console: console.print(facts(rows)), color=color, width=width)

    def report(self, path: str | Path) -> Path:
        """Write a static page with everything about this state inside it."""
        state, target = self.state, Path(path)
        check_name(target)

        def snippets_of(column: int) -> dict[str, Any]:  # an error concerns its column only
            try:
                return snippets(state, column)
            except UserError as error:
                return {"mistake": str(error)}

        answers = {
            "draw": json.loads(draw(state)),
            "snippets": [snippets_of(n) for n in range(len(state.columns))],
        }
        values = _values(state.link, answers) | {"style": files.asset(PACKAGE, "page.css")}
        page = files.render(PACKAGE, "page.html", SCRIPTS, **values)
        files.replace_file(target, page.encode())
        return target

    def serve(self, port: int = 8470, browser: bool = True) -> None:
        """Serve the interactive page on 127.0.0.1 until Ctrl-C."""
        try:
            from longitude.explorer.server import serve
        except ImportError:
            raise UserError(
                "the page needs starlette and uvicorn: pip install 'longitude[explore]', or write "
                "a static one with --export page.html."
            ) from None
        serve(self.state, port, browser)


def explore(
    model: str | Path | None = None,
    *,
    options: ExploreOptions = ExploreOptions(),  # noqa: B008 (frozen)
) -> ExploreResult:
    """Compare schemes on a model: the baseline and two methods, or those of the options."""
    return ExploreResult(make_state(model and str(model), options.schemes, options.length))


def check_name(path: Path) -> None:
    """Raise unless the suffix is that of a page."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--export writes a page, but got {shown(str(path))}: end it in .html.")


@lru_cache(maxsize=8)
def live_page(link: str) -> str:
    """The page that the server sends; `link` is the state that it starts from."""
    values = _values(link, None) | {"style": "", "scripts": [], "policy": ""}
    return files.load_template(PACKAGE, "page.html").render(**values)


def _values(link: str, answers: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "version": __version__,
        "columns": [(n, NAMES[n - 1]) for n in range(1, MAX_COLUMNS + 1)],
        "data": {"link": link, "still": answers, "charts": explorer_specs(), "themes": themes()},
        "still": answers is not None,
        "names": ["vega.js", *SCRIPTS],
    }
