"""The functions behind `longitude inspect`, `check`, `show` and `schemes`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.progress import Event, TextResult
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import as_scheme
from longitude.core.validate import UserError, target_length
from longitude.inspection import catalogue, rows
from longitude.inspection.curves import page
from longitude.inspection.rows import plain
from longitude.options import CheckOptions, InspectOptions, ShowOptions

if TYPE_CHECKING:
    from rich.console import Console

    from longitude.hf.encodings import Encoding, KnownModel
    from longitude.hf.faults import Fault
    from longitude.inspection.rope_limits import RopeLimits
    from longitude.runtimes.lint import LintResult


@dataclass(frozen=True)
class SchemesResult(TextResult):
    """Parts and presets, each with its written form, meaning and paper."""

    parts: tuple[rows.PartRow, ...]
    presets: tuple[rows.PresetRow, ...]

    def show(self, console: Console) -> None:
        from longitude.viz.terminal import catalogue

        catalogue(self.parts, self.presets, console)

    def to_json(self) -> dict[str, Any]:
        return plain(vars(self))


def schemes(site: str | None = None) -> SchemesResult:
    """List every part (of one site) and every preset (without a site)."""
    return SchemesResult(catalogue.parts(site), () if site else catalogue.presets())


@dataclass(frozen=True)
class ShowResult(TextResult):
    """What the parts of a scheme do."""

    page: rows.Page

    def show(self, console: Console) -> None:
        from longitude.viz import terminal

        terminal.show(self.page, console)

    def report(self, path: str | Path) -> Path:
        """Draw into a file: .html, .png or .svg."""
        from longitude.viz import files
        from longitude.viz.scheme_charts import page_spec

        files.write_spec(page_spec(self.page), self.page.written, Path(path))
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        return plain(self.page)


def show(scheme: str | Scheme | Layers, *, options: ShowOptions | None = None) -> ShowResult:
    """Compute what the parts of a scheme do: distances, decay, wavelengths, bias, scale, mask."""
    o = options or ShowOptions()
    return ShowResult(page(as_scheme(scheme), o.length, o.dim, o.heads))


@dataclass(frozen=True)
class CheckResult(TextResult):
    """The properties of one scheme, or of every preset."""

    schemes: tuple[rows.SchemeProperties, ...]
    compared: bool = False  # whether these are all presets

    def show(self, console: Console) -> None:
        from longitude.viz import properties

        if self.compared:
            properties.table(self.schemes, console)
        else:
            properties.show(self.schemes[0], console)

    def markdown(self) -> str:
        from longitude.viz import properties

        return properties.markdown(self.schemes)

    def to_json(self) -> Any:
        """An object for one scheme, a list for all presets."""
        return plain(self.schemes) if self.compared else plain(self.schemes[0])


def check(
    scheme: str | Scheme | Layers | None = None, *, options: CheckOptions | None = None
) -> CheckResult:
    """Measure uniqueness, extrapolation, relativity and decay of a scheme, or of every preset."""
    from longitude.inspection import properties

    o = options or CheckOptions()
    if scheme is not None:
        sizes: Any = {"dim": o.dim, "heads": o.heads, "length": o.length, "trained": o.trained}
        return CheckResult((properties.check(as_scheme(scheme), **sizes),))
    length = properties.LENGTH if o.length is None else o.length
    trained = max(2, length // 4) if o.trained is None else o.trained
    results, total = [], len(properties.PRESETS)
    for row in properties.compare(length=length, trained=trained, dim=o.dim or 64, heads=o.heads):
        results.append(row)
        o.progress(Event(row.name or "", len(results), total, job="presets"))
    return CheckResult(tuple(results), compared=True)


@dataclass(frozen=True)
class InspectResult(TextResult):
    """What a checkpoint's configuration says about positions, and what follows from it."""

    name: str
    encodings: tuple[Encoding, ...]
    faults: tuple[Fault, ...] = ()
    reach: RopeLimits | None = None
    page: rows.Page | None = None
    lint: LintResult | None = None
    lint_refused: str = ""  # why runtimes can't be emulated, if they can't
    weights: rows.ScoreStatistics | None = None

    def show(self, console: Console) -> None:
        from rich.text import Text

        from longitude.hf.encodings import KINDS
        from longitude.viz import checkpoint

        checkpoint.show(self, KINDS, console)
        if self.lint or self.lint_refused:
            console.print()
            console.print(Text("What runtimes compute from it", style="bold"))
            if self.lint:
                checkpoint.show_lint(replace(self.lint, faults=()), console)
            else:
                console.print(Text(f"unknown: {self.lint_refused}"))
        if self.weights:
            console.print()
            checkpoint.show_scores(self.weights, console)

    def to_json(self) -> dict[str, Any]:
        sheets = self.page.sheets if self.page else ()
        data = {
            "model": self.name,
            "encodings": [encoding.plain() for encoding in self.encodings],
            "faults": [vars(fault) for fault in self.faults],
            "reach": vars(self.reach) if self.reach else None,
            "wavelengths": [
                {"scheme": s.written, "layers": list(s.layers), "pairs": plain(s.wavelengths)}
                for s in sheets
                if s.wavelengths
            ],
            "lint": self.lint.to_json() if self.lint else None,
        }
        data |= {"lint_refused": self.lint_refused} if self.lint_refused else {}
        return data | ({"weights": plain(self.weights)} if self.weights else {})


