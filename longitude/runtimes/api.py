"""`longitude.export`, `lint`, `verify`: write and check settings of runtimes, and run runtimes."""

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
    """Write a scheme as runtimes' own settings, after checking what each computes from them.

    Args:
        model: a name on the Hub, a folder, a .gguf file, an adapter, or the folder of an `extend`
            run, whose recommendations are exported.
    """
    model, options = str(model), options or ExportOptions()
    run = read_run(model) if is_run(model) else None
    selected = select(options.runtimes)
    if options.version is not None and len(selected) > 1:
        raise UserError(f"--version applies to one runtime, but --for has {len(selected)}: give 1.")
    if options.version is not None:
        checked_version(selected[0][0], options.version)
    checkpoint = open_checkpoint(options.source or (run.name if run else model), options.revision)
    scheme = options.scheme or (None if run else checkpoint.saved.get("scheme"))
    if scheme is None and run is None:
        raise UserError(
            f"{model} is neither an `extend` run with a recommended scheme nor a model saved with "
            f"a scheme: add --scheme, as in --scheme "
            f'"rope(frequencies=yarn(4, original=8192))".'
        )
    if options.verify and not any(runtime.runner for runtime, _ in selected):
        supported = ", ".join(runtime.name for runtime in runnable())
        raise UserError(f"--verify runs {supported}: name one of them in --for.")
    result = _exported(checkpoint, selected, scheme, options, run)
    out = None if options.out is None else Path(options.out)
    needs_folder = any(e.config is not None for e in result.exports)
    if out is None and (needs_folder or len(selected) > 1 or selected[0][0].writes != "command"):
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
    """Find settings or a refusal for each runtime, and the length; raises if all refuse."""
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
    results = [done[runtime.name] for runtime, _ in selected]
    for n, result in enumerate(results):  # add what its scheme costs compared with the run's best
        if run is None or not result.requested:  # the run advises nothing that this runtime serves
            continue
        cost, settings = run.cost(result.runtime), result.settings
        best = run.scheme(result.runtime) if cost else None
        if cost and settings and best == result.requested:
            notes = (*settings.notes, f"{result.scheme}: {cost}.")
            results[n] = replace(result, settings=replace(settings, notes=notes))
        elif cost and not settings and best != result.requested:
            instead = f"of those measured it can serve {best}, and {cost}"
            results[n] = replace(result, refused=f"{str(result.refused).rstrip('.')}; {instead}.")
    if not any(result.settings for result in results):
        raise UserError(" ".join(dict.fromkeys(str(result.refused) for result in results)))
    return ExportResult(checkpoint, tuple(results), target, run)


def _length(
    checkpoint: Checkpoint, requests: Sequence[Export], to: str | int | None, run: PriorRun | None
) -> int:
    """The length to serve: `to`, the run's, saved with the scheme, or implied by the scheme."""
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
    """Run the runtimes themselves on what was written; raises if none can be run."""
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
            source_and_scheme = (checkpoint.source.gguf or checkpoint.source.name, export.requested)
            references[export.requested] = Reference(*source_and_scheme, original, result.target)
        reference, settings = references[export.requested], export.settings.entries
        proofs.append(verify(export.runtime, export.path, settings, reference, export.target))
    return _some_ran(proofs)


def _some_ran(proofs: Sequence[Verified]) -> tuple[Verified, ...]:
    if not any(proof.rows or proof.stopped for proof in proofs):
        raise UserError(" ".join(map(str, proofs)))
    return tuple(proofs)


def verify(model: str | Path, *, options: VerifyOptions | None = None) -> VerifyResult:
    """Run a model in runtimes, and compare what they compute with what a scheme defines.

    Args:
        model: a name on the Hub, a folder or a .gguf file. With a scheme it is exported into a
            temporary folder first; without one it is run unchanged.
    """
    from longitude.runtimes.verify import Reference, Verified, VerifyResult
    from longitude.runtimes.verify import verify as run_in

    model, options = str(model), options or VerifyOptions()
    selected = runnable()
    if options.runtimes.strip() != "all":  # some are verified as another, whose export is run
        chosen = (runtimes()[r.verified_as or r.name] for r, _ in select(options.runtimes))
        selected = list(dict.fromkeys(chosen))
    if unable := [r.name for r in selected if r.runner is None]:
        supported = ", ".join(r.name for r in runnable())
        raise UserError(f"{', '.join(unable)} can't be run from Python: use {supported}.")
    checkpoint = open_checkpoint(model, options.revision)
    scheme = options.scheme or checkpoint.saved.get("scheme")
    if scheme is None:  # compare what runtimes compute from its own settings with what these mean
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
    # an adapter or GGUF file is first converted, by the export that is a complete checkpoint
    needed = [complete()] if checkpoint.needs_conversion else []
    requests = [(r, None) for r in dict.fromkeys([*needed, *selected])]
    exported = _exported(checkpoint, requests, scheme, ExportOptions(to=options.to), None)
    with TemporaryDirectory() as folder:
        proofs = _verified(write_files(exported, Path(folder), "link"))
    titles = tuple(runtime.title for runtime in selected)
    return VerifyResult(scheme, tuple(p for p in proofs if p.runtime.startswith(titles)))


def runnable() -> list[Runtime]:
    """The runtimes that can be run from Python."""
    return [runtime for runtime in runtimes().values() if runtime.runner]


def lint(model: str | Path, *, options: LintOptions | None = None) -> LintResult:
    """Compare what each runtime would compute from a model's settings with what they mean.

    Args:
        model: a config.json, a folder, an adapter's folder, a name on the Hub or a .gguf file.
    """
    model, options = str(model), options or LintOptions()
    scheme = parse(options.scheme) if options.scheme else None
    if isinstance(scheme, Layers):
        raise UserError("lint takes one --scheme for all layers: leave layers(…) out.")
    selected = [] if options.runtimes.strip() == "all" else select(options.runtimes)
    added: Any = options.settings
    if isinstance(added, str):
        try:
            added = json.loads(added)
        except ValueError:
            added = None
    if not isinstance(added, Mapping):
        received = shown(options.settings)
        raise UserError(f"--with takes a JSON object, but got {received}: write one in braces.")
    settings = {**read_settings(model, options.revision), **added}
    own, faults = saved_scheme(model, options.revision)
    return lint_settings(settings, selected, scheme or own, faults)
