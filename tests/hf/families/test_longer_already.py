"""T5 and DeBERTa run past their usual length by themselves: their distances are bucketed or
clamped."""

import pytest
import torch

from tests.hf.families.models import out, tiny, tokens

T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "vocab_size": 97,
}  # fmt: skip
DEBERTA = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"],
}  # fmt: skip
LONG = 96  # six times what the tiny models are made for


def t5():
    import transformers

    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()


def test_t5_decodes_as_it_prefills():
    model, ids, answer = t5(), tokens(LONG), tokens(LONG, seed=1)
    whole = out(model, ids, decoder_input_ids=answer)
    with torch.no_grad():
        made = model(input_ids=ids, decoder_input_ids=answer[:, :20], use_cache=True)
        parts, seen = [made.logits], made.encoder_outputs if "encoder_outputs" in made else None
        seen = seen or (made.encoder_last_hidden_state,)
        for t in range(20, LONG):
            made = model(
                encoder_outputs=seen,
                decoder_input_ids=answer[:, t : t + 1],
                past_key_values=made.past_key_values,
            )
            parts.append(made.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_t5_padded_is_unpadded():
    model, ids, answer = t5(), tokens(LONG, batch=2), tokens(LONG, batch=2, seed=1)
    mask = torch.ones_like(ids)
    ids[1, 70:], mask[1, 70:] = 0, 0
    both = out(model, ids, attention_mask=mask, decoder_input_ids=answer)
    alone = out(model, ids[1:, :70], decoder_input_ids=answer[1:])
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind, entries",
    [
        ("deberta", {"max_relative_positions": 16}),
        ("deberta-v2", {"max_relative_positions": 16}),
        (
            "deberta-v2",
            {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        ),
    ],
)
def test_deberta_padded_is_unpadded(kind, entries):
    model, ids = tiny(kind, **DEBERTA, **entries), tokens(LONG, batch=2)
    mask = torch.ones_like(ids)
    ids[1, 70:], mask[1, 70:] = 0, 0
    both = out(model, ids, attention_mask=mask)
    alone = out(model, ids[1:, :70], attention_mask=mask[1:, :70])
    assert both.isfinite().all()
    torch.testing.assert_close(both[1:, :70], alone, rtol=1e-4, atol=1e-4)
