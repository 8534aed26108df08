"""Files and folders that appear whole or not at all.

They are written under a hidden name beside their place and moved there when all went well: a kill,
an error or a full disk leaves the old one, or none. What a kill leaves of a folder, the next call
takes away.
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
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file; it takes its place when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_checkpoint(folder: Path) -> Iterator[Path]:
    """Where to write a model's folder; its files take their places when the block ends without an
    error, config.json (or an adapter's) last: a folder that has it has everything."""
    folder = folder.resolve()
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        folder.mkdir(exist_ok=True)
        # an old config.json does not fit new weights; one old file is read before many new ones
        for file in (old for pattern in STALE for old in folder.glob(pattern)):
            file.unlink()
        for file in sorted(part.iterdir(), key=lambda file: file.name in (CONFIG, ADAPTER)):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
