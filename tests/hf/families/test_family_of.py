"""Which models have a family, and what they refuse."""

from typing import Any

import pytest
import torch

from longitude import UserError, parse
from longitude.hf.families import Family, family_of
from tests.hf.families.models import TABLES, WINDOW, out, own, state, tiny, tokens, under

ALIBI = {"bloom": {}, "mpt": {}, "falcon": {"alibi": True}}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_found_with_their_offset_and_direction(kind):
    model = tiny(kind)
    offset = {"roberta": 2, "camembert": 2, "opt": 2, "biogpt": 2}.get(kind, 0)
    causal = kind in ("gpt2", "opt", "biogpt", "gpt_bigcode")
    way = "" if causal else " + bidirectional()"
    assert own(model) == parse(f"learned(16, offset={offset})" + way)


@pytest.mark.parametrize("kind", ALIBI)
def test_alibi_models_have_alibi(kind):
    model = tiny(kind, **ALIBI[kind])
    assert isinstance(family_of(model), Family)
    assert own(model) == parse("alibi()")


def test_a_bert_that_decodes_is_causal():
    assert own(tiny("bert", is_decoder=True)) == parse("learned(16)")


@pytest.mark.parametrize("kind", ["bart", "mvp", "trocr", "bigbird_pegasus"])
def test_a_decoder_alone_is_causal(kind):
    size: dict[str, Any] = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    }
    model = tiny(kind, "AutoModelForCausalLM", **size)
    ids = tokens(WINDOW)
    other = ids.clone()
    other[:, -1] += 1
    torch.testing.assert_close(out(model, ids)[:, :-1], out(model, other)[:, :-1])
    assert own(model) == parse(f"learned(16, offset={0 if kind == 'bigbird_pegasus' else 2})")


@pytest.mark.parametrize(
    "kind, entries",
    {
        "llama": {},
        "falcon": {"alibi": False},
        "roformer": {},
        "t5": {},
        "deberta-v2": {"relative_attention": True},
        "mpnet": {},
        "marian": {"d_model": 32},
        "distilbert": {"sinusoidal_pos_embds": True},
        "clip_text_model": {},
    }.items(),
)
def test_no_family_where_tokens_are_placed_otherwise(kind, entries):
    assert family_of(tiny(kind, **entries)) is None


@pytest.mark.parametrize("kind", ["bert", "gpt2", "bloom", "mpt", "falcon"])
@pytest.mark.parametrize(
    "text",
    [
        "rope()",
        "rope(remap=rerope(8))",
        "t5()",
        "sinusoidal()",
        "multiplicative(16)",
        "causal()",
        "learned(16) + window(8)",
        "alibi() + logn(16)",
        "kerple_log()",
        "randomized(64) + learned(16)",
        "layers(alibi(), causal())",
    ],
)
def test_another_kind_of_scheme_is_refused_in_one_sentence(kind, text):
    model = tiny(kind, **ALIBI.get(kind, {}))
    held = state(model)
    with pytest.raises(UserError) as caught, under(model, text):
        pass
    said = str(caught.value)
    assert type(model).__name__ in said and str(own(model)) in said and "\n" not in said
    assert said.endswith(".") and said.count(". ") == 0
    assert state(model) == held


@pytest.mark.parametrize("kind, text", [("gpt2", "bidirectional()"), ("bloom", "bidirectional()")])
def test_a_direction_is_not_turned_round(kind, text):
    model = tiny(kind)
    part = {"gpt2": "hierarchical(16)", "bloom": "ntk_alibi(4)"}[kind]
    with pytest.raises(UserError, match=type(model).__name__), under(model, f"{part} + {text}"):
        pass


@pytest.mark.parametrize("kind, text", [("gpt2", "hierarchical(16)"), ("bloom", "ntk_alibi(4)")])
def test_a_patch_in_a_patch_is_refused_and_harmless(kind, text):
    model = tiny(kind)
    held = state(model)
    with under(model, text):
        inside = state(model)
        with pytest.raises(UserError, match="patched already"), under(model, text):
            pass
        assert state(model) == inside
    assert state(model) == held


def test_a_patch_tells_the_whole_scheme():
    with under(tiny("roberta"), "hierarchical(16)") as full:
        assert full == parse("hierarchical(16, offset=2) + bidirectional()")
    with under(tiny("bert"), "layers(learned_tiled(16), learned_tiled(16))") as full:
        assert full == parse("learned_tiled(16) + bidirectional()")
    with under(tiny("bloom"), "alibi_pi(2)") as full:
        assert full == parse("alibi_interpolated(2)")


@pytest.mark.parametrize("kind, text", [("gpt2", "hierarchical(16)"), ("bloom", "ntk_alibi(4)")])
def test_another_model_of_the_class_sees_nothing(kind, text):
    one, other = tiny(kind), tiny(kind)
    ids = torch.arange(5, 15)[None]
    before = other(ids)[0]
    with under(one, text):
        assert torch.equal(other(ids)[0], before)
