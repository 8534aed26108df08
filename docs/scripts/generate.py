"""Generate pages of the documentation, as Markdown beside the hand-written ones.

python docs/scripts/generate.py [--no-charts]    then: zensical build --strict

Writes docs/methods and docs/presets (a page per part and preset, from the code, its docstring and
docs/scripts/prose), commands.md (each command's own help), models.md (the grid of tests/hf and
`longitude inspect --all`), errata.md, and charts. Prose about a name that no longer exists, or a
part without prose, fails.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from longitude.core.part import PARTS, Dims, HasWeights
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.inspection import catalogue
from longitude.parts import Sequential

SCRIPTS = Path(__file__).parent
DOCS = SCRIPTS.parent
TESTS = DOCS.parent / "tests"
SITES = {
    "positions": ("① positions", "A number for each token."),
    "embed": ("② embed", "Vectors added to, or multiplied into, the embeddings."),
    "rotary": ("③ rotary", "Queries and keys rotated by their positions."),
    "frequencies": ("③ frequencies", "How fast each pair rotates: inside `rope(frequencies=…)`."),
    "remap": ("③ remap", "Which relative position the rotation sees: inside `rope(remap=…)`."),
    "decay": ("③ decay", "Rotary pairs that fade with distance: inside `rope(decay=…)`."),
    "axes": ("③ axes", "Several positions per token, for images: inside `rope(axes=…)`."),
    "scale": ("④ scale", "A factor for each query."),
    "bias": ("⑤ bias", "A term added to each score."),
    "mask": ("⑥ mask", "Which keys a query may see, and so what a cache keeps."),
}
LINKS = {
    r"arXiv:(\d{4}\.\d{5})": r"[arXiv:\1](https://arxiv.org/abs/\1)",
    r"kexue\.fm/archives/(\d+)": r"[kexue.fm \1](https://kexue.fm/archives/\1)",
    r"(?<!\.)github\.com/(\S+)": r"[\1](https://github.com/\1)",
}
DIMS = Dims(dim=512, heads=8, head_dim=64)
IN_EVERY_SCHEME = {"unscaled", "sequential", "causal"}
# training-free parts besides frequencies and remaps, which are training-free unless in TRAINED
TRAINING_FREE = {"hierarchical", "learned_tiled", "learned_interpolated", "alibi_interpolated"}
TRAINING_FREE |= {"ntk_alibi"}
TRAINED = {"unscaled", "proportional", "inverse_leaky"}
TRAINED |= {"power_basis", "truncated_basis", "floor_to_zero"}


@dataclass(frozen=True)
class Prose:
    """What is written by hand about one method; `example` is the scheme that its page draws."""

    when: str = ""
    costs: str = ""
    cannot: str = ""
    example: str = ""
    numbers: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


@dataclass(frozen=True)
class Erratum:
    """A common mistake, its correction, the methods it concerns, and the test that asserts it."""

    topic: str
    often: str
    instead: str
    methods: tuple[str, ...]
    test: str = ""


@dataclass(frozen=True)
class Method:
    """A part or a preset, and everything its page needs."""

    name: str
    kind: str  # a site, or "presets"
    written: str
    meaning: str
    paper: str
    details: str
    prose: Prose
    scheme: Scheme | Layers
    text: str  # the text form of the scheme that is drawn

    @property
    def folder(self) -> str:
        return "presets" if self.kind == "presets" else "methods"

    @property
    def title(self) -> str:
        """The name at the start of the first sentence; for a preset, its function's name."""
        head, colon, _ = self.meaning.partition(":")
        if not colon or self.kind == "presets":
            return self.name
        return head if len(head) <= 45 else head.partition(",")[0]

    @property
    def sentence(self) -> str:
        return self.meaning.removeprefix(f"{self.title}:").strip()

    @property
    def parts(self) -> list[str]:
        """The names of the parts that a preset consists of."""
        schemes = self.scheme.schemes if isinstance(self.scheme, Layers) else (self.scheme,)
        names = dict.fromkeys(p.name for s in schemes for p in catalogue.all_parts(s))
        return [n for n in names if n not in IN_EVERY_SCHEME] or ["causal"]

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """What can be computed: learned parameters, native runtimes, dependence on the length."""
        part = _example_part(self)
        if isinstance(part, HasWeights) and self.kind != "presets":
            count = sum(w.numel() for w in part.init(DIMS, None).values())
            owner = "model" if self.kind == "embed" else "layer"
            yield (
                "Learned parameters",
                f"{count:,} per {owner} with 8 heads of 64" if count else "none",
            )
        if part is not None and (runtimes := _served_by(part, self.scheme)) is not None:
            yield "Served by", ", ".join(runtimes) or "Longitude alone"
        if getattr(part, "by_length", False):
            yield "Depends on", "the length of the call, which is an input"

    @property
    def usage(self) -> str:
        """Python code that uses the method; a test runs the code of every method."""
        if isinstance(self.scheme, Layers):
            return (
                "from longitude import Dims\nfrom longitude.nn import PositionAttention\n\n"
                "dims = Dims(dim=512, heads=8, head_dim=64)\n"
                f'layers = [PositionAttention("{self.text}", dims, layer=i) for i in range('
                f"{len(self.scheme)})]\nout = layers[0](q, k, v, q_pos=range(n))"
            )
        if self.scheme.embed:
            return (
                "from longitude.nn import PositionEmbedding\n\n"
                f'embedding = PositionEmbedding("{self.text}", dim=512)\n'
                "x = embedding(x, pos=range(n))  # batch, tokens, width"
            )
        head = f'from longitude import attention, parse\n\nscheme = parse("{self.text}")\n'
        if self.scheme.positions != Sequential():
            return (
                f"import torch\n{head}"
                "pos = scheme.positions.ids(n, rng=torch.Generator())  # in training\n"
                "out = attention(scheme, q, k, v, q_pos=pos, k_pos=pos)"
            )
        if self.scheme.init(Dims(dim=64, heads=1, head_dim=64)):
            return (
                "from longitude import Dims\nfrom longitude.nn import PositionAttention\n\n"
                f'attend = PositionAttention("{self.text}", Dims(dim=512, heads=8, head_dim=64))\n'
                + (
                    "out = attend(q, k, v, q_pos=range(n), x=x)  # x: the layer's input"
                    if self.scheme.gated
                    else "out = attend(q, k, v, q_pos=range(n))"
                )
            )
        return f"{head}out = attention(scheme, q, k, v, q_pos=range(n), k_pos=range(n))"

    @property
    def training_free(self) -> bool:
        """Whether the method can be applied to a checkpoint without training."""
        extends = self.kind in ("frequencies", "remap") and self.name not in TRAINED
        return extends or self.name in TRAINING_FREE


