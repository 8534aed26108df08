"""The example of the guide to several ranks runs in one process and in two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import python

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallel.md"
# as torchrun starts two processes; the first waits for the other
FORKED = """
import os, socket, sys
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
other = os.fork()
os.environ["RANK"] = "0" if other else "1"
exec(open(sys.argv[1]).read())
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def example() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(blocks)


def test_the_guides_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    exec(compile(example(), GUIDE, "exec"), {})


def test_the_guides_example_runs_in_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(example())
    ran = python("-c", FORKED, str(file))
    assert ran.returncode == 0, ran.stderr
