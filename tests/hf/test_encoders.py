"""Encoders and encoder-decoders: both sides of the diagonal, cross-attention as it was."""

from __future__ import annotations

import pytest
import torch

from longitude.hf.patch import attention_patched, patched, probed_layers, scheme_of
from tests.hf.tiny import SHAPE, SLIDING, ids, sharp

ENCODERS = {
    "modernbert": {"local_attention": 12, "global_attn_every_n_layers": 2},
    "eurobert": {},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4},
}
SCHEMES = ["rope(remap=rerope(8))", "rope(remap=leaky_rerope(8, 4))", "rope(frequencies=ntk(4))"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request):
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**SHAPE, **ENCODERS[request.param]})
    return sharp(AutoModelForMaskedLM.from_config(config))


@pytest.fixture(scope="module")
def translator():
    from transformers import AutoModelForSeq2SeqLM, T5GemmaConfig
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    torch.manual_seed(0)
    half = {**SHAPE, **SLIDING, "query_pre_attn_scalar": 16}
    config = T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**half),
        decoder=T5GemmaModuleConfig(**half, is_decoder=True),
        vocab_size=97,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = sharp(AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager"))
    model.generation_config.eos_token_id = None
    return model


def padded(model, tokens: int = 40):
    text, mask = ids(tokens, rows=2), torch.ones(2, tokens, dtype=torch.long)
    mask[0, tokens - 10 :] = 0
    return model(text, attention_mask=mask).logits * mask[..., None]


def test_an_encoders_own_scheme_gives_its_own_logits(encoder):
    stock, seen = padded(encoder), probed_layers(encoder)
    assert not any(one.scheme.causal for one in seen)
    with attention_patched(encoder, seen, [one.scheme for one in seen]):
        torch.testing.assert_close(padded(encoder), stock, atol=1e-5, rtol=1e-4)
    with patched(encoder, scheme_of(encoder)):
        assert torch.equal(padded(encoder), stock)
    assert torch.equal(padded(encoder), stock)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_encoder_reads_padded_texts_as_they_are(encoder, scheme):
    text = ids(40, rows=2)
    with patched(encoder, scheme):
        short = encoder(text[:1, :30]).logits
        torch.testing.assert_close(padded(encoder)[:1, :30], short, atol=2e-5, rtol=1e-4)


def test_both_halves_of_an_encoder_decoder_are_patched(translator):
    text, mask = ids(40, rows=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, 30:] = 0

    def said():
        return translator(
            input_ids=text, attention_mask=mask, decoder_input_ids=text[:, :25]
        ).logits

    def told(**more):
        settings = {"max_new_tokens": 10, "do_sample": False, **more}
        return translator.generate(input_ids=text, attention_mask=mask, **settings)

    stock, words, seen = said(), told(), probed_layers(translator)
    assert [one.scheme.causal for one in seen] == [False] * 4 + [True] * 4
    with attention_patched(translator, seen, [one.scheme for one in seen]):
        torch.testing.assert_close(said(), stock, atol=2e-5, rtol=1e-4)
        assert torch.equal(told(), words)
    with patched(translator, "rope(remap=rerope(8))"):
        assert not torch.allclose(said(), stock, atol=1e-3)
        assert torch.equal(told(), told(use_cache=False))
    assert torch.equal(said(), stock)
