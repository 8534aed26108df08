"""The files of an export: checkpoint folders, a new GGUF file, commands as scripts, a model card.

With one runtime everything lies in the folder itself; with several, each that needs a folder has
one inside, and folders with the same config.json are one. In a folder the small files are copied,
the weights linked, copied or left out; the lengths that tokenizer and generation may reach are
raised. Files appear complete, config.json last: a folder that has it has everything.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from longitude.core.atomic_io import atomic_checkpoint, atomic_file
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.families.learned import resize_positions
from longitude.hf.loading import load
from longitude.hf.patch import undo
from longitude.hf.rope_config import ORIGINAL
from longitude.hf.saving import save
from longitude.hf.source import SCHEME, Source, as_user_error
from longitude.runtimes import recommended
from longitude.runtimes.card import card
from longitude.runtimes.checkpoint import TOKENIZER, read_json
from longitude.runtimes.export import Export, ExportResult, complete, exports, is_longer_table
from longitude.runtimes.gguf import export_gguf

Weights = Literal["link", "copy", "none"]
HEAVY = (".safetensors", ".bin")
SMALL = (".json", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".vocab", ".bpe")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
LENGTH = "max_position_embeddings"
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", ORIGINAL, LENGTH, SCHEME)
REWRITTEN = ("config.json", TOKENIZER, "generation_config.json", "README.md")


def slug(name: str) -> str:
    """A model's name as a file's."""
    last = name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def write_files(result: ExportResult, out: Path, weights: str = "link") -> ExportResult:
    """Write what was exported, but for the card of all. Of what is returned the texts name the new
    folders and files, and `written` are the paths of what is new."""
    result, folders, gguf_file = _located(result, out)
    text = card(replace(result, exports=(*result.exports, *_servers(result, out))))
    written: list[Path] = []
    for export, folder in zip(result.exports, folders, strict=True):
        if export.config is not None:
            if folder not in written:
                _write_folder(result, export, folder, weights, text)
                written.append(folder)
        elif export.settings is not None:
            written.append(write_text(out / export.runtime.file, export.settings.text))
            source, target = result.checkpoint.source.gguf, export.target
            if export.runtime.writes == "gguf" and source and target and gguf_file not in written:
                export_gguf(source, gguf_file, target)
                written.append(gguf_file)
    return replace(result, written=tuple(written))


def _located(result: ExportResult, out: Path) -> tuple[ExportResult, list[Path], Path]:
    """The result with texts that name folders and files, the folder of each export (its own, or
    that of an earlier one with the same config.json), and the new GGUF file."""
    gguf_file = out / f"{slug(result.checkpoint.name)}-{result.target}.gguf"
    folders = []
    for export in result.exports:
        same = (e for e in result.exports if e.config is not None and e.content == export.content)
        name = next(same, export).runtime.name
        folders.append(out if len(result.exports) == 1 else out / name)
    placed = list(zip(result.exports, folders, strict=True))
    complete = next((f for export, f in placed if export.runtime.writes == "folder"), out)
    done = [
        filled(export, complete if export.config is None else folder, gguf_file)
        for export, folder in placed
    ]
    return replace(result, exports=tuple(done)), folders, gguf_file


def started_on(result: ExportResult, out: Path) -> list[str]:
    """What each runtime is started on: its folder or file in `out`, or the model as it is."""
    result, folders, gguf_file = _located(result, out)
    whole = [f for e, f in zip(result.exports, folders, strict=True) if e.runtime == complete()]
    model = result.checkpoint.source.folder or result.checkpoint.name
    given = whole[0] if result.checkpoint.needs_conversion and whole else model
    return [
        str(folder if e.config is not None else gguf_file if e.runtime.writes == "gguf" else given)
        for e, folder in zip(result.exports, folders, strict=True)
    ]


def filled(export: Export, folder: Path | str, gguf_file: Path) -> Export:
    """An export whose text names the folder and the GGUF file that it is about."""
    if export.settings is None:
        return export
    text = export.settings.text.replace("{folder}", str(folder)).replace("{file}", str(gguf_file))
    text = text.replace("{name}", gguf_file.name)
    return replace(export, settings=replace(export.settings, text=text))


def _servers(result: ExportResult, out: Path) -> list[Export]:
    """How servers are started on the folder, for its card: if it is the only export."""
    one = result.exports[0]
    if len(result.exports) > 1 or not one.runtime.write_any or not one.target or not one.config:
        return []
    settings = {"config": one.config, "tokenizer": {"model_max_length": result.target}}
    folder = replace(result.checkpoint, name=str(out), header=None, **settings)
    servers = [r for r in recommended() if r.writes == "command" and r.reads != "gguf"]
    done = exports(folder, [Export(r, one.requested) for r in servers], result.target)
    return [export for export in done if export.settings]


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
    if weights not in get_args(Weights):
        raise UserError(f"--weights is link, copy or none, but got {shown(weights)}.")
    out = out.expanduser().resolve()
    if out.is_file() or out == result.checkpoint.home.resolve():
        what = "a file" if out.is_file() else "the model's own folder"
        raise UserError(f"--out {shown(str(out))} is {what}: name another folder.")
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
    home = _fetched(source, weights)
    for file in sorted(home.iterdir()):
        index, to = file.name.endswith(".index.json"), part / file.name
        heavy = file.suffix in HEAVY or index
        if not file.is_file() or file.name in REWRITTEN:
            continue
        small = file.suffix in SMALL or file.name.startswith(LEGAL)
        if heavy and weights == "link" and not index:
            to.symlink_to(file.resolve())  # in a cache: to the target of its own link
        elif weights != "none" if heavy else small:
            shutil.copyfile(file, to)
    return home


def _fetched(source: Source, weights: str) -> Path:
    """The folder of the checkpoint, downloaded if it is on the Hub."""
    if source.folder is not None:
        return source.folder
    from huggingface_hub import snapshot_download

    small = [f"*{ending}" for ending in SMALL] + [f"{name}*" for name in LEGAL] + ["README.md"]
    files = small if weights == "none" else [*small, f"*{HEAVY[0]}"]
    with as_user_error(source, "files"):
        return Path(snapshot_download(source.place, revision=source.revision, allow_patterns=files))


def write_settings(
    home: Path, part: Path, length: int, config: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    """The files that limit an input's length, the texts, and config.json."""
    contents: dict[str, Mapping[str, Any]] = {}
    if tokenizer := read_json(home / TOKENIZER):
        contents[TOKENIZER] = tokenizer | {"model_max_length": length}
    if generation := read_json(home / "generation_config.json"):
        limit = {"max_length": length} if "max_length" in generation else {}
        contents["generation_config.json"] = generation | limit
    contents["config.json"] = config
    written = {k: json.dumps(dict(v), indent=2, ensure_ascii=False) for k, v in contents.items()}
    for name, text in {**texts, **{k: f"{v}\n" for k, v in written.items()}}.items():
        (part / name).write_text(text, encoding="utf-8")
