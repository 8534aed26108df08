"""A checkpoint's folder with another config.json: for transformers and what else reads folders.

The small files are copied, the weights linked, copied or left out; the lengths that a tokenizer and
a generation may reach are raised. Files appear whole and config.json last: a folder that has it has
everything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from longitude.core.atomic_io import atomic_checkpoint
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.families.learned import resize_positions
from longitude.hf.loading import load
from longitude.hf.patch import undo
from longitude.hf.rope_config import ORIGINAL
from longitude.hf.saving import save
from longitude.hf.source import SCHEME, as_user_error
from longitude.runtimes.checkpoint import Opened, held
from longitude.runtimes.settings import TOKENIZER

Weights = Literal["link", "copy", "none"]
HEAVY = (".safetensors", ".bin")
SMALL = (".json", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".vocab", ".bpe")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
TURNS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    ORIGINAL,
    "max_position_embeddings",
    SCHEME,
)
OURS = ("config.json", TOKENIZER, "generation_config.json", "README.md")


@dataclass(frozen=True)
class Contents:
    """What is written beside the checkpoint's own files."""

    config: Mapping[str, Any]
    target: int
    card: str
    more: Mapping[str, str] = field(default_factory=dict)  # files by name
    table: str | None = None  # the scheme by which learned positions are written out longer


def write_folder(opened: Opened, out: Path, contents: Contents, weights: str = "link") -> None:
    """Write a checkpoint's folder anew; what it was made from stays as it is."""
    if weights not in get_args(Weights):
        raise UserError(f"--weights is link, copy or none, but got {shown(weights)}.")
    out = out.expanduser().resolve()
    if out.is_file() or out == opened.home.resolve():
        what = "a file" if out.is_file() else "the model's own folder"
        raise UserError(f"--out {shown(str(out))} is {what}: name another folder.")
    try:
        with atomic_checkpoint(out) as part:
            home = _fill(opened, part, contents, weights)
            _settings(home, part, contents)
    except OSError as error:
        raise UserError(
            f"{shown(str(out))} can't be written ({error.strerror or error}): name another folder "
            f"or make room."
        ) from error


def _fill(opened: Opened, part: Path, contents: Contents, weights: str) -> Path:
    """The files of the checkpoint, in the new folder; where the ones to rewrite are to be read."""
    if opened.apart is not None:
        return _converted(opened, part, weights)
    if contents.table is not None:
        return _grown(opened, part, contents.table, contents.target)
    home = _fetched(opened, weights)
    for file in sorted(home.iterdir()):
        if file.is_file() and file.name not in OURS:
            _take(file, part / file.name, weights)
    return home


def _converted(opened: Opened, part: Path, weights: str) -> Path:
    """The folder of a GGUF file's model, its weights dequantised; of an adapter's, merged."""
    if weights == "none":
        raise UserError(
            f"{opened.apart} has no folder whose weights could be left out: use --weights copy."
        )
    model, tokenizer = load(opened.source.name, device="cpu", quiet=True)
    undo(model)  # the scheme is written by what is exported
    save(model, part, tokenizer)
    return part


def _grown(opened: Opened, part: Path, scheme: str, target: int) -> Path:
    """The folder of a model whose table of positions is written out longer."""
    source = opened.source
    model, tokenizer = load(source.name, revision=source.revision, device="cpu", quiet=True)
    save(resize_positions(model, parse(scheme), target), part, tokenizer)
    return part


def _fetched(opened: Opened, weights: str) -> Path:
    """The folder of the checkpoint, from the Hub where it lies there."""
    if opened.source.folder is not None:
        return opened.source.folder
    from huggingface_hub import snapshot_download

    small = [f"*{ending}" for ending in SMALL] + [f"{name}*" for name in LEGAL] + ["README.md"]
    heavy = [] if weights == "none" else [f"*{ending}" for ending in HEAVY[:1]]
    with as_user_error(opened.source, "files"):
        found = snapshot_download(
            opened.source.place, revision=opened.source.revision, allow_patterns=small + heavy
        )
    return Path(found)


def _take(file: Path, to: Path, weights: str) -> None:
    index = file.name.endswith(".index.json")
    if file.suffix in HEAVY or index:
        if weights == "link" and not index:
            to.symlink_to(file.resolve())  # of a cache, to what its own link leads to
        elif weights != "none":
            shutil.copyfile(file, to)
    elif file.suffix in SMALL or file.name.startswith(LEGAL):
        shutil.copyfile(file, to)


def _settings(home: Path, part: Path, contents: Contents) -> None:
    """The files that say how long an input may be, the card, and config.json."""
    tokenizer = held(home / TOKENIZER)
    if tokenizer:
        _write(part / TOKENIZER, tokenizer | {"model_max_length": contents.target})
    generation = held(home / "generation_config.json")
    if generation:
        limit = {"max_length": contents.target} if "max_length" in generation else {}
        _write(part / "generation_config.json", generation | limit)
    for name, text in {**contents.more, "README.md": contents.card}.items():
        (part / name).write_text(text, encoding="utf-8")
    _write(part / "config.json", _config(home, part, contents.config))


def _config(home: Path, part: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config.json; of a GGUF file's model only what turns it is new."""
    if home != part:
        return dict(config)
    saved = {k: v for k, v in held(part / "config.json").items() if k not in TURNS}
    return saved | {k: v for k, v in config.items() if k in TURNS}


def _write(file: Path, entries: Mapping[str, Any]) -> None:
    text = json.dumps(dict(entries), indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
