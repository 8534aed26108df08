"""`longitude.export` and `longitude.lint`: a scheme written for runtimes, and settings checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.progress import Progress, silent
from longitude.core.scheme import Layers
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown, target_length
from longitude.parts import DynamicNtk
from longitude.runtimes import Runtime, select
from longitude.runtimes.card import card
from longitude.runtimes.checkpoint import Checkpoint, open_checkpoint
from longitude.runtimes.export import Export, ExportResult, PriorRun, exports, is_run, read_run
from longitude.runtimes.files import slug, write_files, write_text
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
    result = _exported(checkpoint, selected, scheme, options, run)
    out = options.out
    folder = any(one.config is not None for one in result.exports)
    if out is None and (folder or len(selected) > 1 or selected[0][0].writes != "command"):
        out = Path(f"{slug(checkpoint.source.name)}-{result.target}")
    if out is None:
        return result
    result = write_files(result, out, options.weights)
    if options.verify:
        result = replace(result, verified=_verified(result))
    if result.written == (out,):
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
    requests, refused = [], {}
    for runtime, version in selected:
        version = version or options.version
        try:
            text = scheme or (run.scheme(runtime) if run else "")
            requests.append(Export(runtime, text, version))
        except UserError as error:
            refused[runtime.name] = Export(runtime, "", version, refused=str(error))
    target = _length(checkpoint, requests, options.to, run)
    made = {e.runtime.name: e for e in exports(checkpoint, requests, target)}
    done = [(refused | made)[runtime.name] for runtime, _ in selected]
    if run is not None:
        done = [_with_cost(one, run) for one in done]
    if not any(one.settings for one in done):
        raise UserError(" ".join(dict.fromkeys(str(one.refused) for one in done)))
    return ExportResult(checkpoint, tuple(done), target, run)


def _length(
    checkpoint: Checkpoint, requests: Sequence[Export], to: str | int | None, run: PriorRun | None
) -> int:
    """The length to serve: as given, of the run, saved with the scheme, or what the scheme itself
    implies, its factor times what it was trained on."""
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
    scheme, saved = requests[0].requested, checkpoint.saved
    if scheme == saved.get("scheme") and saved.get("target"):
        return saved["target"]
    resolved = checkpoint.resolve(scheme).scheme
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


def _with_cost(one: Export, run: PriorRun) -> Export:
    """What a runtime's scheme costs against the best of all, among its notes."""
    cost = run.cost(one.runtime)
    if cost is None:
        return one
    best = run.scheme(one.runtime)
    if one.settings is None and best != one.requested:
        instead = f"of those measured it can serve {best}, and {cost}"
        return replace(one, refused=f"{str(one.refused).rstrip('.')}; {instead}.")
    if one.settings is None or best != one.requested:
        return one
    notes = (*one.settings.notes, f"{one.scheme}: {cost}.")
    return replace(one, settings=replace(one.settings, notes=notes))


def _verified(result: ExportResult) -> tuple[Verified, ...]:
    """What llama.cpp itself computes from the new file; nothing if it was refused."""
    from longitude.runtimes.verify import verify

    source = result.checkpoint.source.gguf
    files = [path for path in result.written if path.suffix == ".gguf"]
    one = next((e for e in result.exports if e.runtime.writes == "gguf" and e.target), None)
    if source is None or one is None or one.target is None:
        return ()
    return tuple(verify(source, file, one.requested, one.target) for file in files)


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
