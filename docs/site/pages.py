"""Every page of the site: what is on it, and where it stands in the site's own order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import facts
import prose
from commands import Command, commands
from facts import SITES, Method
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markup import Rendered, block, inline, markdown, paragraphs, words
from models import models
from pictures import Gallery
from snippets import on_a_checkpoint, snippet

from longitude import __version__
from longitude.core.scheme import Layers
from longitude.inspection import catalogue
from longitude.training.lab.compare import label

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
GUIDES = (
    *("start", "extend", "tune", "export", "lab", "stream", "inspect", "checkpoints"),
    "new-part",
)
ADDED = ROOT / "CONTRIBUTING.md"  # whose worked example is the guide to a new part, and is tested
BEGIN = "## How to add an encoding, in one file"
FOUND = {"methods": 1500}  # letters of a page that the search box looks through
AT_MOST = 20_000  # on other pages


@dataclass(frozen=True)
class Page:
    """One page: its address, its name, its part of the site, and its HTML."""

    file: str
    title: str
    part: str
    body: str
    lead: str = ""

    def found(self) -> dict[str, str]:
        """What the search box knows of it."""
        text = words(self.body)[: FOUND.get(self.part, AT_MOST)]
        return {"title": self.title, "file": self.file, "part": self.part, "text": text}


@dataclass
class Site:
    """What all pages share: methods, guides, results, and the templates."""

    gallery: Gallery | None = None
    files: list[tuple[Path, str]] = field(default_factory=list)  # copied as they are

    @cached_property
    def results(self) -> dict[str, Path]:
        return {p.stem: p for p in sorted((ROOT / "docs" / "results").glob("*.md"))}

    @cached_property
    def told(self) -> dict[str, Rendered]:
        return {name: self.read(_read(path)) for name, path in self.results.items()}

    @cached_property
    def errata(self) -> tuple[prose.Erratum, ...]:
        return prose.errata([*_names(catalogue.parts()), *_names(catalogue.presets())])

    @cached_property
    def methods(self) -> dict[str, Method]:
        said = prose.methods(_names(catalogue.parts()), _names(catalogue.presets()))
        return facts.every(said, self.errata, self.results)

    @cached_property
    def guides(self) -> dict[str, Rendered]:
        return {name: self.read(_guide(name)) for name in GUIDES}

    @cached_property
    def templates(self) -> Environment:
        made = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        made.globals |= {"block": block, "version": __version__, "sites": SITES}
        return made

    def about(self, code: str, to: Callable[[str], str], bare: bool = True) -> str | None:
        """The page of the method that some code calls; a name alone counts where it is `bare`, and
        a preset's always. What a rope(…) is about stands inside it, so it is left alone."""
        name, call, _ = code.partition("(")
        method = self.methods.get(name.split(" ")[0])
        if method is None or (name == "rope" and code not in ("rope", "rope()")):
            return None
        return to(method.file) if call or bare or method.kind == "presets" else None

    def read(self, text: str) -> Rendered:
        """A Markdown page that stands in a folder of the site."""
        return markdown(text, lambda code: self.about(code, "../{}".format, bare=False))

    def groups(self) -> list[tuple[str, str, list[Method]]]:
        """Methods site by site, presets last."""
        heads = {**{k: v[0] for k, v in SITES.items()}, "presets": "presets"}
        each = groupby(self.methods.values(), lambda m: m.kind)
        return [(kind, heads[kind], list(found)) for kind, found in each]

    def whole(self, page: Page) -> str:
        """A page in its frame, with links that are right from where it stands."""
        return self.render("frame.html", page.file, page=page, site=self)

    def render(self, template: str, file: str, **given: Any) -> str:
        """A template for the page at `file`: `to` leads from there to another page."""
        here = Path(file).parent

        def to(other: str) -> str:
            return os.path.relpath(other, here)

        tools = {
            "to": to,
            "text": lambda said: inline(said, lambda code: self.about(code, to)),
            "texts": paragraphs,
            "formula": inline,
        }
        return self.templates.get_template(template).render(**tools, **given)


def every_page(site: Site) -> list[Page]:
    """All of them, the first page first."""
    return [_home(site), *_guides(site), *_methods(site), *_results(site), *_lists(site)]


def _home(site: Site) -> Page:
    code = re.findall(r"^```python\n(.*?)^```", _read(ROOT / "README.md"), re.M | re.S)[0]
    body = site.render("home.html", "index.html", site=site, code=code)
    return Page("index.html", "Longitude", "", body)


def _guides(site: Site) -> Iterator[Page]:
    for name, guide in site.guides.items():
        file = f"guides/{name}.html"
        body = site.render("text.html", file, text_page=guide, more="")
        yield Page(file, guide.title, "guides", body, guide.lead)


def _methods(site: Site) -> Iterator[Page]:
    body = site.render("methods.html", "methods/index.html", groups=site.groups())
    yield Page("methods/index.html", "Methods", "methods", body)
    users: dict[str, list[Method]] = {}
    for method in site.methods.values():
        for name in method.parts:
            users.setdefault(name, []).append(method)
    for method in site.methods.values():
        yield _method(site, method, users.get(method.name, []))


def _method(site: Site, method: Method, users: Sequence[Method]) -> Page:
    drawn, rows = [], None
    if site.gallery:
        drawn, rows = site.gallery.draw(method.scheme, whole=method.kind == "mask")
    body = site.render(
        "method.html",
        method.file,
        method=method,
        site=site,
        drawn=drawn,
        rows=rows,
        users=users,
        snippet=snippet(method.text, method.scheme),
        patched=on_a_checkpoint(method.text, method.name, method.kind),
        wide=not isinstance(method.scheme, Layers) and method.scheme.embed is not None,
        written=label(str(method.scheme)) if len(method.scheme) > 1 else str(method.scheme),
    )
    return Page(method.file, method.title, "methods", body, words(inline(method.meaning)))


def _results(site: Site) -> Iterator[Page]:
    body = site.render("results.html", "results/index.html", results=site.told)
    yield Page("results/index.html", "Results", "results", body)
    for name, result in site.told.items():
        file = f"results/{name}.html"
        body = site.render("text.html", file, text_page=result, more="")
        yield Page(file, result.title, "results", body, result.lead)
    log = site.read(_read(ROOT / "LOG.md"))
    body = site.render("text.html", "results/log.html", text_page=log, more="")
    yield Page("results/log.html", log.title, "results", body, log.lead)
    results = ROOT / "docs" / "results"
    for path in results.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            site.files.append((path, f"results/{path.relative_to(results).as_posix()}"))


def _lists(site: Site) -> Iterator[Page]:
    told: list[Command] = commands()
    body = site.render("commands.html", "commands.html", commands=told)
    yield Page("commands.html", "Commands", "commands", body)
    if site.gallery:
        found = models(lambda kind: site.about(kind, str))
        body = site.render("models.html", "models.html", **found)
        yield Page("models.html", "Models", "models", body)
    topics = [(topic, list(each)) for topic, each in groupby(site.errata, lambda e: e.topic)]
    body = site.render("errata.html", "errata.html", topics=topics, site=site)
    yield Page("errata.html", "Often written wrong", "errata", body)


def _guide(name: str) -> str:
    """A guide's Markdown; that of a new part is the tested example of CONTRIBUTING.md."""
    text = _read(HERE / "guides" / f"{name}.md")
    if name != "new-part":
        return text
    example = _read(ADDED).partition(BEGIN)[2].partition("\n## ")[0]
    return text.replace("{{ example }}", example.strip())


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _names(rows: Sequence[Any]) -> list[str]:
    return [row.name for row in rows]
