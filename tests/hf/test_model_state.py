"""What a forward of a patched model takes from its arguments: total lengths, masks, attention."""

from __future__ import annotations

import pytest
import torch

from longitude.core.validate import UserError
from longitude.hf.patch import patched
from tests.hf.test_architectures import greedy
from tests.hf.tiny import decoder, ids, shared

BY_LENGTH = "rope(frequencies=dynamic_ntk(16, 4))"
REMAP = "rope(remap=rerope(10))"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits(model, *args, **given):
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
    out = model.generate(*args, **settings, return_dict_in_generate=True, **given)
    return torch.stack(out.logits, 1)


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_the_length_of_embedded_tokens_is_that_of_their_ids():
    model, text = shared("llama"), ids(40, rows=2)
    embedded = model.get_input_embeddings()(text)
    with patched(model, BY_LENGTH):
        close(logits(model, inputs_embeds=embedded), logits(model, text))


def test_the_length_of_a_chunked_prompt_is_without_all_of_its_padding():
    model, text = shared("llama"), ids(40, rows=2)
    mask = torch.ones_like(text)
    mask[1, :20] = 0  # more than the first chunk
    with patched(model, BY_LENGTH):
        once = logits(model, text, attention_mask=mask)
        close(logits(model, text, attention_mask=mask, prefill_chunk_size=8), once)
        close(once[1:], logits(model, text[1:, 20:]))


def test_an_adapter_generates_for_the_length_of_its_model():
    peft = pytest.importorskip("peft")
    model, text = decoder("llama"), ids(40)
    with patched(model, BY_LENGTH):
        said = greedy(model, text)
    adapter = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with patched(adapter, BY_LENGTH):
        assert torch.equal(greedy(adapter, text), said)
        assert torch.equal(greedy(adapter, text, use_cache=False), said)


def test_an_assistant_is_asked_again_and_again():
    model, text = shared("llama"), ids(40)
    assistant = decoder("llama", seed=1, num_hidden_layers=1)
    with patched(model, BY_LENGTH), patched(assistant, BY_LENGTH):
        said = greedy(model, text, use_cache=False)
        assert torch.equal(greedy(model, text, assistant_model=assistant), said)


@pytest.mark.parametrize("scheme", [REMAP, BY_LENGTH])
def test_an_early_exit_assists(scheme):
    model, text = decoder("llama"), ids(40)
    with patched(model, scheme):
        said = greedy(model, text, use_cache=False)
        assert torch.equal(greedy(model, text, assistant_early_exit=2), said)


def test_a_mask_has_a_column_for_each_token():
    model, text = shared("llama"), ids(40, rows=2)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    with patched(model, REMAP):
        for columns in (30, 60):
            with pytest.raises(UserError, match=f"{columns} columns for 40 tokens"):
                model(text, attention_mask=mask[:, :columns])


def test_attention_weights_are_refused():
    model = shared("llama")
    with patched(model, REMAP), pytest.raises(UserError, match="no attention weights"):
        model(ids(20), output_attentions=True)
