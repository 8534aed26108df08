"""A scheme as settings of each runtime, or the reason why a runtime has none.

A runtime's `write` yields candidate settings in order of preference. The first from which its own
formulas (`emulate`) compute the scheme's frequencies, factor and length is used. If there is none,
the refusal says what would differ, and names the nearest scheme that the runtime can serve. Schemes
are given, or recommended for each runtime by an `extend` run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.store import Store
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.eval.records import for_longer_context, recorded
from longitude.hf.encodings import KINDS, read_encodings
from longitude.parts import Linear, LongRope, Ntk, Yarn
from longitude.runtimes import Runtime, Settings, runtimes
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import TOLERANCE, before, difference, emulated
from longitude.runtimes.rope_dictionaries import base_of
from longitude.runtimes.target import (
    LONGER_TABLES,
    Target,
    make_target,
    nearest,
    required,
    text_config,
    unrotated,
)

if TYPE_CHECKING:
    from longitude.runtimes.verify import Verified

RESULTS, RECOMMENDATION, SUMMARY = "results.sqlite", "recommendation.json", "summary.md"


@dataclass(frozen=True)
class Export:
    """A scheme for a runtime and, once exported, its settings or the reason for having none."""

    runtime: Runtime
    requested: str  # the text of the scheme as it was requested
    version: str | None = None  # the newest if None
    scheme: str = ""  # the same, completed from the model's own
    settings: Settings | None = None
    target: Target | None = None
    refused: str | None = None
    path: str = ""  # the model that the runtime is started on, set by `located`

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The config.json of the export's own folder, if it needs one."""
        return self.settings.config if self.settings else None

    @property
    def content(self) -> Any:
        """What that folder contains besides the checkpoint's own files."""
        return (self.settings.config, self.settings.files) if self.settings else None

    @property
    def text(self) -> str | None:
        """The command to run, or the contents of the file."""
        return self.settings.text if self.settings else None


