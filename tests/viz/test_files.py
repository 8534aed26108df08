"""Charts and pages as files."""

from __future__ import annotations

import sys
from subprocess import CalledProcessError

import pytest

from longitude.viz import files


def test_vega_is_read_in_silence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "ls")  # complains, as Python does after Ctrl-C
    with pytest.raises(CalledProcessError):
        files.vega.__wrapped__()
    assert capfd.readouterr() == ("", "")
