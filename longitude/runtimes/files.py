"""The files of an export: checkpoint folders, a new GGUF file, commands as scripts, a model card.

With one runtime all files are written to the output folder itself. With several, each runtime that
needs a folder gets a subfolder, and equal subfolders are shared. Small files are copied, weights
linked, copied or left out; the length limits of tokenizer and generation are raised. Files are
written atomically, config.json last, so that a folder that has it is complete.

The model card says what was changed, what was measured and how each runtime is started. Its header,
in the Hub's format, copies licence, language and use from the base model's card.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from jinja2 import Template
from yaml import YAMLError

from longitude import __version__
from longitude.core.store import atomic_checkpoint, atomic_file, read_json
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.families.learned import resize_positions
from longitude.hf.loading import load
from longitude.hf.patch import undo
from longitude.hf.rope_config import ORIGINAL
from longitude.hf.saving import save
from longitude.hf.source import SCHEME, as_user_error
from longitude.inspection.catalogue import all_parts, distinct_layers, part_row
from longitude.runtimes import recommended
from longitude.runtimes.checkpoint import TOKENIZER
from longitude.runtimes.export import Export, ExportResult, complete, exports, is_longer_table
from longitude.runtimes.gguf import export_gguf
from longitude.runtimes.rope_dictionaries import yaml

WEIGHTS = ("link", "copy", "none")
HEAVY = (".safetensors", ".bin")
SMALL = (".json", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".vocab", ".bpe")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", ORIGINAL, SCHEME)
ROTATION += ("max_position_embeddings",)
REWRITTEN = ("config.json", TOKENIZER, "generation_config.json", "README.md")
CARRIED = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
TAGS = ("long-context", "longitude")
FENCES = {"py": "python", "sh": "sh", "yaml": "yaml"}
USUAL = ("causal", "unscaled", "sequential")  # parts that need no explanation
UNCHANGED = "unchanged; what changed is how it counts positions"
TABLE_LONGER = "but for its table of positions, which is written out longer"


def slug(name: str) -> str:
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def write_files(result: ExportResult, out: Path, weights: str = "link") -> ExportResult:
    """Write what was exported, except the card of the output folder. The texts of the returned
    result name the new folders and files, and its `written` lists the new paths."""
    _check_place(result, out.expanduser())
    result = located(result, out)
    first, *others = result.exports
    servers = []  # other runtimes' commands for the folder of a single export, for its card
    if not others and first.runtime.write_any and first.target and first.config:
        settings = {"config": first.config, "tokenizer": {"model_max_length": result.target}}
        model = replace(result.checkpoint, name=str(out), header=None, **settings)
        suitable = [r for r in recommended() if r.writes == "command" and r.reads != "gguf"]
        done = exports(model, [Export(r, first.requested) for r in suitable], result.target)
        servers = [export for export in done if export.settings]
    text = card(replace(result, exports=(*result.exports, *servers)))
    written: list[Path] = []
    for export in result.exports:
        path = Path(export.path)
        if export.config is not None:
            if path not in written:
                _write_folder(result, export, path, weights, text)
                written.append(path)
        elif export.settings is not None:
            written.append(write_text(out / export.runtime.file, export.settings.text))
            source, target = result.checkpoint.source.gguf, export.target
            if export.runtime.writes == "gguf" and source and target and path not in written:
                export_gguf(source, path, target)
                written.append(path)
    return replace(result, written=tuple(written))


def _check_place(result: ExportResult, out: Path) -> None:
    """Raise if writing would replace anything other than an earlier export."""
    readme, (first, *others) = out / "README.md", result.exports
    commands = bool(others) or first.config is None  # these may be written beside a GGUF file
    conflict = "is a file" if out.is_file() else ""
    if out.resolve() == result.checkpoint.home.resolve() and not (
        commands and result.checkpoint.source.gguf
    ):
        conflict = "is the model's own folder"
    elif readme.is_file() and "longitude" not in (front_matter(readme).get("tags") or ()):
        conflict = "has a README.md of its own, which the model card would replace"
    if conflict:
        raise UserError(f"--out {shown(str(out))} {conflict}: name another folder.")


def located(result: ExportResult, out: Path) -> ExportResult:
    """Return the result with texts that name folders and files, and the path that each runtime
    loads: its folder (or that of an earlier export with the same contents), the new GGUF file, the
    original model, or the folder that another export converts it to."""
    source, exports = result.checkpoint.source, result.exports
    gguf_file = out / f"{slug(result.checkpoint.name)}-{result.target}.gguf"
    folders = []
    for export in exports:
        same = (e for e in exports if e.config is not None and e.content == export.content)
        name = next(same, export).runtime.name
        folders.append(out if len(exports) == 1 else out / name)
    placed = list(zip(exports, folders, strict=True))
    model: Path | str = source.folder or result.checkpoint.name
    if result.checkpoint.needs_conversion:
        model = next((folder for e, folder in placed if e.runtime == complete()), model)
    first = next((folder for e, folder in placed if e.runtime.writes == "folder"), out)
    results = []
    for export, folder in placed:
        has_folder = export.config is not None
        path = folder if has_folder else gguf_file if export.runtime.writes == "gguf" else model
        with_paths = filled(export, folder if has_folder else first, gguf_file)
        results.append(replace(with_paths, path=str(path)))
    return replace(result, exports=tuple(results))


def filled(export: Export, folder: Path | str, gguf_file: Path) -> Export:
    """Return the export with the paths of its folder and GGUF file filled into its text."""
    if export.settings is None:
        return export
    shell = export.runtime.file.endswith(".sh")
    place, file = (shlex.quote(str(p)) if shell else str(p) for p in (folder, gguf_file))
    text = export.settings.text.replace("'{folder}'", "{folder}" if shell else "'{folder}'")
    text = text.replace("{folder}", place).replace("{file}", file)
    text = text.replace("{name}", gguf_file.name)
    return replace(export, settings=replace(export.settings, text=text))


@contextmanager
def _place_errors(path: Path, instead: str) -> Iterator[None]:
    """Raise disk errors as one sentence."""
    try:
        yield
    except OSError as error:
        why = f"can't be written ({error.strerror or error})"
        raise UserError(f"{shown(str(path))} {why}: {instead}.") from error


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically."""
    with _place_errors(path, "name another folder"), atomic_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def _write_folder(
    result: ExportResult, export: Export, out: Path, weights: str, card_text: str
) -> None:
    """Write a new folder of the checkpoint; the source folder is not changed."""
    if weights not in WEIGHTS:
        raise UserError(f"--weights is link, copy or none, but got {shown(weights)}.")
    out = out.expanduser().resolve()
    texts = {export.runtime.file: export.text or "", "README.md": card_text}
    texts |= export.settings.files if export.settings else {}
    with _place_errors(out, "name another folder or make room"), atomic_checkpoint(out) as part:
        home = _fill(result, export, part, weights)
        config = dict(export.config or {})
        if home == part:  # a converted model: replace only the rotation
            own = read_json(part / "config.json")
            config = {k: v for k, v in own.items() if k not in ROTATION} | {
                k: v for k, v in config.items() if k in ROTATION
            }
        write_settings(home, part, result.target, config, texts)


