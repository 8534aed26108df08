"""Training text: its sources, its split into train and test, training windows and test excerpts.

Text comes from files and folders, from a `datasets` dataset, or from Python's own standard library.
A document is a name and its bytes, unchanged except that UTF-16 and UTF-32 with a byte order mark
are converted to UTF-8. NUL terminates a document, so bytes that contain a NUL are not text; nor are
bytes that are not UTF-8. Names are relative to the folder that is read, wherever it is.

One document in ten is held out for tests, selected by a hash of its name alone: the split is the
same on every machine and in every order of reading. Training windows are cut from the joined
documents at offsets that depend on the seed and the step alone.
"""

from __future__ import annotations

import importlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from platform import python_version
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from torch import Tensor

from longitude.core.store import marked_encoding
from longitude.core.validate import UserError, short, shown
from longitude.training.distributed import generator

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BUILD_FILES = re.compile(r"config-.*|_sysconfigdata.*")  # they contain paths of one machine
TOPICS = "pydoc_data/topics"
DATASET = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]*))?(?::(.*))?")
END = b"\0"
ONE_IN = 10  # one document in so many is held out for tests


class Document(NamedTuple):
    """A text, and the name that assigns it to the training or the test documents."""

    name: str
    text: bytes


def standard_library() -> list[Document]:
    """Return the sources of the running Python's standard library and the pages of `help()`."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    names = [f.relative_to(root) for f in _files_below(root, SKIPPED) if f.suffix == ".py"]
    sources = [
        Document(name.as_posix(), _read(root / name))
        for name in names
        # build files differ between machines; each page of the topics is a document (below)
        if name.as_posix() != f"{TOPICS}.py" and not any(map(BUILD_FILES.fullmatch, name.parts))
    ]
    pages = [Document(f"{TOPICS}/{name}", page.encode()) for name, page in topics.items()]
    return [d for d in [*sources, *pages] if is_text(d.text)]


def read_documents(sources: Sequence[str] | None = None) -> list[Document]:
    """Read the documents of files, folders and datasets; by default, of the standard library."""
    if not sources:
        return standard_library()
    datasets = [source for source in sources if is_dataset(source)]
    files: dict[Path, Document] = {}  # a file that two sources contain counts once
    for source in sources:  # paths first: an error in one is raised before a download
        for file, document in [] if source in datasets else _from_path(source):
            files[file] = min(document, files.get(file, document))
    return [*files.values(), *(d for name in dict.fromkeys(datasets) for d in _from_dataset(name))]


def _from_path(source: str) -> list[tuple[Path, Document]]:
    """Read the documents of a file or folder; return each with its path."""
    path = Path(source).resolve()
    if path.is_dir():
        documents = [
            (file, Document(file.relative_to(path).as_posix(), text))
            for file in _files_below(path)
            if is_text(text := _read(file))
        ]
        if not documents:
            raise UserError(
                f"folder {shown(source)} holds no text: give one with UTF-8 files in it (hidden "
                f"files and links are skipped)."
            )
        return documents
    if not path.is_file():
        raise UserError(f"{shown(source)} is neither a file nor a folder: give one of them.")
    text = _read(path)
    if not is_text(text):
        fault = "is neither UTF-8 nor marked as UTF-16, or has a NUL in it" if text else "is empty"
        raise UserError(f"file {shown(source)} holds no text, it {fault}: give a text file.")
    return [(path, Document(path.name, text))]


def _from_dataset(source: str) -> list[Document]:
    """Read the rows of a `datasets` dataset, written owner/name, owner/name:config or
    owner/name:config:split, where the split may be a slice such as train[:1%]."""
    match = DATASET.fullmatch(source)
    assert match, "is_dataset has checked it"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise UserError(
            f"{shown(source)} is no file or folder, and the datasets library, needed to look it "
            f"up as a dataset, is not installed: correct the path, or `pip install datasets`."
        ) from None
    name, config, split = match.groups()
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the hub, the network and the dataset raise errors of many types
        raise UserError(
            f"{shown(source)} is neither a file or folder nor a dataset that could be loaded "
            f"({reason(error)}): write a path, or owner/name:config:split."
        ) from error
    types = {column: getattr(feature, "dtype", None) for column, feature in rows.features.items()}
    strings = [column for column, feature in types.items() if feature in ("string", "large_string")]
    if "text" not in strings and len(strings) != 1:
        raise UserError(
            f"dataset {shown(source)} has no column called text, but {shown([*rows.features])}: "
            f"use one that has, or write its text to a file."
        )
    column = "text" if "text" in strings else strings[0]
    texts = (text.encode() for text in rows[column] if text)
    documents = [Document(f"{n:012}", text) for n, text in enumerate(texts) if is_text(text)]
    if not documents:
        raise UserError(f"dataset {shown(source)} holds no text: name another split or config.")
    return documents


def is_dataset(source: str) -> bool:
    """Whether a source is no path but may name a dataset; raises if it can be neither."""
    try:
        Path(source).stat()
        if source:
            return False
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # no access to a parent, or a malformed path
        raise _unreadable(source, error) from None
    if not DATASET.fullmatch(source):
        raise UserError(
            f"there is no file or folder {shown(source)}: give a path that exists, or the name of "
            f"a dataset such as owner/name."
        )
    return True


def is_text(text: bytes) -> bool:
    """Whether these bytes can be a document: non-empty UTF-8 without a NUL."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and END not in text


