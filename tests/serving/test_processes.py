"""Tensor parallelism over two processes, which each find the worker and their part of the heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes are bound to two cores")
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.serving.two_ranks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