def _fill(result: ExportResult, export: Export, part: Path, weights: str) -> Path:
    """Write the checkpoint's files; return the folder from which to read those to rewrite."""
    source, conversion = result.checkpoint.source, result.checkpoint.needs_conversion
    scheme = parse(export.scheme)
    if conversion is not None and weights == "none":
        raise UserError(
            f"{conversion} has no folder whose weights could be left out: use --weights copy."
        )
    if conversion is not None or is_longer_table(scheme):
        revision = None if conversion else source.revision  # an adapter's is that of its base
        model, tokenizer = load(source.name, revision=revision, device="cpu", quiet=True)
        if conversion is None:
            model = resize_positions(model, scheme, result.target)
        else:  # a GGUF file is dequantised, an adapter merged
            undo(model)  # the exported settings state the scheme instead
        save(model, part, tokenizer)
        return part
    home = source.folder
    if home is None:  # on the Hub
        from huggingface_hub import snapshot_download

        small = [f"*{ending}" for ending in SMALL] + [f"{name}*" for name in LEGAL] + ["README.md"]
        files = small if weights == "none" else [*small, f"*{HEAVY[0]}"]
        kwargs: dict[str, Any] = {"revision": source.revision, "allow_patterns": files}
        with as_user_error(source, "files"):
            home = Path(snapshot_download(source.place, **kwargs))
    if weights != "none" and not any(file.suffix in HEAVY for file in home.iterdir()):
        raise UserError(
            f"{shown(str(home))} has no weights to {weights} (*{', *'.join(HEAVY)}): use --weights "
            f"none for the settings alone."
        )
    for file in sorted(home.iterdir()):
        if not file.is_file() or file.name in REWRITTEN:
            continue
        index, destination = file.name.endswith(".index.json"), part / file.name
        small = file.suffix in SMALL or file.name.startswith(LEGAL)
        if file.suffix in HEAVY and weights == "link":
            destination.symlink_to(file.resolve())  # resolved: files in the Hub's cache are links
        elif weights != "none" if file.suffix in HEAVY or index else small:
            shutil.copyfile(file, destination)
    return home