@dataclass(frozen=True)
class ExportResult:
    """What was written for each runtime."""

    checkpoint: Checkpoint
    exports: tuple[Export, ...]
    target: int
    run: PriorRun | None = None
    written: tuple[Path, ...] = ()
    verified: tuple[Verified, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every verification succeeded."""
        return all(proof.holds for proof in self.verified)

    @property
    def notes(self) -> list[str]:
        """Further messages: refusals, notes, written paths, verifications."""
        refused = [f"{e.runtime.title}: {e.refused}" for e in self.exports if not e.settings]
        notes = dict.fromkeys(n for e in self.exports if e.settings for n in e.settings.notes)
        wrote = [f"wrote {path}" for path in self.written]
        return [*refused, *notes, *wrote, *map(str, self.verified)]

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """The commands, or the contents of the files, of each runtime."""
        if len(self.exports) == 1:
            return (self.exports[0].text or "").removesuffix("\n")
        done = [e for e in self.exports if e.settings]
        return "\n".join(f"# {e.runtime.called(e.version)}\n{e.text}" for e in done)

    def report(self, path: str | Path) -> Path:
        """Write the model card, in Markdown."""
        from longitude.runtimes.files import card

        Path(path).write_text(card(self), encoding="utf-8")
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        """Settings by runtime, and what was written."""
        return {
            "target": self.target,
            "exports": [
                {
                    "runtime": e.runtime.name,
                    **{name: getattr(e, name) for name in ("version", "scheme", "text", "refused")},
                    "notes": list(e.settings.notes) if e.settings else [],
                }
                for e in self.exports
            ],
            "wrote": [str(path) for path in self.written],
            "verified": [str(proof) for proof in self.verified],
        }


def exports(checkpoint: Checkpoint, requests: Sequence[Export], length: int) -> list[Export]:
    """Export several requests; the refusal of one does not stop the others."""
    done, converter, kind = [], complete(), checkpoint.needs_conversion
    converts = converter in [request.runtime for request in requests]
    for request in requests:
        runtime, reads_gguf = request.runtime, request.runtime.reads == "gguf"
        try:
            if kind and reads_gguf and checkpoint.source.adapter is not None:
                raise UserError(
                    f"{runtime.title} reads a GGUF file, but got an adapter: write it --for "
                    f"{converter.name}, which merges it, and convert that folder."
                )
            if kind and not (reads_gguf or runtime.writes == "folder" or converts):
                raise UserError(
                    f"{runtime.title} reads a checkpoint's folder, but got {kind}: add "
                    f"{converter.name} to --for, which makes a folder of it."
                )
            done.append(_export(checkpoint, request, length))
        except UserError as error:
            done.append(replace(request, scheme=request.requested, refused=str(error)))
    return done


def complete() -> Runtime:
    """The runtime whose export is a complete checkpoint, which the others can load."""
    return next(r for r in runtimes().values() if r.write_any and r.writes == "folder")


def _export(checkpoint: Checkpoint, request: Export, length: int) -> Export:
    """Complete one request with the runtime's settings; raises if it has none."""
    runtime, target = request.runtime, None
    version = request.version or runtime.newest
    scheme, own, model, changes = checkpoint.resolve(request.requested)
    if own is None:
        _check_rotation(runtime, scheme, request.requested, model.config)
    rotation = scheme if model.others else unrotated(scheme, own, model.config, length) or scheme
    pairs = [(rotation, own), *changes] if own and rotation.layer(0).rotary else []
    needed = [required(*pair) for pair in pairs]
    needs = None if None in needed or not needed else frozenset[str]().union(*filter(None, needed))
    if own is None and "learned_table" in runtime.supports and is_longer_table(scheme):
        lengths = ("max_position_embeddings", "n_positions", "n_ctx")  # the last two are GPT-2's
        config = {k: length if k in lengths else v for k, v in model.config.items()}
        settings = Settings(config, config=config)
    elif (
        runtime.write_any
        and (needs is None or "dynamic_ntk" in needs or (changes and runtime.layers != "all"))
        and not before(version, runtime.any_since or "0")
    ):
        settings = runtime.write_any(request.requested, scheme, own, checkpoint)
    else:
        _check_one_rotation(runtime, model)
        if changes and runtime.layers != "all":
            raise UserError(
                f"{runtime.title} takes a new rotation for full-attention layers, but "
                f"{request.requested} changes others as well: write layers(…) with a plain rope() "
                f"for those."
            )
        if checkpoint.needs_conversion and runtime.reads != "gguf":
            model = replace(model, name="{folder}")  # the folder that is exported for transformers
        try:
            target = make_target(rotation, model.config, length)
        except UserError:
            if isinstance(scheme, Layers) or scheme.rotary is None:
                raise
            near = make_target(nearest(scheme, model.config, length), model.config, length)
            instead = nearest_served(runtime, near, model, version)
            tools = runtime.other_tools(scheme, own)
            refusal = f"{runtime.title} has no settings for {dump(scheme)}: {tools}{instead}."
            raise UserError(refusal) from None
        settings = write(runtime, target, model, version)
    start = runtime.start
    if settings.config is None:
        start = start.replace("{folder}", shlex.quote(model.name))
    text = (settings.text or start).replace("{target}", str(length))
    notes = tuple(note.replace("{target}", str(length)) for note in settings.notes)
    files = {name: body.replace("{target}", str(length)) for name, body in settings.files.items()}
    settings = replace(settings, text=text, files=files, notes=notes)
    fields = {"settings": settings, "target": target, "scheme": dump(scheme)}
    return replace(request, version=version, **fields)


def _check_rotation(
    runtime: Runtime, scheme: Scheme | Layers, text: str, config: Mapping[str, Any]
) -> None:
    """Check a model whose configuration states no rotation: raise if it has none for the scheme to
    change (GPT-J has one), or if the runtime can't read the longer table or run our attention."""
    own, name = read_encodings(config), text_config(config).get("model_type")
    rotates = any(one.rotary for one in scheme.schemes)
    if rotates and all(each.kind != "rope" for each in own):
        raise UserError(
            f"a model of type {name} has no rotation that {text} could change "
            f"({KINDS[own[0].kind]}): leave rope(…) out."
        )
    longer, what = is_longer_table(scheme), "the rotation" if rotates else text
    known = runtimes().values()
    suitable = [r.name for r in known if ("learned_table" in r.supports if longer else r.write_any)]
    if runtime.name not in suitable:
        raise UserError(
            f"{runtime.title} has no settings for {what} of a model of type {name}: export it for "
            f"{' or '.join(suitable)}."
        )


def _check_one_rotation(runtime: Runtime, model: Checkpoint) -> None:
    if model.others and runtime.layers == "one":
        suitable = [r.name for r in runtimes().values() if r.layers != "one"]
        raise UserError(
            f"{runtime.title} takes one rotation, but this model's layer types have different "
            f"rotations: export it for {' or '.join(suitable)}."
        )


def is_longer_table(scheme: Scheme | Layers) -> bool:
    """Whether a scheme only extends a table of learned positions."""
    embed = scheme.layer(0).embed
    return isinstance(embed, LONGER_TABLES) and scheme == Scheme.of(embed, *scheme.layer(0).mask)


def write(
    runtime: Runtime, target: Target, model: Checkpoint, version: str | None = None
) -> Settings:
    """Return settings from which a runtime's own code computes the target; raises if none do."""
    _check_one_rotation(runtime, model)
    version = version or runtime.newest
    settings, why = _first(runtime, target, model, version)
    if settings is not None:
        return settings
    near = nearest_served(runtime, target, model, version)
    raise UserError(f"{runtime.called(version)} can't serve {target.rope} ({why}): {near}.")


def _first(
    runtime: Runtime, target: Target, model: Checkpoint, version: str
) -> tuple[Settings | None, str]:
    """Return the first settings that give the target, or what differs under the last ones."""
    why = runtime.no_settings
    for settings in runtime.write(target, model, version):
        effective = emulated(runtime.emulate, settings.entries, version)
        diff, pairs = difference(target, effective), len(target.inv_freq)
        if not diff.starts:
            why = "it would not start"
        elif len(effective.inv_freq) != pairs:
            why = f"it would rotate {len(effective.inv_freq)} pairs and not {pairs}"
        elif diff.frequencies > TOLERANCE:
            why = f"a frequency would be off by {diff.frequencies:.1%}"
        elif diff.attention > TOLERANCE:
            gains = f"{effective.attention:.4f} and not {target.attention:.4f}"
            why = f"cosine and sine would be scaled by {gains}"
        elif diff.length < 0:
            why = f"it would read {effective.length:,} tokens and not {target.length:,}"
        else:
            return settings, ""
    return None, why


def nearest_served(runtime: Runtime, target: Target, model: Checkpoint, version: str) -> str:
    """Return the end of a refusal: the first simpler rotation that the runtime can serve."""
    f, factor = target.rope.frequencies, max(1.0, target.length / target.original)
    alternatives = [f, Yarn(factor, original=target.original), Ntk(factor), Linear(factor)]
    if isinstance(f, Yarn):
        alternatives[1:1] = [replace(f, attention_factor=gain, mscale=None) for gain in (None, 1.0)]
    if isinstance(f, LongRope):
        alternatives.insert(1, replace(f, short=f.long, attention_factor=1.0))
    for rope in (replace(target.rope, frequencies=other) for other in alternatives):
        candidate = target.under(rope)
        if _first(runtime, candidate, model, version)[0] is not None:
            ntk = isinstance(rope.frequencies, Ntk)
            base_note = f", which is a rope_theta of {base_of(candidate):.6g}" if ntk else ""
            return f"the nearest it can serve is {rope}{base_note}"
    return "it can't serve any simpler rotation either"


@dataclass(frozen=True)
class PriorRun:
    """What an `extend` run recommends: for each runtime the best scheme that it can serve."""

    name: str
    target: int
    best: Mapping[str, Any]
    runtimes: Mapping[str, Mapping[str, Any]]
    summary: str
    context: Mapping[str, Any] | None = None  # what it advises for a longer context

    def scheme(self, runtime: Runtime) -> str:
        """Return the best scheme for a runtime; raises if none beats the baseline."""
        advice = self._advice(runtime)
        if not _advises(advice):
            more = ""
            if runtime.write_any and _advises(self.best):
                scheme = shlex.quote(self.best["scheme"])
                more = f" longitude.hf.load can serve the best: add --scheme {scheme}."
            why = f"{advice['sentence']}{more}"
            raise UserError(f"the run advises no scheme for {runtime.name}: {why}")
        return str(advice["scheme"])

    def cost(self, runtime: Runtime) -> str | None:
        """Describe how much worse it scores than the best of all methods, if it is another one."""
        advice, best = self._advice(runtime), self.best
        values = [one["numbers"].get("value") for one in (advice, best)]
        if advice["label"] == best["label"] or not _advises(advice) or not all(values):
            return None
        more = values[0]["mean"] - values[1]["mean"]
        what = "loss" if best["numbers"]["measure"] != "passkey" else "share of passkeys"
        at = f"{best['numbers']['length']:,} tokens"
        return f"against {best['label']}, the best of all, its {what} at {at} is {more:+.3f}"

    def _advice(self, runtime: Runtime) -> Mapping[str, Any]:
        if runtime.any_since:  # our plugin serves every scheme
            return self.best
        for name in (runtime.name, runtime.advice):
            if name in self.runtimes:
                return self.runtimes[name]
        raise UserError(
            f"the run has no recommendation for {runtime.name}: run `longitude extend` again."
        )


def _advises(advice: Mapping[str, Any]) -> bool:
    """Whether the advice names a scheme other than the model's own."""
    return bool(advice.get("scheme")) and advice["label"] != advice["numbers"]["own"]


def is_run(path: str) -> bool:
    """Whether the path is the folder of an `extend` run."""
    return (Path(path) / RESULTS).is_file()


def read_run(path: str) -> PriorRun:
    """Read the recommendation from the folder of an `extend` run."""
    folder = Path(path)
    with Store(folder / RESULTS) as store:
        subjects = {row.key.subject for row in recorded(store)}
    if len(subjects) != 1:
        raise UserError(
            f"an export covers one model, but {folder} has measurements of {len(subjects)}: export "
            f"from a run of one."
        )
    file, summary = folder / RECOMMENDATION, folder / SUMMARY
    try:
        advice = json.loads(file.read_text(encoding="utf-8"))
        return PriorRun(
            name=subjects.pop().name,
            target=int(advice["best"]["numbers"]["target"]),
            best=advice["best"],
            context=for_longer_context(advice),
            runtimes={row["what"]: row for row in advice["runtimes"]},
            summary=summary.read_text(encoding="utf-8") if summary.is_file() else "",
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"the recommendation in {file} and {SUMMARY} can't be read: run the same `longitude "
            f"extend` again, and both are written."
        ) from None
