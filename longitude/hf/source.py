"""Where a checkpoint is: a folder, a GGUF file, one of the package's own, or a name on the Hub.

Everything that can be wrong with it is said here or in load.py in one sentence: transformers and
the libraries below it answer with pages, or with something random.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError, short
from longitude.hf.peft import Adapter, is_adapter, read_adapter

ASSETS = Path(__file__).parents[1] / "assets"
SCHEME = "longitude"  # the entry of config.json that save.py writes
TINY = ("tiny-rope", "tiny-alibi", "tiny-learned")
HUB = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")


@dataclass(frozen=True)
class Source:
    """A checkpoint that was asked for: `place` is what transformers is told. Where an adapter was
    asked for, everything but its name is its base's."""

    name: str
    place: str
    gguf: Path | None = None
    revision: str | None = None
    adapter: Adapter | None = None

    @property
    def folder(self) -> Path | None:
        """Its folder, unless it is on the Hub."""
        return Path(self.place) if self.gguf or Path(self.place).is_dir() else None

    @property
    def where(self) -> dict[str, Any]:
        """What every `from_pretrained` takes besides the place."""
        file = {"gguf_file": self.gguf.name} if self.gguf else {}
        return file | ({"revision": self.revision} if self.revision else {})


def find(name: str | os.PathLike[str], revision: str | None, base: str | None = None) -> Source:
    """The checkpoint of this name; raises unless it can be one. `base` is an adapter's, if it was
    moved."""
    text = os.fspath(name)
    source = _found(text, revision, base)
    if base is not None and source.adapter is None:
        raise UserError(f"{short(text)} is no adapter, and has no base: leave {short(base)} out.")
    if revision and (source.folder or source.adapter):
        raise UserError(
            f"revision {revision} was asked for, but {short(text)} is on this disk, where there is "
            "one: leave it out."
        )
    return source


def _found(text: str, revision: str | None, base: str | None) -> Source:
    if text in TINY:
        return Source(text, str(ASSETS / text))
    path = Path(text).expanduser()
    if path.is_file():
        return Source(text, str(path.parent), _gguf(path))
    if path.is_dir() and is_adapter(path):
        return _adapted(text, read_adapter(path, base))
    if path.is_dir():
        _check_folder(path)
        return Source(text, str(path))
    if not HUB.fullmatch(text) or path.suffix in (".gguf", *WEIGHTS) or text[0] == ".":
        raise UserError(
            f"there is no file or folder {short(text)!r}: give a folder, a .gguf file, a name on "
            f"the Hub (owner/name) or one of {', '.join(TINY)}."
        )
    return Source(text, text, revision=revision)


def _adapted(text: str, adapter: Adapter) -> Source:
    """An adapter's base, under the adapter's name."""
    try:
        base = find(adapter.base, adapter.revision)
    except UserError as mistake:
        raise UserError(
            f"{text} is an adapter, and its base can't be found: {mistake}"
        ) from mistake
    if base.adapter is not None:
        raise UserError(
            f"{text} is an adapter of the adapter {adapter.base}: merge that one first."
        )
    return replace(base, name=text, adapter=adapter)


def _gguf(path: Path) -> Path:
    if path.suffix in WEIGHTS:
        raise UserError(f"{path} is one file of a checkpoint: give the folder it lies in.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" and path.suffix != ".gguf":
            raise UserError(f"{path} is no model: give a folder or a .gguf file.")
    return path


def _check_folder(path: Path) -> None:
    if (path / "config.json").is_file():
        return
    if (path / "model").is_dir():  # a run of tune's
        raise UserError(f"{path} is no model's folder: give {path / 'model'}, which lies in it.")
    files = sorted(path.glob("*.gguf"))
    hint = f"give the file {files[0].name} in it" if files else "give one that transformers saved"
    raise UserError(f"{path} is no model's folder, for it has no config.json: {hint}.")


def raw_config(source: Source) -> tuple[Path, dict[str, Any]]:
    """The config.json of a folder or a name on the Hub: where it is, and what it says; of an
    adapter its base's, with the adapter's scheme for the base's."""
    from transformers.utils.hub import cached_file

    held = source.folder
    with as_user_error(source, "config.json"):
        found = held / "config.json" if held else None
        file = Path(found or cached_file(source.place, "config.json", **source.where) or "")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{source.name}: config.json is no JSON: write it anew.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{source.name}: config.json should hold an object: write it anew.")
    return file, raw if source.adapter is None else _with_scheme(raw, source.adapter)


def _with_scheme(raw: dict[str, Any], adapter: Adapter) -> dict[str, Any]:
    """A base's config.json with what an adapter says of positions."""
    if adapter.entry is None:
        return raw
    before = raw.get(SCHEME) or {}  # the base may have been saved under a scheme of its own
    kept = {k: v for k, v in before.items() if k == "rope_parameters"}
    return {**raw, SCHEME: {**kept, **adapter.entry}}


def has_one_of(source: Source, files: Iterable[str]) -> bool:
    """Whether a checkpoint has any of these files, in its folder or on the Hub."""
    folder = source.folder
    return any((folder / file).is_file() if folder else _on_hub(source, file) for file in files)


def _on_hub(source: Source, file: str) -> bool:
    from transformers.utils.hub import cached_file

    try:
        return cached_file(source.place, file, **source.where) is not None
    except OSError:
        return False


@contextmanager
def as_user_error(source: Source, what: str) -> Iterator[None]:
    """Errors of transformers, and of what lies below it, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_sentence(source, what, error)) from error


def _sentence(source: Source, what: str, error: Exception) -> str:
    from huggingface_hub.constants import is_offline_mode

    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) and isinstance(below, Exception):
        chain.append(below)
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    name, at = source.name, f" at revision {source.revision}" if source.revision else ""
    if "SafetensorError" in kinds:
        return f"{name}: a .safetensors file is cut short or damaged: fetch it again."
    if "OutOfMemoryError" in kinds or "MemoryError" in kinds:
        return f"{name} does not fit into memory: use another device or a smaller dtype."
    if source.folder is None:
        if "GatedRepoError" in kinds:
            return f"{name} is gated: accept its terms on the Hub and run `hf auth login`."
        if "RepositoryNotFoundError" in kinds:
            return (
                f"nothing on the Hub is called {name}: correct it, or `hf auth login` if private."
            )
        if "RevisionNotFoundError" in kinds:
            return f"{name} has no revision {source.revision}: correct it or leave it out."
        if is_offline_mode():
            return (
                f"{name} is no folder, and its {what}{at} is not in the Hub's cache while "
                "HF_HUB_OFFLINE is set: fetch it once without, or give a folder."
            )
        if "LocalEntryNotFoundError" in kinds:
            return (
                f"{name} is no folder, and the Hub can't be reached: give a folder, or go online."
            )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = short(lines[0] if lines else "", 160).rstrip(".:") or type(error).__name__
    return f"{name}: transformers can't read its {what} ({said}): check that it is whole."
