"""Learned tables read on: the trained rows stay, the others are the part's formula."""

import pytest
import torch
from torch import nn

from longitude import UserError, parse
from longitude.parts import Hierarchical
from tests.hf.families.models import (
    TABLES,
    WINDOW,
    asset,
    decoded,
    out,
    padded_pair,
    restored,
    state,
    tail_loss,
    tiny,
    tokens,
    under,
)

GROWN = ["hierarchical(16)", "learned_interpolated(16, 4)", "learned_tiled(16)"]
FAITHFUL = ["hierarchical(16)", "learned_tiled(16)"]  # the trained window stays as it was
ENCODERS = [k for k in TABLES if k not in ("gpt2", "opt", "biogpt", "gpt_bigcode")]
DECODERS = [k for k in TABLES if k not in ENCODERS]


def table(model) -> nn.Embedding:
    names = ("position_embeddings", "wpe", "embed_positions")
    return next(m for n, m in model.named_modules() if n.rpartition(".")[2] in names)


@pytest.mark.parametrize("kind", TABLES)
def test_its_own_scheme_is_the_model_bit_for_bit(kind):
    model, ids = tiny(kind), tokens(WINDOW, batch=2)
    before, held = out(model, ids), state(model)
    for text in ("learned(16)", "learned(16, offset=2)" if kind in ("opt", "roberta") else None):
        with under(model, text):
            assert torch.equal(out(model, ids), before) and state(model) == held


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("text", FAITHFUL)
def test_the_trained_window_stays_bit_for_bit(kind, text):
    model, ids = tiny(kind), tokens(WINDOW, batch=2)
    before = out(model, ids)
    with under(model, text):
        assert torch.equal(out(model, ids), before)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("text", GROWN)
