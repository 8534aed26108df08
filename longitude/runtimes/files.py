"""The files of an export: checkpoint folders, a new GGUF file, commands as scripts, a model card.

With one runtime everything lies in the folder itself; with several, each that needs a folder has
one inside, and folders with the same config.json are one. In a folder the small files are copied,
the weights linked, copied or left out; the lengths that tokenizer and generation may reach are
raised. Files appear complete, config.json last: a folder that has it has everything.

The model card says what was changed, what was measured and how each runtime is started. Its header,
in the Hub's form, carries over what the base model's card says of licence, language and use.
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
    """Write what was exported, but for the card of all. Of what is returned the texts name the new
    folders and files, and `written` are the paths of what is new."""
    _check_place(result, out.expanduser())
    result = located(result, out)
    one, *others = result.exports
    servers = []  # of an only export: how they are started on its folder, for the card
    if not others and one.runtime.write_any and one.target and one.config:
        settings = {"config": one.config, "tokenizer": {"model_max_length": result.target}}
        model = replace(result.checkpoint, name=str(out), header=None, **settings)
        able = [r for r in recommended() if r.writes == "command" and r.reads != "gguf"]
        done = exports(model, [Export(r, one.requested) for r in able], result.target)
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
    """Raise if what is written would replace something else than an earlier export."""
    readme, (one, *others) = out / "README.md", result.exports
    commands = bool(others) or one.config is None  # which may lie beside a GGUF file
    what = "is a file" if out.is_file() else ""
    if out.resolve() == result.checkpoint.home.resolve() and not (
        commands and result.checkpoint.source.gguf
    ):
        what = "is the model's own folder"
    elif readme.is_file() and "longitude" not in (front_matter(readme).get("tags") or ()):
        what = "has a README.md of its own, which the model card would replace"
    if what:
        raise UserError(f"--out {shown(str(out))} {what}: name another folder.")


def located(result: ExportResult, out: Path) -> ExportResult:
    """The result with texts that name folders and files, and what each runtime is started on: its
    folder (that of an earlier export with the same config.json, if there is one), the new GGUF
    file, or the model as it is or as another export converts it."""
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
    done = []
    for export, folder in placed:
        own = export.config is not None
        path = folder if own else gguf_file if export.runtime.writes == "gguf" else model
        text = filled(export, folder if own else first, gguf_file)
        done.append(replace(text, path=str(path)))
    return replace(result, exports=tuple(done))


def filled(export: Export, folder: Path | str, gguf_file: Path) -> Export:
    """An export whose text names the folder and the GGUF file that it is about."""
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
    """Errors of the disk as one sentence."""
    try:
        yield
    except OSError as error:
        why = f"can't be written ({error.strerror or error})"
        raise UserError(f"{shown(str(path))} {why}: {instead}.") from error


def write_text(path: Path, text: str) -> Path:
    """Write a text file, complete or not at all."""
    with _place_errors(path, "name another folder"), atomic_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def _write_folder(
    result: ExportResult, export: Export, out: Path, weights: str, card_text: str
) -> None:
    """Write a checkpoint's folder again; its source is not changed."""
    if weights not in WEIGHTS:
        raise UserError(f"--weights is link, copy or none, but got {shown(weights)}.")
    out = out.expanduser().resolve()
    texts = {export.runtime.file: export.text or "", "README.md": card_text}
    texts |= export.settings.files if export.settings else {}
    with _place_errors(out, "name another folder or make room"), atomic_checkpoint(out) as part:
        home = _fill(result, export, part, weights)
        config = dict(export.config or {})
        if home == part:  # of a converted model only the rotation is new
            own = read_json(part / "config.json")
            config = {k: v for k, v in own.items() if k not in ROTATION} | {
                k: v for k, v in config.items() if k in ROTATION
            }
        write_settings(home, part, result.target, config, texts)


