"""`longitude schemes`: nothing is missing, and everything that is listed can be written."""

from __future__ import annotations

import json
from collections.abc import Callable

from longitude import dump, parse
from longitude.core.part import PARTS
from longitude.inspection.catalogue import SITES
from longitude.presets import PRESETS

from .conftest import Ran


def test_lists_every_part_and_preset_with_its_paper(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude("schemes", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {p["name"] for p in found["parts"]} == set(PARTS)
    assert {p["name"] for p in found["presets"]} == set(PRESETS)
    rows = found["parts"] + found["presets"]
    assert all(r["paper"] and r["meaning"] and "\n" not in r["meaning"] for r in rows)
    sites = [p["site"] for p in found["parts"]]
    assert sites == sorted(sites, key=SITES.index)


def test_written_forms_are_the_schemes_of_the_defaults(longitude: Callable[..., Ran]) -> None:
    for row in json.loads(longitude("schemes", "--json")[1])["presets"]:
        if row["scheme"]:
            assert dump(parse(row["name"])) == row["scheme"] == dump(parse(row["scheme"]))


def test_one_site(longitude: Callable[..., Ran]) -> None:
    found = json.loads(longitude("schemes", "--site", "mask", "--json")[1])
    assert {p["site"] for p in found["parts"]} == {"mask"} and not found["presets"]
    _, out, _ = longitude("schemes", "--site", "mask")
    assert "window(size, sinks=0)" in out and "arXiv:2004.05150" in out and "alibi" not in out


def test_text_fits_the_terminal(longitude: Callable[..., Ran]) -> None:
    _, out, _ = longitude("schemes")
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name}(" in out for name in [*PARTS, *PRESETS])
