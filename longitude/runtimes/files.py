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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from longitude.hf.source import SCHEME, as_user_error
from longitude.runtimes import recommended
from longitude.runtimes.card import card
from longitude.runtimes.checkpoint import TOKENIZER, Checkpoint, Model, read_json
from longitude.runtimes.export import Export, ExportRequest, PriorRun, exports, is_longer_table
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


@dataclass(frozen=True)
class Files:
    """The files of some exports in a folder."""

    checkpoint: Checkpoint
    exports: Sequence[Export]
    out: Path
    length: int
    weights: str = "link"
    run: PriorRun | None = None

    @property
    def gguf_file(self) -> Path:
        """The new GGUF file: the old one's name with the length behind it."""
        return self.out / f"{slug(self.checkpoint.model.name)}-{self.length}.gguf"

    def folder(self, export: Export) -> Path:
        """The folder of an export: its own, or that of an earlier one with the same config.json."""
        same = (e for e in self.exports if e.config is not None and e.config == export.config)
        first = next(same, export)
        return self.out if len(self.exports) == 1 else self.out / first.runtime.name

    def located(self) -> Files:
        """The same, with exports whose texts name the folder and the file to be written."""
        complete = [self.folder(e) for e in self.exports if e.runtime.write_any]
        found = []
        for export in self.exports:
            folder = self.folder(export) if export.config is not None else [*complete, self.out][0]
            found.append(filled(export, folder, self.gguf_file))
        return replace(self, exports=found)

    def write(self) -> list[Path]:
        """Write what was exported, but for the card of all; the paths of what is new."""
        text = card(self.checkpoint, [*self.exports, *self._servers()], self.length, self.run)
        written: list[Path] = []
        for export in (e for e in self.exports if e.settings):
            if export.config is not None:
                folder = self.folder(export)
                if folder not in written:
                    self._write_folder(export, folder, text)
                    written.append(folder)
                continue
            written.append(self._write_text(export.runtime.file, export.text or ""))
            source, target = self.checkpoint.source.gguf, export.target
            if export.runtime.writes == "gguf" and source and target:
                if self.gguf_file not in written:
                    export_gguf(source, self.gguf_file, target)
                    written.append(self.gguf_file)
        return written

    def write_card(self, proofs: Sequence[str] = ()) -> Path:
        """Write the card of all exports; `proofs` are sentences about what was verified."""
        text = card(self.checkpoint, self.exports, self.length, self.run, proofs)
        return self._write_text("README.md", text)

    def _servers(self) -> list[Export]:
        """How servers are started on the folder, for its card: if it is the only export."""
        one = self.exports[0]
        if len(self.exports) > 1 or not one.runtime.write_any or not one.target or not one.config:
            return []
        folder = Model(str(self.out), one.config, {"model_max_length": self.length})
        servers = [r for r in recommended() if r.writes == "command"]
        requests = [ExportRequest(r, one.request.scheme) for r in servers if r.reads != "gguf"]
        done = exports(replace(self.checkpoint, model=folder), requests, self.length)
        return [export for export in done if export.settings]

    def _write_text(self, name: str, text: str) -> Path:
        path = self.out / name
        try:
            with atomic_file(path) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            why = error.strerror or error
            raise UserError(
                f"{shown(str(path))} can't be written ({why}): name another folder."
            ) from error
        return path

    def _write_folder(self, export: Export, out: Path, card_text: str) -> None:
        """Write a checkpoint's folder again; its source is not changed."""
        if self.weights not in get_args(Weights):
            raise UserError(f"--weights is link, copy or none, but got {shown(self.weights)}.")
        out = out.expanduser().resolve()
        if out.is_file() or out == self.checkpoint.home.resolve():
            what = "a file" if out.is_file() else "the model's own folder"
            raise UserError(f"--out {shown(str(out))} is {what}: name another folder.")
        texts = {export.runtime.file: export.text or "", "README.md": card_text}
        try:
            with atomic_checkpoint(out) as part:
                home = self._fill(export, part)
                config = dict(export.config or {})
                if home == part:  # of a converted model only the rotation is new
                    own = read_json(part / "config.json")
                    config = {k: v for k, v in own.items() if k not in ROTATION} | {
                        k: v for k, v in config.items() if k in ROTATION
                    }
                self.write_settings(home, part, config, texts)
        except OSError as error:
            raise UserError(
                f"{shown(str(out))} can't be written ({error.strerror or error}): name another "
                f"folder or make room."
            ) from error

    def _fill(self, export: Export, part: Path) -> Path:
        """The checkpoint's files in the new folder; where the ones to rewrite are to be read."""
        source, conversion = self.checkpoint.source, self.checkpoint.needs_conversion
        scheme = parse(export.scheme)
        if conversion is not None:  # a GGUF file is dequantised, an adapter merged
            if self.weights == "none":
                raise UserError(
                    f"{conversion} has no folder whose weights could be left out: use --weights "
                    f"copy."
                )
            model, tokenizer = load(source.name, device="cpu", quiet=True)
            undo(model)  # the scheme is written by what is exported
            save(model, part, tokenizer)
            return part
        if is_longer_table(scheme):
            model, tokenizer = load(source.name, revision=source.revision, device="cpu", quiet=True)
            save(resize_positions(model, scheme, self.length), part, tokenizer)
            return part
        home = self._fetched()
        for file in sorted(home.iterdir()):
            index, to = file.name.endswith(".index.json"), part / file.name
            heavy = file.suffix in HEAVY or index
            if not file.is_file() or file.name in REWRITTEN:
                continue
            if heavy and self.weights == "link" and not index:
                to.symlink_to(file.resolve())  # in a cache: to the target of its own link
            elif self.weights != "none" if heavy else _is_small(file):
                shutil.copyfile(file, to)
        return home

    def _fetched(self) -> Path:
        """The folder of the checkpoint, downloaded if it is on the Hub."""
        source = self.checkpoint.source
        if source.folder is not None:
            return source.folder
        from huggingface_hub import snapshot_download

        small = [f"*{ending}" for ending in SMALL] + [f"{name}*" for name in LEGAL] + ["README.md"]
        heavy = [] if self.weights == "none" else [f"*{HEAVY[0]}"]
        with as_user_error(source, "files"):
            place, revision = source.place, source.revision
            return Path(snapshot_download(place, revision=revision, allow_patterns=small + heavy))

    def write_settings(
        self, home: Path, part: Path, config: Mapping[str, Any], texts: Mapping[str, str]
    ) -> None:
        """The files that limit an input's length, the texts, and config.json."""
        contents: dict[str, Mapping[str, Any]] = {}
        if tokenizer := read_json(home / TOKENIZER):
            contents[TOKENIZER] = tokenizer | {"model_max_length": self.length}
        if generation := read_json(home / "generation_config.json"):
            limit = {"max_length": self.length} if "max_length" in generation else {}
            contents["generation_config.json"] = generation | limit
        contents["config.json"] = config
        for name, text in texts.items():
            (part / name).write_text(text, encoding="utf-8")
        for name, entries in contents.items():
            text = json.dumps(dict(entries), indent=2, ensure_ascii=False) + "\n"
            (part / name).write_text(text, encoding="utf-8")


def _is_small(file: Path) -> bool:
    return file.suffix in SMALL or file.name.startswith(LEGAL)


def filled(export: Export, folder: Path | str, gguf_file: Path) -> Export:
    """An export whose text names the folder and the GGUF file that it is about."""
    if export.settings is None:
        return export
    text = export.settings.text.replace("{folder}", str(folder)).replace("{file}", str(gguf_file))
    text = text.replace("{name}", gguf_file.name)
    return replace(export, settings=replace(export.settings, text=text))
