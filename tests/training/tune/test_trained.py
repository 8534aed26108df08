"""What learns: everything, or adapters with embeddings and norms."""

from __future__ import annotations

import pytest
import torch

from longitude.core.validate import UserError
from longitude.training.tune.params import Trained, check_possible, make_trainable


def test_in_full_every_weight_learns_in_float32(llama):
    llama.to(torch.bfloat16)
    assert make_trainable(llama, "full", 4) is llama
    learns = Trained(llama)
    assert learns.names() == [name for name, _ in llama.named_parameters()]
    assert {p.dtype for _, p in learns.named_parameters()} == {torch.float32}
    assert learns.counts()["trained"] == learns.counts()["all"]


def test_with_lora_matrices_embeddings_and_norms_learn(llama):
    pytest.importorskip("peft")
    llama.to(torch.bfloat16)
    make_trainable(llama, "lora", 4)
    names = Trained(llama).names()
    for part in ("lora_A", "lora_B", "embed_tokens", "input_layernorm", "model.norm"):
        assert any(part in name for name in names), part
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    kinds = {p.requires_grad: p.dtype for p in llama.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    counts = Trained(llama).counts()
    assert counts["trained"] < counts["all"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_adapter_changes_nothing_and_embeddings_stay_tied(llama, tied):
    pytest.importorskip("peft")
    llama.config.tie_word_embeddings = tied
    if tied:
        llama.tie_weights()
    ids = torch.arange(12)[None]
    before = llama(ids).logits
    make_trainable(llama, "lora", 4)
    torch.testing.assert_close(llama(ids).logits, before)
    table, head = llama.get_input_embeddings().weight, llama.get_output_embeddings().weight
    assert (table is head or table.data_ptr() == head.data_ptr()) == tied


def test_without_peft_lora_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("longitude.training.tune.params.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install longitude\[tune\]"):
        check_possible("lora")
    check_possible("full")
