"""Killed at random moments and continued, a run leaves the rows of one that was left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longitude.core.store import Store, address
from tests.processes import python

OTHERWISE = (
    "speed",
    "rounds",
    "seconds",
    "prefill",
    "decode",
    "peak",
    "machine",
)  # what differs from run to run


def rows(path: Path) -> list[tuple[str, Any]]:
    """What each row is of, and its value but for times and memory."""
    with Store(path) as store:
        return [
            (address(row.key), {k: v for k, v in row.value.items() if k not in OTHERWISE})
            for row in store.rows()
        ]


def test_rows_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    ran = python("-m", "tests.extension.killing", str(tmp_path), "0", timeout=600)
    assert ran.returncode == 0, ran.stderr
    expected = rows(tmp_path / "undisturbed.sqlite")
    first, every = map(set, json.loads(ran.stdout))
    assert first < {at for at, _ in expected} <= every
    killed = sorted(tmp_path.glob("killed*.sqlite"))
    assert killed
    for path in killed:
        assert rows(path) == expected