def _files_below(root: Path, without: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield every regular file below a folder by name; hidden files and links are skipped."""

    def closed(error: OSError) -> None:
        raise _unreadable(str(error.filename), error)

    for folder, subfolders, files in os.walk(root, onerror=closed):
        subfolders[:] = sorted(n for n in subfolders if not n.startswith(".") and n not in without)
        for name in sorted(n for n in files if not n.startswith(".")):
            file = Path(folder, name)
            if stat.S_ISREG(file.lstat().st_mode):
                yield file


def _read(file: Path) -> bytes:
    """Read a file's bytes; UTF-16 and UTF-32 with a byte order mark are converted to UTF-8."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(str(file), error) from None
    with suppress(UnicodeError):  # undecodable bytes are returned unchanged; `is_text` rejects them
        if (encoding := marked_encoding(data)) not in (None, "utf-8"):
            return data.decode(str(encoding)).encode()
    return data


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{shown(path)} can't be read ({reason(error)}): give a path that you may read."
    )


def reason(error: Exception) -> str:
    """The first line of an error's message, without its full stop."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return short(text.strip().splitlines()[0], 120).rstrip(".")


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and to test on. `fingerprint` is a hash of all names and contents."""

    train: tuple[bytes, ...] = field(repr=False)
    test: tuple[bytes, ...] = field(repr=False)
    fingerprint: str
    name: str


def gather(sources: Sequence[str] | None = None) -> Corpus:
    """Build the corpus of files, folders or datasets; by default, of the standard library."""
    sources = [sources] if isinstance(sources, str) else sources
    documents = sorted(read_documents(sources))
    name = f"the standard library of Python {python_version()}"
    if sources:
        names = [s if is_dataset(s) else Path(s).resolve().name for s in sources]
        name = short(", ".join(names))
    train = tuple(d.text for d in documents if not for_test(d.name))
    test = tuple(d.text for d in documents if for_test(d.name))
    if not train or not test:  # too few to split by name: hold out the last tenth of the text
        joined = END.join(d.text for d in documents)
        cut = len(joined) * (ONE_IN - 1) // ONE_IN
        train, test = (tuple(filter(None, s.split(END))) for s in (joined[:cut], joined[cut:]))
    digest = sha256()
    for key, text in ((os.fsencode(d.name), d.text) for d in documents):
        digest.update(b"%d %d " % (len(key), len(text)) + key + text)
    return Corpus(train, test, digest.hexdigest(), name)


def for_test(name: str) -> bool:
    """Whether the document of this name is held out for tests; the same on every machine."""
    return int.from_bytes(sha256(os.fsencode(name)).digest()[:8], "big") % ONE_IN == 0


def join(documents: Sequence[bytes]) -> UInt8[Tensor, " n"]:
    """Join documents into one row of bytes, each terminated by a NUL."""
    return _bytes(b"".join(document + END for document in documents))


def _bytes(text: bytes) -> UInt8[Tensor, " n"]:
    return torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))


def windows(
    row: Int[Tensor, " n"], length: int, count: int, seed: int, step: int
) -> Int64[Tensor, "{count} window"]:
    """Draw the training windows of a step: `length` inputs, and one more token as last target."""
    if len(row) <= length:
        raise UserError(
            f"the training text has {len(row):,} tokens, but a window of {length:,} takes "
            f"{length + 1:,}: give more text or a shorter window."
        )
    starts = torch.randint(len(row) - length, (count,), generator=generator(seed, step, "windows"))
    return row.unfold(0, length + 1, 1)[starts].long()


def excerpts(
    corpus: Corpus, length: int, count: int, seed: int
) -> Int64[Tensor, "{count} {length}"]:
    """Draw excerpts of the test text: none overlap, each is within one document, and no document
    has a second one before all that are long enough have one. If documents are too short for that,
    draw one excerpt from each of `count` equal stretches of the joined text."""
    rng = generator(seed, purpose="excerpts")
    documents = [_bytes(document) for document in corpus.test if len(document) >= length]
    capacity = [len(document) // length for document in documents]
    if sum(capacity) >= count:
        pieces, quotas, remaining = [], [0] * len(capacity), count
        while remaining:  # in rounds over the documents, each up to its capacity
            for d in torch.randperm(len(capacity), generator=rng).tolist():
                if remaining and quotas[d] < capacity[d]:
                    quotas[d] += 1
                    remaining -= 1
        for document, n in zip(documents, quotas, strict=True):
            if n:  # random starts: the remaining bytes are split into gaps
                slack = len(document) - n * length
                gaps = torch.randint(slack + 1, (n,), generator=rng).sort().values
                starts = gaps + length * torch.arange(n)
                pieces.append(document.unfold(0, length, 1)[starts].long())
        return torch.cat(pieces)
    tokens = join(corpus.test)
    start_count = len(tokens) - length + 1
    if start_count < 1:
        raise UserError(
            f"the test text has {len(tokens)} bytes, but an excerpt takes {length}: "
            f"give more text or a shorter length."
        )
    stretches = torch.arange(count) + torch.rand(count, generator=rng, dtype=torch.float64)
    return tokens.unfold(0, length, 1)[(stretches * start_count / count).long()].long()
