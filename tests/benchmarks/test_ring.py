"""Rings over CPU processes beside each other."""

from __future__ import annotations

import json

from tests.processes import python
from tests.training.test_distributed import FORK

PROGRAM = """
import sys
from benchmarks.ring import main
sys.argv = ["ring", "--tokens", "64", "--heads", "2", "--dim", "8", "--rounds", "1", "--json"]
main()
"""


def test_rings_give_what_one_call_gives() -> None:
    ran = python("-c", FORK + PROGRAM)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert {"one call", "longitude"} <= {row["way"] for row in rows}  # and maybe torch's
    assert all(row["error"] < 1e-5 and row["ranks"] == 2 for row in rows)
