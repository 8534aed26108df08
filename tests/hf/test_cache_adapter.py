"""Caches of transformers' that hold a patched model's keys: latent attention's and static ones."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from longitude.core.validate import UserError
from longitude.hf.patch import patched
from tests.hf.test_architectures import greedy
from tests.hf.tiny import ids, shared

SCHEME = "rope(remap=leaky_rerope(10, 4))"
BY_LENGTH = "rope(frequencies=dynamic_ntk(16, 4))"
TEXT, CUT = ids(70, rows=2), 50
MASK = torch.ones_like(TEXT)
MASK[1, :9] = 0  # the second row's positions are its own
POS = (MASK.cumsum(1) - 1).clamp(min=0)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["deepseek_v3", "llama"])
def model(request):
    return shared(request.param)


def empty(model):
    if model.config.model_type == "deepseek_v3":  # whose cache holds less than keys and values
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=100)


def read(model, rows=(0, 1), tokens=slice(None), **given):
    rows, stop = list(rows), tokens.stop
    given |= {"attention_mask": MASK[rows][:, :stop], "position_ids": POS[rows][:, tokens]}
    return model(TEXT[rows][:, tokens], **given).logits


def filled(model):
    cache = empty(model)
    read(model, tokens=slice(CUT), past_key_values=cache)
    return cache


def goes_on(model, cache, rows=(0, 1)):
    """Whether what follows is what one forward says of these rows."""
    full = read(model, use_cache=False)[list(rows), CUT:]
    rest = read(model, rows, slice(CUT, None), past_key_values=cache)
    return torch.allclose(rest, full, atol=2e-5, rtol=1e-4)


def test_a_copied_prefix_goes_on_by_itself(model):
    with patched(model, SCHEME):
        prefix = filled(model)
        assert all(goes_on(model, cache) for cache in (copy.deepcopy(prefix), prefix))


def test_positions_follow_the_rows(model):
    with patched(model, SCHEME):
        cache = filled(model)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert goes_on(model, cache, (1, 0))
        if isinstance(cache, StaticCache):
            return  # its batch is fixed
        cache = filled(model)
        cache.batch_repeat_interleave(2)
        assert goes_on(model, copy.deepcopy(cache), (0, 0, 1, 1))
        cache.batch_select_indices(torch.tensor([3]))
        assert goes_on(model, cache, (1,))


def test_what_a_patch_filled_is_refused_after_it(model):
    stock = model(TEXT).logits
    with patched(model, SCHEME):
        cache = filled(model)
        kept = copy.deepcopy(cache)
    for each in (cache, kept):
        with pytest.raises(UserError, match="no longer is: open a new one"):
            read(model, tokens=slice(CUT, None), past_key_values=each)
    with patched(model, "rope(remap=rerope(8))"):
        with pytest.raises(UserError, match="this patch never saw"):
            read(model, tokens=slice(CUT, None), past_key_values=kept)
    cache.reset()
    torch.testing.assert_close(model(TEXT, past_key_values=cache).logits, stock)
    assert type(cache) in (DynamicCache, StaticCache) and not hasattr(cache, "_longitude")


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("new", [DynamicCache, StaticCache])
def test_a_second_turn_with_other_frequencies_is_refused(kind, new):
    model, options = shared(kind), {} if new is DynamicCache else {"max_cache_len": 100}
    static = {"disable_compile": True}

    def turns(alone, first=36):
        """Two turns; the second gives its new ids alone, or all."""
        cache = new(config=model.config, **options)
        text = greedy(model, TEXT[:, :first], past_key_values=cache, **static)
        text = torch.cat([text, ids(9, rows=2, seed=1)], 1)
        mask, given = torch.ones_like(text), text[:, cache.get_seq_length() :] if alone else text
        said = model.generate(
            given, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False,
            **static,
        )  # fmt: skip
        whole = greedy(model, text, use_cache=False)[:, text.shape[1] :][:, :4]
        assert torch.equal(said[:, given.shape[1] :], whole)

    for alone in (False, True):
        with patched(model, BY_LENGTH), pytest.raises(UserError, match="but may now reach"):
            turns(alone)
        with patched(model, BY_LENGTH, length=70):
            turns(alone)
        with patched(model, "rope(frequencies=dynamic_ntk(62, 4))"):  # as short as it was trained
            turns(alone)
