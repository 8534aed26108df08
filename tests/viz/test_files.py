"""Charts and pages as files."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from longitude.viz import files


def test_vega_is_read_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "ls")  # complains, as Python does to whom nobody listens
    with pytest.raises(CalledProcessError):
        files.vega.__wrapped__()
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_does_not_reach_the_process_of_vega(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os\nprint(os.getsid(0) == os.getpid())\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert files.vega.__wrapped__() == "True\n"
