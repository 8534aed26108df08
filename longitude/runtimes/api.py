"""`longitude.export`, `lint` and `verify`: a scheme written for runtimes, settings checked, and
runtimes run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from longitude.core.scheme import Layers
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown, target_length
from longitude.options import ExportOptions, LintOptions, VerifyOptions
from longitude.parts import Drope, DynamicNtk
from longitude.runtimes import Runtime, checked_version, runtimes, select
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import (
    Export,
    ExportResult,
    PriorRun,
    complete,
    exports,
    is_run,
    read_run,
)
from longitude.runtimes.files import card, located, slug, write_files, write_text
from longitude.runtimes.lint import LintResult, lint_settings, read_settings, saved_scheme
from longitude.runtimes.target import make_target

if TYPE_CHECKING:
    from longitude.runtimes.verify import Verified, VerifyResult


def export(model: str | Path, *, options: ExportOptions | None = None) -> ExportResult:
    """Write a scheme as runtimes' own settings, after checking what they will compute from them.

    Args:
        model: a name on the Hub, a folder, a .gguf file, an adapter, or the folder of an `extend`
            run, whose recommendations are exported.
    """
    model, options = str(model), options or ExportOptions()
    run = read_run(model) if is_run(model) else None
    selected = select(options.runtimes)
    if options.version is not None and len(selected) > 1:
        raise UserError(f"--version is of one runtime, but --for has {len(selected)}: give one.")
    if options.version is not None:
        checked_version(selected[0][0], options.version)
    checkpoint = open_checkpoint(options.source or (run.name if run else model), options.revision)
    scheme = options.scheme or (None if run else checkpoint.saved.get("scheme"))
    if scheme is None and run is None:
        raise UserError(
            f"{model} is no run of `longitude extend` that recommends a scheme, nor was it saved "
            f"with one: add --scheme, as in --scheme "
            f'"rope(frequencies=yarn(4, original=8192))".'
        )
    if options.verify and not any(runtime.runner for runtime, _ in selected):
        able = ", ".join(runtime.name for runtime in runnable())
        raise UserError(f"--verify runs {able}: name one of them in --for.")
    result = _exported(checkpoint, selected, scheme, options, run)
    out = None if options.out is None else Path(options.out)
    folder = any(one.config is not None for one in result.exports)
    if out is None and (folder or len(selected) > 1 or selected[0][0].writes != "command"):
        out = Path(f"{slug(checkpoint.source.name)}-{result.target}")
    if out is not None:
        result = write_files(result, out, options.weights)
    if options.verify:
        placed = result if out is not None else located(result, Path())
        result = replace(result, verified=_verified(placed))
    if out is None or result.written == (out,):
        return result
    readme = write_text(out / "README.md", card(result))
    return replace(result, written=(*result.written, readme))


def _exported(
    checkpoint: Checkpoint,
    selected: Sequence[tuple[Runtime, str | None]],
    scheme: str | None,
    options: ExportOptions,
    run: PriorRun | None,
) -> ExportResult:
    """Settings or a refusal for each runtime, and the length; raises if all are refused."""
    requests, done = [], {}
    for runtime, version in selected:
        version = version or options.version
        try:
            text = scheme or (run.scheme(runtime) if run else "")
            requests.append(Export(runtime, text, version))
        except UserError as error:
            done[runtime.name] = Export(runtime, "", version, refused=str(error))
    target = _length(checkpoint, requests, options.to, run)
    done |= {e.runtime.name: e for e in exports(checkpoint, requests, target)}
    every = [done[runtime.name] for runtime, _ in selected]
    for n, one in enumerate(every):  # what its scheme costs against the best of a run
        if run is None or not one.requested:  # the run advises nothing that this runtime serves
            continue
        cost, settings = run.cost(one.runtime), one.settings
        best = run.scheme(one.runtime) if cost else None
        if cost and settings and best == one.requested:
            notes = (*settings.notes, f"{one.scheme}: {cost}.")
            every[n] = replace(one, settings=replace(settings, notes=notes))
        elif cost and not settings and best != one.requested:
            instead = f"of those measured it can serve {best}, and {cost}"
            every[n] = replace(one, refused=f"{str(one.refused).rstrip('.')}; {instead}.")
    if not any(one.settings for one in every):
        raise UserError(" ".join(dict.fromkeys(str(one.refused) for one in every)))
    return ExportResult(checkpoint, tuple(every), target, run)


def _length(
    checkpoint: Checkpoint, requests: Sequence[Export], to: str | int | None, run: PriorRun | None
) -> int:
    """The length to serve: as given, of the run, saved with the scheme, or by its factor."""
    if to is not None:
        return max(1, target_length(to, checkpoint.trained))
    if run is not None:
        return run.target
    scheme, saved = requests[0].requested, checkpoint.saved
    if scheme == saved.get("scheme") and saved.get("target"):
        return saved["target"]
    resolved = checkpoint.resolve(scheme).scheme
    for part in resolved.layer(0).scale:
        if isinstance(part, Drope) and part.length:
            return part.length
    rope, trained = resolved.layer(0).rotary, checkpoint.trained
    if rope is not None and checkpoint.own and rope == checkpoint.own.rotary and trained:
        return trained
    frequencies = rope.frequencies if rope else None
    factor = getattr(frequencies, "factor", None)
    original = getattr(frequencies, "original", None) or trained
    if not factor or not original or isinstance(frequencies, DynamicNtk):
        raise UserError(
            f"{dump(resolved)} does not imply a length in tokens: add --to, as in --to 32768 or "
            f"--to 4x."
        )
    return round(factor * original)


def _verified(result: ExportResult) -> tuple[Verified, ...]:
    """What runtimes themselves compute from what was written; raises if none can be run."""
    from longitude.runtimes.verify import Reference, Verified, verify

    checkpoint, proofs = result.checkpoint, []
    references: dict[str, Reference] = {}
    for export in result.exports:
        if export.runtime.runner is None:
            continue
        if export.settings is None:
            proofs.append(Verified(export.runtime.title, skipped=str(export.refused)))
            continue
        if export.requested not in references:
            original = export.target.original if export.target else checkpoint.trained or 1
            what = (checkpoint.source.gguf or checkpoint.source.name, export.requested)
            references[export.requested] = Reference(*what, original, result.target)
        reference, settings = references[export.requested], export.settings.entries
        proofs.append(verify(export.runtime, export.path, settings, reference, export.target))
    return _some_ran(proofs)


def _some_ran(proofs: Sequence[Verified]) -> tuple[Verified, ...]:
    if not any(proof.rows or proof.stopped for proof in proofs):
        raise UserError(" ".join(map(str, proofs)))
    return tuple(proofs)


def verify(model: str | Path, *, options: VerifyOptions | None = None) -> VerifyResult:
    """Run a model in runtimes, and compare what they compute with what a scheme is.

    Args:
        model: a name on the Hub, a folder or a .gguf file. With a scheme it is exported into a
            temporary folder first; without, it is run as it is.
    """
    from longitude.runtimes.verify import Reference, Verified, VerifyResult
    from longitude.runtimes.verify import verify as run_in

    model, options = str(model), options or VerifyOptions()
    selected = runnable()
    if options.runtimes.strip() != "all":  # each as the one whose export is run
        chosen = (runtimes()[r.verified_as or r.name] for r, _ in select(options.runtimes))
        selected = list(dict.fromkeys(chosen))
    if unable := [r.name for r in selected if r.runner is None]:
        able = ", ".join(r.name for r in runnable())
        raise UserError(f"{', '.join(unable)} can't be run from Python: use {able}.")
    checkpoint = open_checkpoint(model, options.revision)
    scheme = options.scheme or checkpoint.saved.get("scheme")
    if scheme is None:  # what runtimes compute from its own settings, against what these mean
        source, own, trained = checkpoint.source, checkpoint.own, checkpoint.trained or 1
        target = make_target(own, checkpoint.config, trained) if own else None
        original = target.original if target else trained
        reference = Reference(source.gguf or source.name, None, original, trained)
        settings, gguf = read_settings(model, options.revision), source.gguf is not None
        path, proofs = str(source.gguf or source.folder or source.name), []
        for runtime in selected:
            if gguf == (runtime.reads == "gguf") or (gguf and "gguf" in runtime.lints):
                proofs.append(run_in(runtime, path, settings, reference, target))
            else:
                reads = "a GGUF file" if runtime.reads == "gguf" else "a checkpoint's folder"
                proofs.append(Verified(runtime.title, skipped=f"it reads {reads}."))
        return VerifyResult(None, _some_ran(proofs))
    # a checkpoint without a folder gets one by the export that is a complete checkpoint
    needed = [complete()] if checkpoint.needs_conversion else []
    both = [(r, None) for r in dict.fromkeys([*needed, *selected])]
    exported = _exported(checkpoint, both, scheme, ExportOptions(to=options.to), None)
    with TemporaryDirectory() as folder:
        proofs = _verified(write_files(exported, Path(folder), "link"))
    titles = tuple(runtime.title for runtime in selected)
    return VerifyResult(scheme, tuple(p for p in proofs if p.runtime.startswith(titles)))


def runnable() -> list[Runtime]:
    """The runtimes that can be run from Python."""
    return [runtime for runtime in runtimes().values() if runtime.runner]


def lint(model: str | Path, *, options: LintOptions | None = None) -> LintResult:
    """What each runtime would compute from a model's settings, against what they mean.

    Args:
        model: a config.json, a folder, an adapter's folder, a name on the Hub or a .gguf file.
    """
    model, options = str(model), options or LintOptions()
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
    own, faults = saved_scheme(model, options.revision)
    return lint_settings(settings, selected, scheme or own, faults)
