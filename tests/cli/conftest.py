"""What the tests of the command line share: running it here, or as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longitude.cli.main import run

ROOT = Path(__file__).parent.parent.parent
Ran = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every cost: no command's test compares times."""
    monkeypatch.setattr("longitude.eval.tasks.cost.ROUNDS", 1)


@pytest.fixture
def longitude(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command here: exit code, stdout, stderr."""

    def call(*args: str) -> Ran:
        code = run(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def python(*args: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python of its own in the repository, or elsewhere."""
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**plain, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
