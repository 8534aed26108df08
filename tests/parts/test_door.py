"""A new encoding is one file: dropped into a folder of parts, every command knows it."""

from __future__ import annotations

import json
import sys
from random import Random

import pytest
import torch

import longitude.parts
from longitude.cli.main import run
from longitude.core.part import PARTS
from longitude.core.text import dump, parse
from longitude.extension.candidates import candidates
from longitude.extension.search_space import neighbours
from longitude.ops.attention import attention
from longitude.training.lab.model import at_test, check_trainable, trainable_schemes

CAPPED = '''
"""Capped RoPE: the relative position of query i and key j is min(i - j, c)."""

from longitude.core.lengths import combinations
from longitude.core.part import Region, Remap, part
from longitude.core.region import Area, at
from longitude.core.validate import PositiveInt


@part("capped", site="remap", paper="Nobody 2026")
class Capped(Remap):
    """Capped RoPE: distances never exceed c."""

    c: PositiveInt

    def regions(self):
        c = self.c
        return (
            Region(Area(lo=1 - c, hi=c)),
            Region(Area(lo=c), q=at(c), k=at(0)),
            Region(Area(hi=1 - c), q=at(0), k=at(c)),
        )

    @classmethod
    def candidates(cls, lengths):
        return [cls(lengths.trained // 2)]

    def grid(self, lengths):
        return combinations(c=lengths.windows(self.c))

    @classmethod
    def training(cls, length):
        return [cls(length // 2)]

    def at_test(self):
        return None
'''


@pytest.fixture
def capped(tmp_path, monkeypatch):
    """The folder of parts with one file more, as long as the test runs."""
    (tmp_path / "capped.py").write_text(CAPPED)
    monkeypatch.setattr(longitude.parts, "__path__", [*longitude.parts.__path__, str(tmp_path)])
    longitude.parts.discover()
    yield
    del PARTS["capped"], sys.modules["longitude.parts.capped"], longitude.parts.Capped


def output(capsys, *args: str) -> str:
    assert run(list(args)) == 0
    return capsys.readouterr().out


def test_an_encoding_is_one_file(capped, capsys):
    from longitude.parts import Capped  # pyright: ignore[reportAttributeAccessIssue]

    text = "rope(remap=capped(4))"
    scheme = parse(text)
    assert dump(scheme) == text and scheme.rotary.remap == Capped(4)

    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    eager, auto = (
        attention(scheme, q, k, v, range(12), range(12), backend=backend)
        for backend in ("eager", "auto")
    )
    same = attention(parse("rope(remap=rerope(4))"), q, k, v, range(12), range(12))
    torch.testing.assert_close(eager, same)
    torch.testing.assert_close(auto, same)

    assert "capped" in {p["name"] for p in json.loads(output(capsys, "schemes", "--json"))["parts"]}

    tried = {c.name: c.text for c in candidates("auto", parse("rope()"), 256, 2048)}
    assert tried["capped"] == "rope(remap=capped(128))"
    assert "rope(remap=capped(64))" in neighbours(text, 256, 2048, Random(0), 40)

    trained = parse("rope(remap=capped(16))")
    assert dump(trained) in trainable_schemes(32, 2)
    check_trainable(trained, 32, 2)
    assert dump(at_test(trained)) == "rope()"


def test_show_draws_a_new_encoding(capped, capsys):
    assert "capped(4)" in output(capsys, "show", "rope(remap=capped(4))")
