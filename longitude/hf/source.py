"""Locates a checkpoint: a folder, a GGUF file, one bundled with the package, or a Hub name.

Errors of transformers and of the libraries below it are reworded as one sentence each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longitude.core.store import read_json
from longitude.core.validate import UserError, short
from longitude.hf.peft import ADAPTER_JSON, Adapter, read_adapter

ASSETS = Path(__file__).parents[1] / "assets"
SCHEME = "longitude"  # the entry of config.json that saving.py writes
TINY = ("tiny-rope", "tiny-alibi", "tiny-learned")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")
HUB_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class Source:
    """A checkpoint; `place` is the path or Hub name to pass to transformers. All fields of an
    adapter but `name` and `adapter` are those of its base."""

    name: str
    place: str
    gguf: Path | None = None
    revision: str | None = None
    adapter: Adapter | None = None

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder, or None if it is on the Hub."""
        return Path(self.place) if self.gguf or Path(self.place).is_dir() else None

    @property
    def where(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained` call, besides `place`."""
        file = {"gguf_file": self.gguf.name} if self.gguf else {}
        return file | ({"revision": self.revision} if self.revision else {})


def find(name: str | os.PathLike[str], revision: str | None, base: str | None = None) -> Source:
    """Return the checkpoint of this name, or raise if there can be none. `base` says where an
    adapter's base is, if it was moved."""
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text in TINY:
        source = Source(text, str(ASSETS / text))
    elif path.is_file():
        if path.suffix in WEIGHTS:
            raise UserError(f"{path} is one file of a checkpoint: give the folder it is in.")
        if path.suffix != ".gguf" and _first_bytes(path) != b"GGUF":
            raise UserError(f"{path} is no model: give a folder or a .gguf file.")
        source = Source(text, str(path.parent), path)
    elif (path / ADAPTER_JSON).is_file() and not (path / "config.json").is_file():
        source = _find_base(text, read_adapter(path, base))
    elif path.is_dir():
        _check_folder(path)
        source = Source(text, str(path))
    elif HUB_NAME.fullmatch(text) and path.suffix not in (".gguf", *WEIGHTS) and text[0] != ".":
        source = Source(text, text, revision=revision)
    else:
        raise UserError(
            f"there is no file or folder {short(text)!r}: give a folder, a .gguf file, a name on "
            f"the Hub (owner/name) or one of {', '.join(TINY)}."
        )
    if base is not None and source.adapter is None:
        raise UserError(f"{short(text)} is no adapter, and has no base: leave {short(base)} out.")
    if revision and (source.folder or source.adapter):
        raise UserError(
            f"revision {revision} was given, but {short(text)} is on this disk, which has one "
            f"only: leave it out."
        )
    return source


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): name another.") from error


def _find_base(text: str, adapter: Adapter) -> Source:
    """Return an adapter's base as a `Source` with the adapter's name."""
    try:
        base = find(adapter.base, adapter.revision)
    except UserError as error:
        raise UserError(f"{text} is an adapter, and its base can't be found: {error}") from error
    if base.adapter is not None:
        raise UserError(
            f"{text} is an adapter of the adapter {adapter.base}: merge that one first."
        )
    return replace(base, name=text, adapter=adapter)


def _check_folder(path: Path) -> None:
    if (path / "hf" / "config.json").is_file():  # the output of `longitude train`
        raise UserError(f"{path} is no model's folder: give {path / 'hf'}, which is in it.")
    if (path / "config.json").is_file():
        return
    if (path / "model").is_dir():  # the output of `longitude tune`
        raise UserError(f"{path} is no model's folder: give {path / 'model'}, which is in it.")
    files = sorted(path.glob("*.gguf"))
    hint = f"give the file {files[0].name} in it" if files else "give one that transformers saved"
    raise UserError(f"{path} is no model's folder, for it has no config.json: {hint}.")


def raw_config(source: Source) -> tuple[Path, dict[str, Any]]:
    """Return the path and content of a checkpoint's config.json, in a folder or on the Hub. For an
    adapter it is its base's, with the adapter's scheme in place of the base's."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from transformers.utils.hub import cached_file

    if source.folder:
        file = source.folder / "config.json"
    else:
        with as_user_error(source, "config.json"):
            if not _cached(source, "config.json"):
                # fails at once if the Hub is unreachable; a download would be retried five times
                url = hf_hub_url(source.place, "config.json", revision=source.revision)
                get_hf_file_metadata(url, timeout=HUB_TIMEOUT)
            file = Path(cached_file(source.place, "config.json", **source.where) or "")
    raw = read_json(file)
    if source.adapter is None or source.adapter.entry is None:
        return file, raw
    base_entry = raw.get(SCHEME) or {}  # the base may have been saved under a scheme of its own
    kept = {k: v for k, v in base_entry.items() if k == "rope_parameters"}
    return file, {**raw, SCHEME: {**kept, **source.adapter.entry}}


def _cached(source: Source, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(source.place, file, revision=source.revision), str)


def has_one_of(source: Source, files: Sequence[str]) -> bool:
    """Whether a checkpoint has any of these files, in its folder or on the Hub."""
    from huggingface_hub import file_exists

    if source.folder:
        return any((source.folder / file).is_file() for file in files)
    if any(_cached(source, file) for file in files):
        return True
    try:
        return any(file_exists(source.place, file, revision=source.revision) for file in files)
    except Exception:  # of many types: offline, unreachable, refused
        return False


@contextmanager
def as_user_error(source: Source, what: str) -> Iterator[None]:
    """Re-raise errors of transformers and the libraries below it as a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_sentence(source, what, error)) from error


def _sentence(source: Source, what: str, error: Exception) -> str:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and isinstance(cause, Exception):
        chain.append(cause)
    kinds = {kind.__name__ for exception in chain for kind in type(exception).__mro__}
    name = source.name
    if "SafetensorError" in kinds:
        return f"{name}: a .safetensors file is cut short or damaged: fetch it again."
    if "OutOfMemoryError" in kinds or "MemoryError" in kinds:
        return f"{name} does not fit into memory: use another device or a smaller dtype."
    hub = None if source.folder else _hub_sentence(source, what, kinds)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = short(lines[0] if lines else "", 160).rstrip(".:") or type(error).__name__
    return hub or f"{name}: transformers can't read its {what} ({reason}): check that it is whole."


def _hub_sentence(source: Source, what: str, kinds: set[str]) -> str | None:
    """The message for a Hub error, chosen by exception class names; None for any other error."""
    from huggingface_hub.constants import is_offline_mode

    name, at = source.name, f" at revision {source.revision}" if source.revision else ""
    if "GatedRepoError" in kinds:
        return f"{name} is gated: accept its terms on the Hub and run `hf auth login`."
    if "RepositoryNotFoundError" in kinds:
        return f"nothing on the Hub is called {name}: correct it, or `hf auth login` if private."
    if "RevisionNotFoundError" in kinds:
        return f"{name} has no revision {source.revision}: correct it or leave it out."
    if is_offline_mode():
        return (
            f"{name} is no folder, and its {what}{at} is not in the Hub's cache while "
            "HF_HUB_OFFLINE is set: fetch it once without, or give a folder."
        )
    if kinds & {"LocalEntryNotFoundError", "TransportError", "ConnectionError"}:
        return f"{name} is no folder, and the Hub can't be reached: give a folder, or go online."
    return None
