"""What the lab is for, seen to hold: past its window RoPE's loss climbs, and ALiBi's does not.

The margins are well inside what five seeds gave, which LOG.md lists.
"""

from __future__ import annotations

import json

import pytest

from longitude.cli.main import run

SMALL = ("--length", "32", "--batch", "16", "--steps", "80", "--test", "32,128")


def climbs(capsys, tmp_path, *settings: str) -> dict[str, list[float]]:
    """How much each scheme's loss grows from one window to four, for each seed."""
    assert run(["lab", *settings, "--device", "cpu", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    one, four = (
        {(r["scheme"], r["seed"]): r["value"] for r in rows if r["length"] == times * r["trained"]}
        for times in (1, 4)
    )
    grown = {scheme: [] for scheme, _ in one}
    for (scheme, seed), loss in one.items():
        grown[scheme].append(four[scheme, seed] - loss)
    return grown


def test_rope_climbs_and_alibi_does_not(capsys, tmp_path):
    grown = climbs(capsys, tmp_path, *SMALL)
    assert grown["rope()"][0] > 0.06 and abs(grown["alibi()"][0]) < 0.03


@pytest.mark.slow
def test_the_default_shows_it_for_five_seeds(capsys, tmp_path):
    grown = climbs(capsys, tmp_path, "--seeds", "0,1,2,3,4")
    assert min(grown["rope()"]) > 0.15 and max(map(abs, grown["alibi()"])) < 0.03
