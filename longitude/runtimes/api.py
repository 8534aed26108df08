"""`longitude.export` and `longitude.lint`: a scheme written for runtimes, and settings checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.progress import Progress, silent
from longitude.core.scheme import Layers
from longitude.core.text import parse
from longitude.core.validate import UserError, shown, target_length
from longitude.runtimes import Runtime, select
from longitude.runtimes.card import card
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import (
    Export,
    ExportRequest,
    PriorRun,
    exports,
    is_run,
    read_run,
    scheme_length,
)
from longitude.runtimes.files import Files, slug
from longitude.runtimes.lint import LintResult, adapter_scheme, lint_settings, read_settings

if TYPE_CHECKING:
    from longitude.runtimes.verify import Verified


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and where."""

    runtimes: str = "transformers"  # "vllm,transformers==4.51.3", or "all"
    scheme: str | None = None  # that of the run, or what the model was saved with
    version: str | None = None  # of the one runtime
    to: str | int | None = None  # tokens: 32768, 32k, 4x; by default the scheme's factor decides
    out: Path | None = None  # folder; by default NAME-TARGET, none for a single command
    weights: str = "link"  # in folders: link, copy or none
    verify: bool = False  # run the new GGUF file in llama.cpp
    source: str | None = None  # where the model of a run is, if it was moved
    revision: str | None = None
    progress: Progress = silent


@dataclass(frozen=True)
class ExportResult:
    """What was written for each runtime."""

    checkpoint: Checkpoint
    exports: tuple[Export, ...]
    target: int
    written: tuple[Path, ...] = ()
    verified: tuple[Verified, ...] = ()
    run: PriorRun | None = None

    @property
    def holds(self) -> bool:
        """Whether every verification succeeded."""
        return all(proof.holds for proof in self.verified)

    @property
    def notes(self) -> list[str]:
        """What to know besides: refusals, notes, written paths, verifications."""
        refused = [f"{e.runtime.title}: {e.refused}" for e in self.exports if not e.settings]
        notes = dict.fromkeys(n for e in self.exports if e.settings for n in e.settings.notes)
        wrote = [f"wrote {path}" for path in self.written]
        return [*refused, *notes, *wrote, *map(str, self.verified)]

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """The commands, or the contents of the files, of each runtime."""
        done = [e for e in self.exports if e.settings]
        if len(self.exports) == 1:
            return "".join(str(e.text) for e in done).removesuffix("\n")
        return "\n".join(f"# {e.runtime.called(e.version)}\n{e.text}" for e in done)

    def report(self, path: str | Path) -> Path:
        """Write the model card, in Markdown."""
        proofs = [str(proof) for proof in self.verified]
        text = card(self.checkpoint, self.exports, self.target, self.run, proofs)
        Path(path).write_text(text, encoding="utf-8")
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        """Settings by runtime, and what was written."""
        return {
            "target": self.target,
            "exports": [
                {
                    "runtime": e.runtime.name,
                    "version": e.version if e.settings else e.request.version,
                    "scheme": e.scheme,
                    "text": e.text,
                    "notes": list(e.settings.notes) if e.settings else [],
                    "refused": e.refused,
                }
                for e in self.exports
            ],
            "wrote": [str(path) for path in self.written],
            "verified": [str(proof) for proof in self.verified],
        }


def export(model: str, *, options: ExportOptions | None = None) -> ExportResult:
    """Write a scheme as runtimes' own settings, after checking what they will compute from them.

    Args:
        model: a name on the Hub, a folder, a .gguf file, an adapter, or the folder of an `extend`
            run, whose recommendations are exported.
    """
    options = options or ExportOptions()
    run = read_run(model) if is_run(model) else None
    selected = select(options.runtimes)
    if options.version is not None and len(selected) > 1:
        raise UserError(f"--version is of one runtime, but --for has {len(selected)}: give one.")
    checkpoint = open_checkpoint(options.source or (run.name if run else model), options.revision)
    scheme = options.scheme or (None if run else checkpoint.saved.get("scheme"))
    if scheme is None and run is None:
        raise UserError(
            f"{model} is no run of `longitude extend` that recommends a scheme, nor was it saved "
            f"with one: add --scheme, as in --scheme "
            f'"rope(frequencies=yarn(4, original=8192))".'
        )
    writers = [runtime for runtime, _ in selected if runtime.writes == "gguf"]
    if options.verify and (checkpoint.source.gguf is None or not writers):
        raise UserError("--verify runs a new GGUF file in llama.cpp: give a .gguf and --for gguf.")
    done, target = _exports(checkpoint, selected, scheme, options, run)
    alone = len(selected) == 1 and selected[0][0].writes == "command"
    out = options.out
    if out is None and not alone:
        out = Path(f"{slug(checkpoint.source.name)}-{target}")
    if out is None:
        return ExportResult(checkpoint, tuple(done), target, run=run)
    files = Files(checkpoint, done, out, target, options.weights, run).located()
    written = files.write()
    proofs = _verify(checkpoint, files.exports, written) if options.verify else ()
    if written != [out]:
        written.append(files.write_card([*map(str, proofs)]))
    return ExportResult(checkpoint, tuple(files.exports), target, tuple(written), proofs, run)


