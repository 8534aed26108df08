"""Atomic writes: a file or a checkpoint folder is either complete or absent.

Both are written under a hidden name beside their destination and moved there at the end: a kill, an
error or a full disk leaves the old version, or none. Leftovers of a killed folder write are removed
by the next one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG, ADAPTER = "config.json", "adapter_config.json"
STALE = (CONFIG, ADAPTER, "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, moved to `path` if the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_checkpoint(folder: Path) -> Iterator[Path]:
    """A temporary folder for a model's files, moved to `folder` if the block ends without an error,
    config.json (or an adapter's) last: a folder that has it has everything."""
    folder = folder.resolve()
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        folder.mkdir(exist_ok=True)
        # an old config.json does not fit new weights; one old weight file would shadow new shards
        for file in (old for pattern in STALE for old in folder.glob(pattern)):
            file.unlink()
        for file in sorted(part.iterdir(), key=lambda file: file.name in (CONFIG, ADAPTER)):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