def _example_part(method: Method) -> Any:
    schemes = method.scheme.schemes if isinstance(method.scheme, Layers) else (method.scheme,)
    parts = [
        p for s in schemes for p in [*catalogue.all_parts(s), *s.mask] if p.name == method.name
    ]
    return next(iter(parts), None)


def _served_by(part: Any, scheme: Scheme | Layers) -> list[str] | None:
    """Return the runtimes that serve a part on an otherwise plain model; None if not applicable."""
    from longitude.parts import Alibi, Rope
    from longitude.parts import Learned as Table
    from longitude.runtimes.target import supporting

    if not isinstance(scheme, Scheme):
        return None
    if part.site in ("frequencies", "remap") and scheme.rotary:
        bare = Rope(scheme.rotary.base, scheme.rotary.fraction, scheme.rotary.pairs)
        return list(supporting(Scheme.of(scheme.rotary), Scheme.of(bare)))
    if part.name in ("hierarchical", "learned_tiled", "learned_interpolated"):
        return list(supporting(Scheme.of(part), Scheme.of(Table(part.length, part.offset))))
    if part.name in ("alibi_interpolated", "ntk_alibi"):
        return list(supporting(Scheme.of(part), Scheme.of(Alibi())))
    return None


def load_prose(known: Collection[str], folder: Path = SCRIPTS / "prose") -> dict[str, Prose]:
    """Load the hand-written prose by method; an unknown method or field is an error."""
    prose: dict[str, Prose] = {}
    for file in sorted(folder.glob("*.toml")):
        for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
            where = f"{file.name}: {name}"
            _check_names([name, *entry.get("see", ())], known, where)
            prose[name] = _build(Prose, entry, where)
    return prose


def load_errata(
    known: Collection[str], file: Path = SCRIPTS / "errata.toml"
) -> tuple[Erratum, ...]:
    """Load the errata in the file's order; methods and tests that don't exist are an error."""
    source = "".join(p.read_text(encoding="utf-8") for p in TESTS.rglob("test_errata.py"))
    tests = set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    errata = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["entry"]:
        where = f"{file.name}: {entry.get('often')}"
        errata.append(_build(Erratum, entry, where))
        _check_names(entry.get("methods", ()), known, where)
        _check_names([entry["test"]] if entry.get("test") else [], tests, where)
    return tuple(errata)


def _build(kind: type[Any], entry: dict[str, Any], where: str) -> Any:
    _check_names(entry, {f.name for f in fields(kind)}, where)
    try:
        return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()})
    except TypeError as e:
        raise UserError(f"{where}: {e}: complete the entry.") from e