@dataclass(frozen=True)
class KnownModelsResult(TextResult):
    """The encodings of every known model type."""

    models: tuple[KnownModel, ...]

    def show(self, console: Console) -> None:
        from longitude.viz.checkpoint import table

        table(self.models, console)

    def to_json(self) -> list[dict[str, Any]]:
        return [row.plain() for row in self.models]


def known_models() -> KnownModelsResult:
    from longitude.hf import encodings

    return KnownModelsResult(tuple(encodings.known_models()))


def inspect(model: str | Path, *, options: InspectOptions | None = None) -> InspectResult:
    """Read a checkpoint's position encodings from its configuration, and what follows from them."""
    from longitude.inspection.rope_limits import rope_limits
    from longitude.inspection.scores import measure
    from longitude.runtimes.lint import lint_settings, read_settings, saved_scheme

    model, o = str(model), options or InspectOptions()
    if not o.weights and (o.length is not None or o.text):
        raise UserError("length and text are what --weights reads: give --weights too.")
    encodings, faults = _read_encodings(model, o.revision)
    first = encodings[0]
    target = None if o.to is None else target_length(o.to, first.window)
    if target is not None and target < 8:
        raise UserError(f"--to {o.to} is {target} tokens, less than one rotation: give more.")
    lint, refused = None, ""
    if first.kind == "rope" and first.scheme is not None:
        try:
            saved = saved_scheme(model, o.revision)
            lint = lint_settings(read_settings(model, o.revision), (), *saved)
        except UserError as error:
            refused = str(error)
    reach, page = rope_limits(first, target), encoding_page(first)
    sizes: Any = {"length": o.length, "text": o.text, "revision": o.revision}
    scores = measure(model, **sizes) if o.weights else None
    return InspectResult(model, encodings, tuple(faults), reach, page, lint, refused, scores)


def encoding_page(encoding: Encoding) -> rows.Page | None:
    """The rows behind the pictures, at the window; None if they can't be drawn."""
    length = min(encoding.window or 0, catalogue.MAX_LENGTH)
    sizes = (length if length > 1 else None, encoding.head_dim, encoding.heads or 8)
    try:
        return page(as_scheme(encoding.scheme), *sizes) if encoding.scheme else None
    except UserError:  # head sizes that differ by layer
        return None


def _read_encodings(name: str, revision: str | None) -> tuple[tuple[Encoding, ...], list[Fault]]:
    """The encodings of a configuration or of a GGUF header, and the faults of the first."""
    from longitude.hf.device import quiet_transformers
    from longitude.hf.encodings import Encoding, read_encodings
    from longitude.hf.faults import faults
    from longitude.hf.gguf_config import gguf_encodings, has_rotary
    from longitude.hf.gguf_reader import Header
    from longitude.runtimes.checkpoint import gguf_config
    from longitude.runtimes.lint import read_file

    _, raw, _ = read_file(name, revision)
    if isinstance(raw, Header):
        return gguf_encodings(raw, gguf_config(raw) if has_rotary(raw) else None), []
    problems = faults(raw)
    with quiet_transformers(bars=True):
        try:
            return read_encodings(raw), problems
        except UserError as error:
            if not problems:
                raise
            unknown = Encoding("unknown", where="faults of the file", notes=(str(error),))
            return (unknown,), problems
