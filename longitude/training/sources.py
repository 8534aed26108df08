"""Where the lab's text is read from: the standard library, files and folders, or a dataset.

A document is a name and its bytes, taken as they are. NUL ends a document in the lab's stream, so
what holds one is no text; nor is what is not UTF-8. Names don't depend on where a folder stands.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from longitude.core.validate import UserError, short, shown

ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MADE_BY_THE_BUILD = re.compile(r"config-.*|_sysconfigdata.*")  # they hold one machine's paths
TOPICS = "pydoc_data/topics"
DATASET = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]*))?(?::(.*))?")


class Document(NamedTuple):
    """A text and the name that decides on which side of the split it falls."""

    name: str
    text: bytes


def standard_library() -> list[Document]:
    """The sources of the running Python's own modules, and the pages that `help()` shows."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in _below(root, ELSEWHERE) if f.suffix == ".py" and _own(f.relative_to(root))]
    sources = [Document(f.relative_to(root).as_posix(), _read(f)) for f in files]
    pages = [Document(f"{TOPICS}/{name}", page.encode()) for name, page in topics.items()]
    return [d for d in [*sources, *pages] if is_text(d.text)]


def from_paths(paths: Sequence[str]) -> list[Document]:
    """The documents of files and folders; a file that is met twice counts once."""
    found: dict[Path, Document] = {}
    for path in paths:
        for file, document in _documents(path):
            found[file] = min(document, found.get(file, document))
    return list(found.values())


def from_dataset(written: str) -> list[Document]:
    """The rows of a `datasets` dataset, written owner/name, owner/name:config or
    owner/name:config:split, where the split may be a slice such as train[:1%]."""
    match = DATASET.fullmatch(written)
    assert match, "is_dataset has said so"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError(
            f"{shown(written)} is no file or folder, and the datasets library that could know it "
            f"as a dataset is not installed: correct the path, or `pip install datasets`."
        ) from None
    name, config, split = match.groups()
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the hub, the network and the dataset each raise their own
        raise UserError(
            f"{shown(written)} is neither a file or folder nor a dataset that could be loaded "
            f"({_reason(error)}): write a path, or owner/name:config:split."
        ) from error
    texts = (text.encode() for text in rows[_text_column(written, rows)] if text)
    found = [Document(f"{n:012}", text) for n, text in enumerate(texts) if is_text(text)]
    if not found:
        raise UserError(f"dataset {shown(written)} holds no text: name another split or config.")
    return found


def is_dataset(source: str) -> bool:
    """Whether a source can only be a dataset's name; raises where it is nothing at all."""
    try:
        Path(source).stat()
        there = bool(source)
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except (OSError, ValueError) as error:  # a folder above is closed, or no path looks like this
        raise _unreadable(source, error) from None
    if there or DATASET.fullmatch(source):
        return not there
    raise UserError(
        f"there is no file or folder {shown(source)}: give a path that exists, or the name of a "
        f"dataset such as owner/name."
    )


def is_text(text: bytes) -> bool:
    """Whether these bytes can be a document: some UTF-8 without a NUL."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and b"\0" not in text


def _documents(source: str) -> Iterator[tuple[Path, Document]]:
    """What stands at a path, with its place: a file that must be text, or a folder's text files."""
    path = Path(source).resolve()
    if not path.is_dir():
        yield path, Document(path.name, _text_of(path, source))
        return
    texts = [(file, _read(file)) for file in _below(path)]
    texts = [(file, text) for file, text in texts if is_text(text)]
    if not texts:
        raise UserError(
            f"folder {shown(source)} holds no text: give one with UTF-8 files in it "
            f"(hidden files and links are passed over)."
        )
    for file, text in texts:
        yield file, Document(file.relative_to(path).as_posix(), text)


def _below(root: Path, without: Set[str] = frozenset()) -> Iterator[Path]:
    """Every plain file below a folder, by name; nothing hidden, and no link is followed."""

    def closed(error: OSError) -> None:
        raise _unreadable(str(error.filename), error)

    for folder, inside, files in os.walk(root, onerror=closed):
        inside[:] = sorted(n for n in inside if not n.startswith(".") and n not in without)
        for name in sorted(n for n in files if not n.startswith(".")):
            file = Path(folder, name)
            if stat.S_ISREG(file.lstat().st_mode):
                yield file


def _own(file: Path) -> bool:
    """Whether a source says the same on every machine; the topics count page by page instead."""
    built = any(MADE_BY_THE_BUILD.fullmatch(part) for part in file.parts)
    return not built and file.as_posix() != f"{TOPICS}.py"


def _text_of(path: Path, source: str) -> bytes:
    if not path.is_file():
        raise UserError(f"{shown(source)} is neither a file nor a folder: give one of them.")
    text = _read(path)
    if not is_text(text):
        fault = "is not UTF-8 or has a NUL in it" if text else "is empty"
        raise UserError(f"file {shown(source)} holds no text, it {fault}: give a text file.")
    return text


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(str(file), error) from None


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{shown(path)} can't be read ({_reason(error)}): give a path that you may read."
    )


def _reason(error: Exception) -> str:
    """The first line of what an error says, without its full stop."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return short(said.splitlines()[0], 120).rstrip(".")


def _text_column(written: str, rows: Any) -> str:
    """The column named text, or else the only one that holds strings."""
    kinds = {column: getattr(kind, "dtype", None) for column, kind in rows.features.items()}
    strings = [column for column, kind in kinds.items() if kind in ("string", "large_string")]
    if "text" in strings or len(strings) == 1:
        return "text" if "text" in strings else strings[0]
    raise UserError(
        f"dataset {shown(written)} has no column called text, but {shown([*rows.features])}: "
        f"use one that has, or write its text to a file."
    )