def test_a_long_text_meets_the_codes_of_the_formula(kind, text):
    """The same model, its table written out row by row: stock code and the part's numbers."""
    model, ids = tiny(kind), tokens(4 * WINDOW, batch=2)
    offset = {"roberta": 2, "camembert": 2, "opt": 2, "biogpt": 2}.get(kind, 0)
    part = parse(text).embed  # type: ignore[union-attr]
    weight = table(model).weight.detach()
    codes = part.rows(weight[offset:].double(), torch.arange(4 * WINDOW)).float()
    room = {} if kind not in ("roberta", "camembert") else {"max_position_embeddings": 66}
    longer = tiny(kind, **({"max_position_embeddings": 64} | room))
    held = {k: w for k, w in model.state_dict().items() if w.shape != weight.shape or w is None}
    longer.load_state_dict(held, strict=False)
    table(longer).weight.data = torch.cat([weight[:offset], codes])
    with under(model, text):
        torch.testing.assert_close(out(model, ids), out(longer, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("text", GROWN)
def test_leaving_restores_everything(kind, text):
    model = tiny(kind)
    ids = tokens(WINDOW)
    changed = text if text not in FAITHFUL else "learned_interpolated(16, 2)"
    restored(model, changed, lambda: out(model, ids))
    held = state(model)
    with under(model, text):
        assert state(model) != held and model.state_dict().keys()
    assert state(model) == held


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("text", GROWN)
def test_decoding_is_prefill(kind, text):
    model, ids = tiny(kind, "AutoModelForCausalLM"), tokens(3 * WINDOW, batch=2)
    with under(model, text):
        for prompt in (1, WINDOW + 5):
            torch.testing.assert_close(
                decoded(model, ids, prompt), out(model, ids), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("text", GROWN)
def test_generating_with_left_padding_is_generating_without(kind, text):
    model = tiny(kind, "AutoModelForCausalLM")
    ids, mask = padded_pair(2 * WINDOW, 9)
    options = {"max_new_tokens": WINDOW, "do_sample": False, "eos_token_id": None}
    with under(model, text):
        both = model.generate(ids, attention_mask=mask, **options)
        alone = model.generate(ids[1:, -9:], attention_mask=mask[1:, -9:], **options)
    assert torch.equal(both[1, -WINDOW:], alone[0, -WINDOW:])


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("text", GROWN)
def test_an_encoders_padded_rows_are_its_unpadded_ones(kind, text):
    model, ids = tiny(kind), tokens(3 * WINDOW, batch=2)
    pad = model.config.pad_token_id
    mask = torch.ones_like(ids)
    ids[1, 40:], mask[1, 40:] = pad, 0
    with under(model, text):
        both = out(model, ids, attention_mask=mask)
        alone = out(model, ids[1:, :40], attention_mask=mask[1:, :40])
    torch.testing.assert_close(both[1:, :40], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["BartModel", "BartForConditionalGeneration"])
def test_both_tables_of_an_encoder_decoder_grow(head):
    import transformers

    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=WINDOW, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, head)(config).eval()
    ids = tokens(WINDOW)
    before, held = out(model, ids, decoder_input_ids=ids), state(model)
    with under(model, "hierarchical(16)"):
        assert torch.equal(out(model, ids, decoder_input_ids=ids), before)
        assert out(model, tokens(40), decoder_input_ids=tokens(30, seed=1)).isfinite().all()
    assert state(model) == held


def test_berts_512_reach_262144():
    model = tiny("bert", max_position_embeddings=512, hidden_size=8, intermediate_size=8)
    last = torch.tensor([[0, 511, 512, 262_143]])
    with under(model, "hierarchical(512)"):
        codes = table(model)(last)
        assert model.embeddings.position_ids.shape == (1, 262_144)
        assert out(model, tokens(4, 1), position_ids=last).isfinite().all()
        with pytest.raises(UserError, match="0 to 262143"):
            table(model)(last + 1)
    expected = Hierarchical(512).rows(table(model).weight.detach(), last)
    torch.testing.assert_close(codes, expected)


def test_codes_are_made_in_float32_for_a_bfloat16_table():
    model = tiny("gpt2").bfloat16()
    pos = torch.arange(64)[None]
    with under(model, "hierarchical(16)"):
        codes = table(model)(pos)
    exact = Hierarchical(16).rows(table(model).weight.detach().float(), pos)
    assert codes.dtype == torch.bfloat16 and torch.equal(codes, exact.bfloat16())


def test_the_table_still_learns():
    model = tiny("gpt2", "AutoModelForCausalLM").train()
    ids = tokens(40)
    with under(model, "hierarchical(16)"):
        model(ids, labels=ids).loss.backward()
    grad = model.transformer.wpe.weight.grad
    assert grad is not None and (grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize(
    "kind, text, said",
    [
        ("bert", "hierarchical(8)", "give it length=16"),
        ("bert", "hierarchical(16, offset=2)", "give it length=16"),
        ("roberta", "hierarchical(18)", "length=16 and offset=2"),
        ("opt", "learned_tiled(16, offset=1)", "length=16 and offset=2"),
        ("bert", "learned(32)", "can't read"),
        ("gpt_neo", "hierarchical(16)", "keeps a mask of 16 × 16"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(kind, text, said):
    entries = {"attention_types": [[["global", "local"], 1]]} if kind == "gpt_neo" else {}
    model = tiny(kind, **entries)
    held = state(model)
    with pytest.raises(UserError, match=said), under(model, text):
        pass
    assert state(model) == held


def test_force_reads_fewer_rows_never_more():
    model = tiny("bert")
    with under(model, "hierarchical(8)", force=True):
        assert out(model, tokens(64)).isfinite().all()
    with pytest.raises(UserError, match="length=16"), under(model, "hierarchical(32)", force=True):
        pass


def test_a_wrapped_table_is_refused():
    """As accelerate wraps modules under a device_map: our class would not be asked."""
    model = tiny("gpt2")
    model.wpe.forward = model.wpe.forward
    with pytest.raises(UserError, match="one device"), under(model, "hierarchical(16)"):
        pass


def test_hierarchical_keeps_the_tiny_checkpoint_sane_at_four_times_its_window():
    """Training-free, and so at a price: guessing among bytes is a loss of 5.5."""
    model = asset("tiny-learned")
    short = tail_loss(model, 256)
    with under(model, "hierarchical(256)"):
        assert tail_loss(model, 256) == short < 2.5
        assert tail_loss(model, 1024) < 5.3
    with under(model, "learned_interpolated(256, 4)"):
        assert tail_loss(model, 1024) < 5