def _exports(
    checkpoint: Checkpoint,
    selected: Sequence[tuple[Runtime, str | None]],
    scheme: str | None,
    options: ExportOptions,
    run: PriorRun | None,
) -> tuple[list[Export], int]:
    """Settings or a refusal for each runtime, and the length; raises if all are refused."""
    requests, refused = [], {}
    for runtime, version in selected:
        request = ExportRequest(runtime, scheme or "", version or options.version)
        try:
            if run and not scheme:
                request = replace(request, scheme=run.scheme(runtime))
            requests.append(request)
        except UserError as error:
            refused[runtime.name] = Export(request, "", refused=str(error))
    target = _length(checkpoint, requests, options.to, run)
    made = {e.runtime.name: e for e in exports(checkpoint, requests, target)}
    done = [(refused | made)[runtime.name] for runtime, _ in selected]
    if run is not None:
        done = [_with_cost(one, run) for one in done]
    if not any(one.settings for one in done):
        raise UserError(" ".join(dict.fromkeys(str(one.refused) for one in done)))
    return done, target


def _length(
    checkpoint: Checkpoint,
    requests: Sequence[ExportRequest],
    to: str | int | None,
    run: PriorRun | None,
) -> int:
    if to is not None:
        to, trained = str(to), checkpoint.trained
        if trained is None and to.strip().lower().endswith("x"):
            raise UserError(
                f"{checkpoint.source.name} does not state its longest input, so that --to {to} has "
                f"no meaning: give a number of tokens."
            )
        return max(1, target_length(to, trained or 1))
    if run is not None:
        return run.target
    scheme, saved = requests[0].scheme, checkpoint.saved
    if scheme == saved.get("scheme") and saved.get("target"):
        return saved["target"]
    return scheme_length(checkpoint, checkpoint.resolve(scheme).scheme)


def _with_cost(one: Export, run: PriorRun) -> Export:
    """What a runtime's scheme costs against the best of all, among its notes."""
    cost = run.cost(one.runtime)
    if cost is None:
        return one
    best = run.scheme(one.runtime)
    if one.settings is None and best != one.request.scheme:
        instead = f"of those measured it can serve {best}, and {cost}"
        return replace(one, refused=f"{str(one.refused).rstrip('.')}; {instead}.")
    if one.settings is None or best != one.request.scheme:
        return one
    notes = (*one.settings.notes, f"{one.scheme}: {cost}.")
    return replace(one, settings=replace(one.settings, notes=notes))


def _verify(
    checkpoint: Checkpoint, done: Sequence[Export], written: Sequence[Path]
) -> tuple[Verified, ...]:
    """What llama.cpp itself computes from the new file; nothing if it was refused."""
    from longitude.runtimes.verify import verify

    source, files = checkpoint.source.gguf, [path for path in written if path.suffix == ".gguf"]
    one = next((e for e in done if e.runtime.writes == "gguf" and e.target), None)
    if source is None or one is None or one.target is None:
        return ()
    return tuple(verify(source, file, one.request.scheme, one.target) for file in files)


@dataclass(frozen=True)
class LintOptions:
    """Which runtimes to ask, and what is given to them besides the model."""

    runtimes: str = "all"  # "vllm,transformers==4.51.3"
    scheme: str | None = None  # what is meant, if not what the settings mean
    settings: str | Mapping[str, Any] = field(default_factory=dict)  # at the start; JSON if text
    revision: str | None = None
    progress: Progress = silent


def lint(model: str, *, options: LintOptions | None = None) -> LintResult:
    """What each runtime would compute from a model's settings, against what they mean.

    Args:
        model: a config.json, a folder, an adapter's folder, a name on the Hub or a .gguf file.
    """
    options = options or LintOptions()
    scheme = parse(options.scheme) if options.scheme else None
    if isinstance(scheme, Layers):
        raise UserError("--scheme of lint is one for all layers: leave layers(…) out.")
    selected = [] if options.runtimes.strip() == "all" else select(options.runtimes)
    given: Any = options.settings
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, Mapping):
        wrong = shown(options.settings)
        raise UserError(f"--with takes a JSON object, but got {wrong}: write one in braces.")
    settings = {**read_settings(model, options.revision), **given}
    own, faults = (None, ()) if model.endswith(".json") else adapter_scheme(model, options.revision)
    return lint_settings(settings, selected, scheme or own, faults)