def _check_names(names: Collection[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where} names {name}, which does not exist: correct the name.")


def methods() -> dict[str, Method]:
    """Return every part, then every preset, by name."""
    parts, presets = catalogue.parts(), catalogue.presets()
    prose = load_prose({row.name for row in (*parts, *presets)})
    by_name = {}
    for row in parts:
        missing = [
            f
            for f in ("when", "costs", "cannot", "example")
            if not getattr(prose.get(row.name), f, "")
        ]
        if missing:
            raise UserError(
                f"{row.name} has no {', '.join(missing)}: write it in docs/scripts/prose."
            )
        text, details = prose[row.name].example, _details(PARTS[row.name])
        by_name[row.name] = Method(
            row.name, row.site, row.written, row.meaning, row.paper, details, prose[row.name],
            parse(text), text,
        )  # fmt: skip
    for row in presets:
        entry = prose.get(row.name, Prose())
        text = entry.example or f"{row.name}()"
        by_name[row.name] = Method(
            row.name, "presets", row.call, row.meaning, row.paper, "", entry, parse(text), text
        )
    return by_name


def _details(part: type) -> str:
    """Return the docstring after its first paragraph: the class's, or else its module's."""
    doc = part.__doc__ or ""
    if doc.startswith(f"{part.__name__}("):  # generated by dataclass
        doc = sys.modules[part.__module__].__doc__ or ""
    return "\n".join(line.strip() for line in doc.partition("\n\n")[2].splitlines())


def linked(text: str, known: dict[str, Method], up: str = "../") -> str:
    """Return prose as Markdown: code that names a method links to its page, papers to theirs."""

    def link(match: re.Match[str]) -> str:
        name = re.split(r"[ (]", match[1])[0]
        if name not in known or (name == "rope" and match[1] not in ("rope", "rope()")):
            return match[0]
        return f"[`{match[1]}`]({up}{known[name].folder}/{name}.md)"

    text = re.sub(r"`([^`]+)`", link, text.replace("<", "&lt;"))
    for pattern, target in LINKS.items():
        text = re.sub(pattern, target, text)
    return text


def formula(text: str) -> str:
    """Return a sentence with formulas: all Markdown in it is escaped, except links to papers."""
    text = re.sub(r"[|*_]", r"\\\g<0>", text.replace("<", "&lt;"))
    for pattern, target in LINKS.items():
        text = re.sub(pattern, target, text)
    return text


def draw(method: Method) -> str:
    """Draw the charts of `longitude show` into one SVG file and return its name."""
    import longitude

    path = DOCS / "charts" / f"{method.folder}-{method.name}.svg"
    path.parent.mkdir(exist_ok=True)
    longitude.show(method.scheme).report(path)
    return path.name


def commands() -> list[tuple[str, str]]:
    """Return each command's name and its help as the command line prints it."""
    from typer.testing import CliRunner

    from longitude.cli.main import app

    pages = []
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "86", "NO_COLOR": "1"})
        if result.exit_code:
            raise RuntimeError(f"longitude {name} --help: {result.output}")
        pages.append((name, result.output.strip()))
    return pages


def models() -> list[Any]:
    """Return the rows of `longitude inspect --all`."""
    from longitude.hf.encodings import known_models

    return list(known_models())


def supported() -> dict[str, Any]:
    """Return the architectures that tests/hf patches, and those that it expects to be refused."""
    from longitude.hf.device import quiet_transformers

    sys.path.append(str(TESTS.parent))
    from tests.hf import support

    with quiet_transformers(bars=True):
        names = {"refused": support.refused(), "multimodal": support.multimodal()}
        return {"supported": support.rows(), **names}


def main(arguments: list[str]) -> None:
    """Write every generated page."""
    charts = "--no-charts" not in arguments
    for folder in ("methods", "presets", "charts"):
        shutil.rmtree(DOCS / folder, ignore_errors=True)
    known = methods()
    errata = load_errata(known)
    results = {
        p.stem: p.read_text(encoding="utf-8") for p in sorted((DOCS / "results").glob("*.md"))
    }
    templates = Environment(
        loader=FileSystemLoader(SCRIPTS / "templates"), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    templates.globals |= {"sites": SITES, "methods": known, "formula": formula}
    templates.filters["linked"] = lambda text, up="../": linked(text, known, up)

    def write(file: str, template: str, **values: Any) -> None:
        path = DOCS / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(templates.get_template(template).render(**values) + "\n", encoding="utf-8")

    for method in known.values():
        write(
            f"{method.folder}/{method.name}.md",
            "method.md",
            method=method,
            chart=draw(method) if charts else None,
            errata=[e for e in errata if method.name in e.methods],
            users=[m for m in known.values() if m.kind == "presets" and method.name in m.parts],
            results=[
                (name, text.partition("\n")[0].lstrip("# "))
                for name, text in results.items()
                if re.search(rf"\b{method.name}\(", text)
            ],
        )
    groups = [(kind, list(g)) for kind, g in groupby(known.values(), key=lambda m: m.kind)]
    write("methods/index.md", "methods.md", groups=groups)
    topics = [(topic, list(g)) for topic, g in groupby(errata, key=lambda e: e.topic)]
    write("errata.md", "errata.md", topics=topics)
    write("commands.md", "commands.md", commands=commands())
    write("models.md", "models.md", models=models() if charts else [], **supported())
    print(f"{len(known) + 4} pages in docs/: run zensical build --strict")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as e:
        sys.exit(f"docs: {e}")
