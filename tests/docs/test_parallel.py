"""The example of the guide to several ranks runs in one process and in two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallel.md"


@pytest.mark.parametrize("processes", [1, 2])
def test_the_guides_example_runs(tmp_path: Path, processes: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    example = tmp_path / "example.py"
    example.write_text("\n".join(blocks))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(launch if processes == 2 else []), str(example)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
