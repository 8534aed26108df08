"""Time to export a GGUF file, against `shutil.copyfile` in the same process, and to read its
header, against the `gguf` package's reader.

    python -m benchmarks.gguf [FILE.gguf] [--gigabytes 2]

Without a file, one of `--gigabytes` with random weights is written and used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gguf
import numpy as np

from longitude.hf.gguf_reader import read_layout
from longitude.hf.gguf_writer import rewrite

PIECE = 2**26  # weights of one tensor
ROUNDS = 5


def made_up(path: Path, gigabytes: float) -> Path:
    """Write a file of random float16 weights with a vocabulary of 50,000."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(8192)
    writer.add_token_list([f"token{n}" for n in range(50_000)])
    weights = rng.standard_normal(PIECE, dtype=np.float32).astype(np.float16)
    for n in range(max(1, round(gigabytes * 1e9 / weights.nbytes))):
        writer.add_tensor(f"blk.{n}.attn_q.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seconds(call: Callable[[], object], target: Path) -> float:
    """Time one call, after pending disk writes are flushed."""
    target.unlink(missing_ok=True)
    os.sync()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(source: Path, folder: Path) -> tuple[float, float, float]:
    """Return the median seconds of copying, exporting and reading the header, interleaved."""
    target, rows = folder / "out.gguf", []
    keys, divisors = {"llama.context_length": 32768}, {"rope_freqs.weight": [2.0] * 32}

    def export() -> None:
        rewrite(read_layout(source), target, keys, divisors)

    calls = (lambda: shutil.copyfile(source, target), export, lambda: read_layout(source))
    for _ in range(ROUNDS):
        rows.append([seconds(call, target) for call in calls])
    copy, exported, header = map(median, zip(*rows, strict=True))
    return copy, exported, header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = args.file or made_up(folder / "in.gguf", args.gigabytes)
        size = source.stat().st_size
        copy, exported, header = compare(source, folder)
        start = time.perf_counter()
        gguf.GGUFReader(source)
        theirs = time.perf_counter() - start
    print(f"{source.name}: {size / 1e6:,.0f} MB")
    print(f"copyfile {copy:.2f} s, export {exported:.2f} s ({exported / copy:.2f} times)")
    print(f"header {header:.3f} s, the gguf package's reader {theirs:.2f} s")


if __name__ == "__main__":
    main()
