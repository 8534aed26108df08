"""Recipes, settled for a model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import Subject
from longitude.training.tune import recipes
from longitude.training.tune.recipes import RECIPES, USUAL, Recipe

LLAMA = (Subject("llama", "", "rope()", "rope", 4096, "float32", "cpu"), 4096, 16384)
OWN = {"rope": "rope()", "alibi": "alibi()", "learned": "learned(256)"}


def about(family):
    return Subject("it", "", OWN[family], family, 256, "float32", "cpu"), 192, 1024


def settle(name, model, given):
    return recipes.settle(name, *model, given)


@pytest.mark.parametrize("name", RECIPES)
def test_each_settles_for_its_family_with_a_scheme_that_can_be_read(name):
    recipe = settle(name, about(RECIPES[name].family), {})
    assert recipe.paper and recipe.steps > 0
    if recipe.scheme is not None:
        parse(recipe.scheme)
    assert recipe.length == (256 if name in ("pose", "e2_llm", "cream", "drope") else 1024)


@pytest.mark.parametrize("family", OWN)
def test_each_family_has_its_usual_one_and_refuses_the_others(family):
    assert settle(None, about(family), {}).name == USUAL[family]
    for name, recipe in RECIPES.items():
        if recipe.family != family:
            with pytest.raises(UserError, match=f"{name} is for models with {recipe.family}"):
                settle(name, about(family), {})


def test_a_scheme_of_ones_own_is_trained_as_usual_under_no_papers_name():
    given = {"scheme": "rope(remap=rerope(2048))"}
    own, usual = settle(None, LLAMA, given), settle("yarn", LLAMA, given)
    assert (own.name, own.paper) == ("own scheme", "")
    assert replace(own, name=usual.name, paper=usual.paper) == usual


def test_a_rank_is_of_loras_matrices_alone():
    for name, given in (("abf", {}), ("yarn", {"trained": "full"})):
        with pytest.raises(UserError, match="got 8 where all weights are trained: leave it out"):
            settle(name, LLAMA, {"rank": 8, **given})


def test_the_papers_schemes():
    schemes = {name: settle(name, LLAMA, {}).scheme for name in ("yarn", "pi", "longlora", "pose")}
    yarn, linear = "rope(frequencies=yarn(4, original=4096))", "rope(frequencies=linear(4))"
    assert schemes == {"yarn": yarn, "pi": linear, "longlora": linear, "pose": yarn}


def test_drope_drops_the_rotation_and_trains_all_weights_at_the_window():
    recipe = settle("drope", LLAMA, {})
    assert (recipe.scheme, recipe.length, recipe.trained) == ("drope(4096)", 4096, "full")
    assert recipe.rate == pytest.approx(1e-4)


def test_longrope2_divides_from_the_critical_pair_on():
    """Phi-3-mini (96, 10000, 2048): pair 31; Llama-3-8B (128, 500000, 8192): pair 35. Before it
    λ_i = s^(i / critical), and nothing below the window."""
    for dims, base, trained, critical in ((96, 10000, 2048, 31), (128, 500000, 8192, 35)):
        own = replace(LLAMA[0], scheme=f"rope(base={base})", trained=trained)
        recipe = recipes.settle("longrope2", own, 4096, 8 * trained, {}, dims)
        found = parse(recipe.scheme).layer(0).rotary.frequencies
        assert found.short == (1.0,) * (dims // 2) and found.attention() == 1
        expected = [8 ** (i / critical) if i < critical else 8 for i in range(dims // 2)]
        assert found.long == pytest.approx(expected, rel=1e-5)
        assert (recipe.length, recipe.short, recipe.trained) == (8 * trained, 0.3, "full")


def test_the_larger_base_is_the_critical_one_of_scaling_laws():
    """10000^(log_(T/2π) (T'/2π)) = 7.17e4 from 4,096 to 16,384, in two digits 72,000."""
    critical = 10000 ** (math.log(16384 / 2 / math.pi) / math.log(4096 / 2 / math.pi))
    assert critical == pytest.approx(7.17e4, rel=1e-3)
    assert settle("abf", LLAMA, {}).scheme == "rope(base=72000)"


def test_rates_are_the_papers_at_their_width():
    assert settle("yarn", LLAMA, {"trained": "full"}).rate == pytest.approx(2e-5)
    assert settle("yarn", LLAMA, {"trained": "lora"}).rate == pytest.approx(2e-4)
    assert settle("alibi", about("alibi"), {}).rate == pytest.approx(2e-5 * 4096 / 192)


def test_every_field_can_be_set():
    wanted = {
        "scheme": "rope(frequencies=linear(2))", "steps": 7, "rows": 3, "length": 100,
        "rate": 0.5, "warmup": 2, "positions": "randomized", "trained": "full",
    }  # fmt: skip
    recipe = settle("yarn", LLAMA, wanted)
    assert {name: getattr(recipe, name) for name in wanted} == wanted
    assert settle("yarn", LLAMA, {"rank": 4}).rank == 4
    assert settle("yarn", LLAMA, {"positions": "pose"}).length == 4096
    assert settle("pose", LLAMA, {"positions": "order"}).length == 4096


def test_the_rate_rises_from_a_tenth_and_falls_to_a_tenth():
    recipe = Recipe("x", "", "rope", steps=100, warmup=10, rate=1.0)
    rates = [recipe.rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == 1.0 == max(rates)
    assert rates[100] == pytest.approx(0.1) and rates[55] == pytest.approx(0.55)


def test_mistakes_are_told():
    with pytest.raises(UserError, match="yarn is near"):
        settle("yarm", LLAMA, {})
    wrong = [("steps", -3), ("rows", 0), ("rate", 0.0), ("rank", 0), ("length", 0)]
    names = {"rows": "batch", "rate": "lr", "length": "seq"}
    for name, value in wrong:
        option = f"--{names.get(name, name)}"
        with pytest.raises(UserError, match=f"{option} must be above zero, but got {value}"):
            settle("yarn", LLAMA, {name: value})
    with pytest.raises(UserError, match="trained to 4,096: it already covers that"):
        settle("yarn", (LLAMA[0], 64, 4096), {})
    with pytest.raises(UserError, match="lora or full"):
        settle("yarn", LLAMA, {"trained": "half"})
