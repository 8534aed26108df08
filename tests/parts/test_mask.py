"""Masks: which pairs are visible, and that a mask's areas don't overlap."""

import pytest
import torch

from longitude import Scheme, UserError
from longitude.core.region import visible
from longitude.parts import Bidirectional, Causal, Chunked, Rerope, Rope, Streaming, Window

N = 40
i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]

RULES = [
    (Causal(), lambda i, j: j <= i),
    (Bidirectional(), lambda i, j: True),
    (Window(1), lambda i, j: i == j),
    (Window(7), lambda i, j: abs(i - j) < 7),
    (Window(7, sinks=3), lambda i, j: abs(i - j) < 7 or j < 3),
    (Window(5, sinks=12), lambda i, j: abs(i - j) < 5 or j < 12),
    (Chunked(8), lambda i, j: i // 8 == j // 8),
]


def plane(rule) -> list[list[bool]]:
    return [[bool(rule(a, b)) for b in range(N)] for a in range(N)]


@pytest.mark.parametrize(("mask", "rule"), RULES, ids=[str(m) for m, _ in RULES])
def test_a_mask_shows_what_its_rule_says(mask, rule):
    assert visible(mask.areas(), i, j).tolist() == plane(rule)


@pytest.mark.parametrize("mask", [m for m, _ in RULES], ids=str)
def test_areas_of_a_mask_are_disjoint(mask):
    assert int(sum(a.visible(i, j).int() for a in mask.areas()).max()) == 1


@pytest.mark.parametrize(("mask", "rule"), RULES, ids=[str(m) for m, _ in RULES])
def test_a_scheme_is_causal_unless_it_says_bidirectional(mask, rule):
    seen = visible(Scheme.of(mask).areas(), i, j).tolist()
    both = mask == Bidirectional()
    assert seen == plane(lambda a, b: rule(a, b) and (both or b <= a))
    assert Scheme.of(mask).causal == (not both)


def test_masks_of_a_scheme_meet():
    s = Scheme.of(Window(7, sinks=2), Chunked(16), Bidirectional())
    assert visible(s.areas(), i, j).tolist() == plane(
        lambda a, b: (abs(a - b) < 7 or b < 2) and a // 16 == b // 16
    )
    assert int(sum(a.visible(i, j).int() for a in s.areas()).max()) == 1


def test_a_remap_hides_what_no_region_holds():
    s = Scheme.of(Rope(remap=Streaming(3, 9)))
    assert visible(s.areas(), i, j).tolist() == plane(lambda a, b: b <= a and (a - b < 9 or b < 3))
    whole = Scheme.of(Rope(remap=Rerope(5)))
    assert visible(whole.areas(), i, j).tolist() == plane(lambda a, b: b <= a)
    assert int(sum(a.visible(i, j).int() for a in whole.areas()).max()) == 1


def test_masks_that_cannot_be():
    for make in (lambda: Window(0), lambda: Window(4, sinks=-1), lambda: Chunked(0)):
        with pytest.raises(UserError):
            make()
    with pytest.raises(UserError, match="keep one"):
        Scheme.of(Causal(), Bidirectional())
