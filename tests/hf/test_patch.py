"""A patched model: decoding equals prefill, rows and documents keep apart, undoing is exact."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch

import longitude.hf as lh
from longitude.cache import Cache
from longitude.core.part import Dims
from longitude.core.scheme import Split
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf import cuda_graphs, model_state, stream
from longitude.hf.patch import (
    applied,
    apply,
    own_scheme,
    patched,
    probed_layers,
    scheme_of,
    undo,
    unpatched,
)
from longitude.hf.probe import identity_rotation
from longitude.nn import PositionAttention, PositionEmbedding
from tests.hf.test_architectures import by_steps, greedy
from tests.hf.tiny import WINDOW, checkpointed, decoder, ids, shared

SCHEMES = [
    "rope(remap=rerope(10))",
    "rope(remap=leaky_rerope(10, 4))",
    "rope(remap=self_extend(4, 8))",
    "rope(remap=dual_chunk(20, 8))",
    "rope(remap=streaming(2, 12))",
    "rope(remap=lm_infinite(12, globals=3))",
    "rope(frequencies=linear(4))",
    "rope(frequencies=ntk(4))",
    "rope(frequencies=ntk_mixed(4))",
    "rope(frequencies=by_parts(4, original=64))",
    "rope(frequencies=llama3(4, original=64))",
    "rope(frequencies=yarn(4, original=64))",
    "rope(frequencies=stepped('yarn', original=16))",
    "rope(base=500)",
    "logn(8)",
    "window(9)",
    "window(9, sinks=2)",
    "split(streaming(2, 12), rerope(10), share=0.5)",
    "rope(frequencies=yarn(2, original=64), remap=leaky_rerope(10, 4)) + logn(8) + window(24)",
]
BY_LENGTH = [
    "rope(frequencies=dynamic_ntk(16, 4))",
    "rope(frequencies=dynamic_linear(16))",
    "rope(frequencies=dynamic_yarn(16))",
    f"rope(frequencies=longrope({(1.0,) * 8}, {(1.5,) * 8}, original=16, factor=4))",
]
EVICT = ("window", "streaming", "lm_infinite")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request):
    return shared(request.param)


@pytest.fixture(scope="module")
def llama():
    return shared("llama")


FEW = [SCHEMES[1], SCHEMES[4], SCHEMES[-1]]  # a remap, one that forgets, everything at once


def some(name: str, scheme: str):
    """On demand, but for a few and for what a Llama decodes."""
    often = scheme in FEW if name == "gemma3_text" else True
    return pytest.param(name, scheme, marks=[] if often else pytest.mark.slow)


def state(model):
    """What a patch could leave behind: attributes, hooks and classes of every module."""
    hooks = ("_forward_pre_hooks", "_forward_hooks")
    return {
        name: (type(module), sorted(vars(module)), [len(vars(module)[key]) for key in hooks])
        for name, module in model.named_modules()
    }, model.config.to_dict()


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [some(name, scheme) for name in ("llama", "gemma3_text") for scheme in SCHEMES],
    indirect=["model"],
)
def test_decoding_equals_prefill(model, scheme):
    text = ids(90, rows=2)  # past the window of 64
    with patched(model, scheme):
        full = model(text, use_cache=False).logits
        close(model(text).logits, full)
        close(by_steps(model, text, (0, 30, 31, 32, 61, 75, *range(80, 91))), full)


@pytest.mark.parametrize("scheme", BY_LENGTH)
def test_frequencies_by_length_are_fixed_for_a_caches_life(llama, scheme):
    text = ids(48)
    with patched(llama, scheme, length=48):
        full = llama(text).logits
        close(by_steps(llama, text, (0, 10, 11, 30, 48)), full)
        close(llama(text[:, :20]).logits, full[:, :20])
    with patched(llama, scheme):
        close(llama(text).logits, full)
        short = llama(text[:, :20]).logits
        said = greedy(llama, text[:, :40])
        close(llama(text[:, :20]).logits, short)  # the length of generate() ends with it
    with patched(llama, scheme, length=48):
        assert torch.equal(greedy(llama, text[:, :40], use_cache=False), said)


@pytest.mark.parametrize("scheme", BY_LENGTH)
def test_a_cache_without_a_length_goes_no_further(llama, scheme):
    text = ids(24)
    with patched(llama, scheme):
        past = llama(text[:, :20], use_cache=True).past_key_values
        with pytest.raises(UserError, match="depends on the total length"):
            llama(text[:, 20:], past_key_values=past)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 24,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_a_bare_forward_is_a_fresh_models(parameters):
    def fresh():
        return decoder("llama", rope_parameters={"rope_theta": 1e4, **parameters})

    model, texts = fresh(), [ids(n, seed=n) for n in (20, 100, 40, 80, 64)]
    with patched(model, scheme_of(model)):
        found = [model(text).logits for text in texts]  # longer ones before shorter ones
    for text, logits in zip(texts, found, strict=True):
        close(logits, fresh()(text).logits)


@pytest.mark.parametrize("scheme", [*SCHEMES, *BY_LENGTH])
def test_padding_rows_and_the_past_change_nothing(llama, scheme):
    text = ids(70, rows=3)
    rows = [text[0, :50], text[1], text[2, :33]]
    padded, mask = torch.zeros(3, 70, dtype=torch.long), torch.zeros(3, 70, dtype=torch.long)
    for row, tokens in enumerate(rows):
        padded[row, 70 - len(tokens) :], mask[row, 70 - len(tokens) :] = tokens, 1
    pos = (mask.cumsum(1) - 1).clamp(min=0)
    with patched(llama, scheme):
        alone = [llama(tokens[None]).logits[0] for tokens in rows]
        together = llama(padded, attention_mask=mask, position_ids=pos).logits
        right = torch.stack([torch.cat([t, t.new_zeros(70 - len(t))]) for t in rows])
        shown = torch.stack([m.flip(0) for m in mask])
        at_right = llama(right, attention_mask=shown, use_cache=False).logits
    for row, said in enumerate(alone):
        close(together[row, 70 - len(said) :], said)
        close(at_right[row, : len(said)], said)


@pytest.mark.parametrize("scheme", [*SCHEMES, *BY_LENGTH])
def test_packed_documents_are_separate(llama, scheme):
    docs = [ids(n, seed=n) for n in (30, 45, 12)]
    pos = torch.cat([torch.arange(d.shape[1]) for d in docs])[None]
    with patched(llama, scheme):
        packed = llama(torch.cat(docs, 1), position_ids=pos, use_cache=False).logits
        apart = torch.cat([llama(doc).logits for doc in docs], 1)
    close(packed, apart)


@pytest.mark.parametrize("scheme", [*SCHEMES[:6], *SCHEMES[-5:]])  # transformers' own sees all
def test_what_follows_packed_documents_sees_the_last_of_its_row(llama, scheme):
    rows = [[30, 45, 12], [20, 67], [87]]
    docs = [[ids(n, seed=n) for n in row] for row in rows]
    pos = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    more, last = ids(2, seed=5), torch.tensor([row[-1] for row in rows])[:, None]
    with patched(llama, scheme):
        text = torch.cat([torch.cat(row, 1) for row in docs])
        past = llama(text, position_ids=pos, use_cache=True).past_key_values
        given = {"past_key_values": past, "position_ids": last + torch.arange(2)}
        said = llama(more.expand(3, -1), **given).logits
        alone = [llama(torch.cat([row[-1], more], 1)).logits[0, -2:] for row in docs]
    close(said, torch.stack(alone))


def test_memory_of_a_windowed_cache_is_constant(llama):
    text = ids(600)
    with patched(llama, "window(9, sinks=2)"):
        past, sizes = None, []
        for n in range(0, 600, 20):
            past = llama(text[:, n : n + 20], past_key_values=past, use_cache=True).past_key_values
            sizes.append(len(past.layers[0].store))
    assert past.get_seq_length() == 600
    assert max(sizes[10:]) == max(sizes[20:]) < 200


WAYS = {
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(s, marks=[] if s in FEW else pytest.mark.slow)
        for s in SCHEMES[:6] + SCHEMES[-1:]
    ],
)
def test_every_way_to_generate_says_the_same(llama, scheme):
    model, prompt, helper = llama, ids(40), decoder("llama", seed=1)
    with patched(model, scheme):
        said = greedy(model, prompt)
        for way, settings in {**WAYS, "assisted": {"assistant_model": helper}}.items():
            assert torch.equal(greedy(model, prompt, **settings), said), way
        beams = greedy(model, ids(30, rows=2), num_beams=3)
        assert torch.equal(greedy(model, ids(30, rows=2), num_beams=3, use_cache=False), beams)


def test_several_answers_to_one_prompt(llama):
    with patched(llama, SCHEMES[0]):
        said = greedy(llama, ids(20, rows=2), num_beams=4, num_return_sequences=2)
        bare = greedy(llama, ids(20, rows=2), num_beams=4, num_return_sequences=2, use_cache=False)
    assert torch.equal(said, bare)


def test_leaving_restores_the_model_also_after_an_exception(model):
    text, before, held = ids(40), dict(vars(model.model.rotary_emb)), state(model)
    stock = model(text).logits
    for scheme in (SCHEMES[0], "rope(frequencies=linear(4))"):
        with pytest.raises(RuntimeError, match="mine"):
            with patched(model, scheme):
                assert not torch.equal(model(text).logits, stock)
                raise RuntimeError("mine")
        assert torch.equal(model(text).logits, stock)
    assert vars(model.model.rotary_emb).keys() == before.keys()
    assert state(model) == held


def test_a_forward_that_fails_leaves_nothing_behind(llama):
    with patched(llama, SCHEMES[0]):
        good = llama(ids(20)).logits
        with pytest.raises(UserError, match="makes its mask from its scheme"):
            llama(ids(20), attention_mask=torch.zeros(1, 1, 20, 20))
        assert torch.equal(llama(ids(20)).logits, good)


def test_a_patch_that_fails_leaves_no_half_patched_model(llama, monkeypatch):
    stock, calls, held = llama(ids(20)).logits, [], state(llama)

    def fail(*given):
        calls.append(given)
        raise RuntimeError("in the middle")

    monkeypatch.setattr("longitude.hf.patch.LayerState", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        with patched(llama, SCHEMES[0], check=False):
            pass
    assert calls and torch.equal(llama(ids(20)).logits, stock)
    assert state(llama) == held


def test_for_good_and_off_again(llama):
    stock = llama(ids(40)).logits
    apply(llama, SCHEMES[0])
    try:
        changed = llama(ids(40)).logits
        assert applied(llama) == SCHEMES[0]
        assert scheme_of(llama) == parse(SCHEMES[0]) and own_scheme(llama) == parse("rope()")
        with patched(llama, SCHEMES[1]):
            assert not torch.allclose(llama(ids(40)).logits, changed, atol=1e-4)
        assert torch.equal(llama(ids(40)).logits, changed)
        with unpatched(llama):
            assert torch.equal(llama(ids(40)).logits, stock)
        apply(llama, SCHEMES[1])
        assert applied(llama) == SCHEMES[1]
    finally:
        undo(llama)
    assert applied(llama) is None and torch.equal(llama(ids(40)).logits, stock)


def test_one_patch_at_a_time(llama):
    with patched(llama, SCHEMES[0]):
        for act in (lambda: apply(llama, SCHEMES[1]), lambda: copy.deepcopy(llama)):
            with pytest.raises(UserError, match=r"leave the block first|patch the copy"):
                act()
        with pytest.raises(UserError, match="leave the block first"):
            with patched(llama, SCHEMES[1]):
                pass
        assert scheme_of(llama) == parse(SCHEMES[0])


def test_a_split_is_the_same_written_out_layer_by_layer(tmp_path):
    model, _ = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)  # five layers
    split = "split(streaming(4, 60), rerope(64), share=0.5)"
    out = f"layers({', '.join(2 * ['streaming(4, 60)'] + 3 * ['rerope(64)'])})"
    text = torch.randint(3, 250, (1, 300), generator=torch.Generator().manual_seed(0))
    found = {}
    for scheme in (split, out):
        with patched(model, scheme):
            prefill = model(text).logits
            close(by_steps(model, text, (0, 90, 260, 261, 262, 300)), prefill)
            found[scheme] = prefill, greedy(model, text)
            full = scheme_of(model)
    assert all(torch.equal(a, b) for a, b in zip(found[split], found[out], strict=True))
    assert full == parse(out)  # and the split stays one
    apply(model, split)
    assert scheme_of(model) == parse(split) and applied(model) == split
    lh.save(model, tmp_path)
    again, _ = lh.load(tmp_path, dtype="float32", quiet=True)
    assert scheme_of(again) == parse(split)
    assert torch.equal(again(text).logits, found[split][0])


def test_a_split_of_layers_that_differ_is_written_out(model):
    own = own_scheme(model)
    with patched(model, "split(streaming(2, 12), rerope(10), share=0.5)"):
        full = scheme_of(model)
    if len(own) == 1:
        assert isinstance(full, Split) and len(full) == 2
    else:  # Gemma 3's layers keep their windows and bases
        assert not isinstance(full, Split) and len(full) == len(own) == 4
        assert [full.layer(n).mask for n in range(4)] == [own.layer(n).mask for n in range(4)]


def test_threads_keep_apart(llama):
    prompts = [ids(n, seed=n) for n in (40, 33, 52, 40)] * 2
    with patched(llama, BY_LENGTH[0]), ThreadPoolExecutor(4) as pool:
        alone = [greedy(llama, prompt) for prompt in prompts]
        together = pool.map(torch.no_grad()(partial(greedy, llama)), prompts)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_attention_is_not_changed_inside_a_patch():
    model = decoder("llama")
    with patched(model, SCHEMES[0]):
        model.set_attn_implementation("eager")
        with pytest.raises(UserError, match="became eager while it was patched"):
            model(ids(20))
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_belongs_to_its_patch(llama):
    stock = llama(ids(20), use_cache=True).past_key_values
    with patched(llama, SCHEMES[0]):
        with pytest.raises(UserError, match="open a new cache"):
            llama(ids(1), past_key_values=stock)
        ours = llama(ids(20), use_cache=True).past_key_values
    with pytest.raises(UserError, match="no longer is: open a new one"):
        llama(ids(1), past_key_values=ours)


def test_a_copied_cache_goes_on_by_itself(model):
    text = ids(90, rows=2)
    with patched(model, SCHEMES[-1]):
        full, prompt = model(text).logits, model(text[:, :50], use_cache=True).past_key_values
        for cache in (copy.deepcopy(prompt), copy.deepcopy(prompt), prompt):
            close(model(text[:, 50:51], past_key_values=cache).logits, full[:, 50:51])
            close(model(text[:, 51:], past_key_values=cache).logits, full[:, 51:])


def test_a_cache_that_dropped_what_a_scheme_sees_is_refused():
    model = decoder("gemma3_text", eos_token_id=None)  # half its layers slide over 12 tokens
    wide = "layers(rope() + window(30), rope(base=1000000))"
    static = {"cache_implementation": "static", "disable_compile": True}
    with patched(model, wide):
        assert torch.equal(greedy(model, ids(40)), greedy(model, ids(40), use_cache=False))
        with pytest.raises(UserError, match="sees further back: use a dynamic cache"):
            greedy(model, ids(40), **static)
    with patched(model, "rope(remap=rerope(8))"):  # which keeps each layer's own window
        assert torch.equal(greedy(model, ids(40), **static), greedy(model, ids(40)))


def test_a_scheme_that_changes_nothing_is_said(llama):
    with pytest.raises(UserError, match="changed no logit"):
        with patched(llama, "logn(100000)"):
            pass
    with patched(llama, "logn(100000)", check=False):
        pass


def test_a_rotation_that_no_configuration_states_is_said(monkeypatch):
    monkeypatch.setattr("longitude.hf.probe.ropes", lambda config: {None: None})
    with pytest.raises(UserError, match="its configuration states no rotation: add rope_theta"):
        with patched(decoder("llama"), "logn(16)"):
            pass


def test_gradients_are_the_stock_models():
    model, text = decoder("qwen3"), ids(40)
    with torch.enable_grad():
        model(text, labels=text).loss.backward()
        stock = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        with patched(model, "rope(remap=rerope(63))", check=False):  # no distance reaches 63
            model(text, labels=text).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, stock[name], atol=1e-5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_those_of_one_run(reentrant):
    model, texts = decoder("llama").train(), [ids(40, rows=2, seed=n) for n in range(2)]
    masks = [torch.ones(2, 40, dtype=torch.long) for _ in texts]
    masks[0][1, :9] = 0

    def gradients():
        model.zero_grad()
        both = zip(texts, masks, strict=True)  # two forwards, then one backward through both
        sum(model(t, attention_mask=m, labels=t).loss for t, m in both).backward()
        return [p.grad for p in model.parameters()]

    with torch.enable_grad(), patched(model, SCHEMES[-1]):
        once = gradients()
        checkpointed(model, reentrant)
        held = state(model)
        for again, wanted in zip(gradients(), once, strict=True):
            torch.testing.assert_close(again, wanted)
        assert state(model) == held


def test_half_precision_stays_close(llama):
    wide = llama(ids(60)).logits
    model = copy.deepcopy(llama).to(torch.bfloat16)
    stock = (model(ids(60)).logits.float() - wide).abs().max()
    with patched(model, "rope(remap=rerope(63))", check=False):
        ours = (model(ids(60)).logits.float() - wide).abs().max()
    assert ours < 2 * stock + 1e-3


def test_the_window_is_known(llama):
    with pytest.raises(UserError, match=f"trained to {WINDOW}"):
        with patched(llama, "rope(remap=rerope(100))"):
            pass


def rotation_removed(model):
    """The same model whose rotary embedding is the identity."""
    still = copy.deepcopy(model)
    rotary = still.model.rotary_emb
    rotary.forward = identity_rotation(rotary)
    return still


def rotating(model):
    """What the modeling file of a model rotates by."""
    return type(model.model.layers[0].self_attn).forward.__globals__["apply_rotary_pos_emb"]


def test_an_identity_rotation_is_not_computed(monkeypatch):
    one, other, text = decoder("granite"), decoder("granite"), ids(32)
    assert all(layer.skips_rotation for model in (one, other) for layer in probed_layers(model))
    stock, own, calls = one(text).logits, rotating(one), []

    def counted(*args):
        calls.append(args)
        return own(*args)

    file = type(one.model.layers[0].self_attn).forward.__globals__
    monkeypatch.setitem(file, "apply_rotary_pos_emb", counted)
    with ExitStack() as first:
        first.enter_context(patched(one, "rope(remap=rerope(8))", check=False))
        skipped = one(text).logits
        assert not calls
        with patched(other, "rope(remap=rerope(16))", check=False):
            first.close()  # patches end in any order
            other(text)
            assert not calls
            assert torch.equal(one(text).logits, stock) and calls  # others rotate as before
    assert rotating(one) is counted
    monkeypatch.setattr(model_state, "rotations_skipped", lambda _: nullcontext())
    calls.clear()
    with patched(one, "rope(remap=rerope(8))", check=False):
        assert torch.equal(one(text).logits, skipped) and calls


def test_an_identity_rotation_has_the_form_of_the_first_one():
    rotary = decoder("granite").model.rotary_emb
    identity, pos = identity_rotation(rotary), torch.arange(6)[None]
    for x in (torch.ones(1, 6, 8), torch.ones(1, 6, 8).double(), torch.ones(1, 6, 8).double()):
        own, made = type(rotary).forward(rotary, x, pos), identity(x, pos)
        assert [(each.shape, each.dtype) for each in made] == [(y.shape, y.dtype) for y in own]
        assert made[0].eq(1).all() and made[1].eq(0).all()
    made[0].zero_()  # is the caller's own
    assert identity(x, pos)[0].eq(1).all()


def test_a_rotation_that_does_more_than_rotate_is_computed(monkeypatch):
    model, text = decoder("granite"), ids(32)
    own, file = rotating(model), type(model.model.layers[0].self_attn).forward.__globals__

    def reordered(q, k, cos, sin):  # as DeepSeek's, which brings pairs together
        return own(q.flip(-1), k.flip(-1), cos, sin)

    monkeypatch.setitem(file, "apply_rotary_pos_emb", reordered)
    assert not any(layer.skips_rotation for layer in probed_layers(model))
    expected = rotation_removed(model)(text).logits
    with patched(model, "nope()"):
        close(model(text).logits, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "smollm3"])
@pytest.mark.parametrize("scheme", ["nope()", parse("nope()")], ids=["text", "value"])
def test_no_positions_removes_the_rotation(kind, scheme):
    model, text = shared(kind), ids(32, rows=2)
    expected = rotation_removed(model)(text).logits
    stock = model(text).logits
    assert not torch.allclose(stock, expected, atol=1e-3)
    with patched(model, scheme):
        close(model(text).logits, expected)
        close(by_steps(model, text), expected)
        own = scheme_of(model)
        assert all(own.layer(i).rotary is None for i in range(len(own)))
    apply(model, scheme)
    close(model(text).logits, expected)
    assert scheme_of(model) == own
    undo(model)
    assert torch.equal(model(text).logits, stock)


def test_drope_removes_the_rotation_and_scales_past_its_window():
    model, text = shared("llama"), ids(32, rows=2)
    expected = rotation_removed(model)(text).logits
    with patched(model, "drope(16, c=0.5)"):
        got = model(text).logits
        close(got[:, :16], expected[:, :16])
        assert not torch.allclose(got[:, 16:], expected[:, 16:], atol=1e-3)
        close(by_steps(model, text), got)
        assert scheme_of(model) == parse("drope(16, c=0.5)")


def test_models_of_one_configuration_keep_apart():
    one, text = decoder("llama"), ids(40)
    other = type(one)(one.config).eval()
    own = [model(text).logits for model in (one, other)]
    apply(one, SCHEMES[0])
    with pytest.raises(UserError, match="shares its configuration with a patched one"):
        other(text)
    with patched(other, SCHEMES[1]):
        expected = other(text).logits
    apply(other, SCHEMES[1])
    undo(one)  # patches end in any order
    assert torch.equal(other(text).logits, expected)
    undo(other)
    for model, logits in zip((one, other), own, strict=True):
        assert torch.equal(model(text).logits, logits)


@pytest.mark.parametrize("scheme", [SCHEMES[0], "rope(frequencies=linear(4))"])
def test_one_patch_for_shared_layers(scheme):
    model = decoder("llama")
    for outer, inner in ((model, model.model), (model.model, model)):
        with patched(outer, scheme):
            with pytest.raises(UserError, match=f"whose layers this {type(inner).__name__} shares"):
                scheme_of(inner)
            with pytest.raises(UserError, match="whose layers this"):
                apply(inner, SCHEMES[1])
        assert scheme_of(inner) == scheme_of(outer) == parse("rope()")


@pytest.mark.parametrize("scheme", [SCHEMES[0], "rope(frequencies=linear(4))"])
def test_a_patched_model_is_neither_copied_nor_pickled(scheme):
    model = decoder("llama")
    with patched(model, scheme):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UserError, match="can't be copied or pickled"):
                copied(model)
    pickle.loads(pickle.dumps(model))


def test_a_mask_that_no_layer_takes_is_not_dropped_in_silence():
    model = decoder("mistral")
    own = scheme_of(model)
    with pytest.raises(
        UserError, match=r"keeps the mask it was trained with.*layers\(window\(5\)\)"
    ):
        apply(model, "window(5)")
    with patched(model, str(own)):
        assert scheme_of(model) == own
    with patched(model, "layers(window(5))"):
        assert "window(5)" in str(scheme_of(model))


def test_what_is_no_model_or_no_scheme_is_said(llama):
    graphs = ExitStack().enter_context
    opened = (stream, lambda model: graphs(cuda_graphs(model)))
    for call in (scheme_of, undo, partial(apply, scheme=SCHEMES[0]), *opened):
        with pytest.raises(UserError, match=r"torch module, but got 'gpt2': load it first"):
            call("gpt2")
    dims = Dims(8, 1, 8)
    modules = (partial(PositionAttention, dims=dims), partial(PositionEmbedding, dim=8))
    for scheme in (None, 5, ["rope()"]):
        for use in (partial(apply, llama), Cache, *modules):
            with pytest.raises(UserError, match="a scheme or its text is needed, but got"):
                use(scheme)