def _fill(result: ExportResult, export: Export, part: Path, weights: str) -> Path:
    """The checkpoint's files in the new folder; where the ones to rewrite are to be read."""
    source, conversion = result.checkpoint.source, result.checkpoint.needs_conversion
    scheme = parse(export.scheme)
    if conversion is not None and weights == "none":
        raise UserError(
            f"{conversion} has no folder whose weights could be left out: use --weights copy."
        )
    if conversion is not None or is_longer_table(scheme):
        revision = None if conversion else source.revision  # an adapter's would be its base's
        model, tokenizer = load(source.name, revision=revision, device="cpu", quiet=True)
        if conversion is None:
            model = resize_positions(model, scheme, result.target)
        else:  # a GGUF file is dequantised, an adapter merged
            undo(model)  # the scheme is written by what is exported
        save(model, part, tokenizer)
        return part
    home = source.folder
    if home is None:  # on the Hub
        from huggingface_hub import snapshot_download

        small = [f"*{ending}" for ending in SMALL] + [f"{name}*" for name in LEGAL] + ["README.md"]
        files = small if weights == "none" else [*small, f"*{HEAVY[0]}"]
        given: dict[str, Any] = {"revision": source.revision, "allow_patterns": files}
        with as_user_error(source, "files"):
            home = Path(snapshot_download(source.place, **given))
    if weights != "none" and not any(file.suffix in HEAVY for file in home.iterdir()):
        raise UserError(
            f"{shown(str(home))} has no weights to {weights} (*{', *'.join(HEAVY)}): use --weights "
            f"none for the settings alone."
        )
    for file in sorted(home.iterdir()):
        if not file.is_file() or file.name in REWRITTEN:
            continue
        index, to = file.name.endswith(".index.json"), part / file.name
        small = file.suffix in SMALL or file.name.startswith(LEGAL)
        if file.suffix in HEAVY and weights == "link":
            to.symlink_to(file.resolve())  # in a cache: to the target of its own link
        elif weights != "none" if file.suffix in HEAVY or index else small:
            shutil.copyfile(file, to)
    return home


def write_settings(
    home: Path, part: Path, length: int, config: dict[str, Any], texts: Mapping[str, str]
) -> None:
    """The files that limit an input's length, the texts, and config.json."""
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
    """The text of README.md."""
    checkpoint, source, run = result.checkpoint, result.checkpoint.source, result.run
    own: Mapping[str, Any] = front_matter(checkpoint.home / "README.md")
    if checkpoint.header is not None:
        keys = checkpoint.header.keys
        url = str(keys.get("general.base_model.0.repo_url", "")).rstrip("/")
        own = {"license": keys.get("general.license"), "base_model": "/".join(url.split("/")[-2:])}
    header = {key: own[key] for key in CARRIED if own.get(key)}
    base = source.name if source.folder is None else own.get("base_model")
    # the Hub takes names of its own alone
    if isinstance(base, list) or REPOSITORY.fullmatch(str(base or "")):
        header["base_model"] = base
    header["tags"] = list(dict.fromkeys([*map(str, own.get("tags") or ()), *TAGS]))
    folder = source.folder.resolve() if source.folder else None
    schemes = {e.scheme: parse(e.scheme) for e in result.exports if e.settings}
    longer = any(map(is_longer_table, schemes.values()))
    parts = [p for s in schemes.values() for layer in distinct_layers(s) for p in all_parts(layer)]
    lines = (run.summary if run else "").splitlines()
    kept = "\n".join(line for line in lines if not line.startswith("!["))
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
        measured=kept.strip().replace("\n## ", "\n### ") if run else None,
        exports=result.exports,
        fences=FENCES,
        version=__version__,
        verified=result.verified,
    )


def front_matter(file: Path) -> dict[str, Any]:
    """The YAML header of a card; empty if there is none that can be read."""
    try:
        return metadata_load(file) or {}
    except (OSError, ValueError, YAMLError):
        return {}