def write_settings(
    home: Path, part: Path, length: int, config: dict[str, Any], texts: Mapping[str, str]
) -> None:
    """Write the files that limit the input length, the texts, and config.json."""
    names = (TOKENIZER, "generation_config.json")
    tokenizer, generation = (read_json(home / name, optional=True) for name in names)
    if tokenizer:
        tokenizer["model_max_length"] = length
    if "max_length" in generation:
        generation["max_length"] = length
    contents = {TOKENIZER: tokenizer, "generation_config.json": generation, "config.json": config}
    written = {k: json.dumps(v, indent=2, ensure_ascii=False) for k, v in contents.items() if v}
    for name, text in {**texts, **{k: f"{v}\n" for k, v in written.items()}}.items():
        (part / name).write_text(text, encoding="utf-8")


# the model card


def card(result: ExportResult) -> str:
    """Render the text of README.md."""
    checkpoint, source, run = result.checkpoint, result.checkpoint.source, result.run
    own: Mapping[str, Any] = front_matter(checkpoint.home / "README.md")
    if checkpoint.header is not None:
        keys = checkpoint.header.keys
        url = str(keys.get("general.base_model.0.repo_url", "")).rstrip("/")
        own = {"license": keys.get("general.license"), "base_model": "/".join(url.split("/")[-2:])}
    header = {key: own[key] for key in CARRIED if own.get(key)}
    base = source.name if source.folder is None else own.get("base_model")
    # the Hub accepts only names of its own repositories
    if isinstance(base, list) or REPOSITORY.fullmatch(str(base or "")):
        header["base_model"] = base
    header["tags"] = list(dict.fromkeys([*map(str, own.get("tags") or ()), *TAGS]))
    folder = source.folder.resolve() if source.folder else None
    schemes = {e.scheme: parse(e.scheme) for e in result.exports if e.settings}
    longer = any(map(is_longer_table, schemes.values()))
    parts = [p for s in schemes.values() for layer in distinct_layers(s) for p in all_parts(layer)]
    lines = (run.summary if run else "").splitlines()
    summary = "\n".join(line for line in lines if not line.startswith("!["))
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True).render(
        header=yaml(header),
        name=source.gguf.stem if source.gguf else folder.name if folder else source.name,
        target=result.target,
        trained=checkpoint.trained,
        weights=TABLE_LONGER if longer else UNCHANGED,
        schemes=schemes,
        own=checkpoint.own,
        parts=dict.fromkeys(part_row(part) for part in parts if part.name not in USUAL),
        measured=summary.strip().replace("\n## ", "\n### ") if run else None,
        exports=result.exports,
        fences=FENCES,
        version=__version__,
        verified=result.verified,
    )


def front_matter(file: Path) -> dict[str, Any]:
    """Return the YAML header of a card; empty if none can be read."""
    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, YAMLError):
        return {}
