"""A model as it is fine-tuned: what learns, gradient checkpointing, and LongLoRA's groups against
attention written out with one mask for each half of the heads."""

from __future__ import annotations

import pytest
import torch

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.patch import apply, undo
from longitude.training.checkpoint import trainable_parameters
from longitude.training.tune.model import (
    check_peft,
    grouped_scheme,
    make_trainable,
    shifted_groups,
)
from tests.hf.tiny import checkpointed

N, SIZE = 32, 8
ORDER = torch.arange(40)[None]
PACKED = torch.cat([torch.arange(25), torch.arange(15)])[None]
SKIPS = torch.cat([torch.arange(20), torch.arange(120, 140)])[None]


def written_out(model, layer, x, pos, position_ids):
    """What a layer's attention gives, from its weights alone."""
    attention = layer.self_attn
    cos, sin = model.model.rotary_emb(x, position_ids)
    q, k, v = (
        proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )

    def rotated(y):
        a, b = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

    heads, half = q.shape[1], q.shape[1] // 2
    k, v = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k, v))
    scores = rotated(q) @ rotated(k).mT / attention.head_dim**0.5
    i, j = torch.arange(pos.shape[-1])[:, None], torch.arange(pos.shape[-1])
    masks = [
        (i >= j) & ((pos[i] + move) // SIZE == (pos[j] + move) // SIZE) for move in (0, SIZE // 2)
    ]
    seen = torch.stack([masks[h >= half] for h in range(heads)])
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def test_half_the_heads_have_their_groups_moved_by_half(llama):
    llama.double()
    apply(llama, grouped_scheme(parse("rope(frequencies=linear(2))"), SIZE))
    seen = {}
    layer = llama.model.layers[0]
    hook = layer.self_attn.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(x=kwargs["hidden_states"], out=out[0]),
        with_kwargs=True,
    )
    ids = torch.randint(61, (2, N), generator=torch.Generator().manual_seed(1))
    with shifted_groups(llama, SIZE), torch.no_grad():
        llama(ids, use_cache=False)
    hook.remove()
    undo(llama)
    apply(llama, "rope(frequencies=linear(2))")  # transformers' own turns, by other frequencies
    pos = torch.arange(N)
    with torch.no_grad():
        wanted = written_out(llama, layer, seen["x"], pos, pos[None])
    torch.testing.assert_close(seen["out"], wanted)


def test_nothing_leaks_across_the_wrap(llama):
    """A rolled sequence would let its first tokens see the last ones."""
    apply(llama, grouped_scheme(parse("rope(frequencies=linear(2))"), SIZE))
    x = llama.get_input_embeddings()(torch.arange(N)[None]).detach().requires_grad_()
    with shifted_groups(llama, SIZE):
        logits = llama(inputs_embeds=x, use_cache=False).logits
    for t in (0, SIZE // 2 - 1, SIZE, N - 2):
        (grad,) = torch.autograd.grad(logits[0, t].sum(), x, retain_graph=True)
        reach = grad[0].abs().sum(-1).nonzero()[:, 0]
        assert reach.max() == t
    assert reach.min() > N // 2 - SIZE  # two layers see two groups back, and no further


def test_full_attention_afterwards(llama):
    ids = torch.arange(N)[None]
    apply(llama, "rope(frequencies=linear(2))")
    with torch.no_grad():
        before = llama(ids, use_cache=False).logits
        apply(llama, grouped_scheme(parse("rope(frequencies=linear(2))"), SIZE))
        with shifted_groups(llama, SIZE):
            within = llama(ids, use_cache=False).logits
        apply(llama, "rope(frequencies=linear(2))")
        after = llama(ids, use_cache=False).logits
    assert torch.equal(before, after) and not torch.allclose(before, within)


@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(16, 8))", "rope() + logn(64)"])
def test_schemes_of_absolute_positions_are_refused(text):
    with pytest.raises(UserError, match="schemes of distances alone"):
        grouped_scheme(parse(text), SIZE)


def test_groups_keep_the_layers_that_differ():
    assert grouped_scheme(parse("split(linear(2), rope(), share=0.25)"), 8) == (
        "split(linear(2) + chunked(8), rope() + chunked(8), share=0.25)"
    )
    assert grouped_scheme(parse("layers(rope(), causal())"), 8) == (
        "layers(rope() + chunked(8), chunked(8))"
    )


def test_in_full_every_weight_learns_in_float32(llama):
    llama.to(torch.bfloat16)
    assert make_trainable(llama, "full", 4) is llama
    learns = trainable_parameters(llama)
    assert [name for name, _ in learns] == [name for name, _ in llama.named_parameters()]
    assert {p.dtype for _, p in learns} == {torch.float32}


def test_with_lora_matrices_embeddings_and_norms_learn(llama):
    pytest.importorskip("peft")
    llama.to(torch.bfloat16)
    make_trainable(llama, "lora", 4)
    names = [name for name, _ in trainable_parameters(llama)]
    for part in ("lora_A", "lora_B", "embed_tokens", "input_layernorm", "model.norm"):
        assert any(part in name for name in names), part
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    kinds = {p.requires_grad: p.dtype for p in llama.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


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
    monkeypatch.setattr("longitude.training.tune.model.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install longitude\[tune\]"):
        check_peft("lora")
    check_peft("full")


def gradients(model, pos):
    model.train().zero_grad()
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids) if pos is SKIPS else None
    given = {"position_ids": pos.expand(2, -1), "attention_mask": mask, "use_cache": False}
    model(ids, labels=ids, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("pos", [ORDER, PACKED, SKIPS], ids=["order", "packed", "skips"])
@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(8, 4))", "rope(frequencies=linear(2))"])
def test_gradients_are_those_of_one_run(llama, text, pos):
    apply(llama, text)
    once = gradients(llama, pos)
    checkpointed(llama)
    again = gradients(llama, pos)
    for name, wanted in once.items():
        torch.testing.assert_close(again[name], wanted)


def test_shifted_groups_run_again_as_well(llama):
    apply(llama, grouped_scheme(parse("rope()"), 8))
    with shifted_groups(llama, 8):
        once = gradients(llama, PACKED)
        checkpointed(llama)
        again = gradients(llama, PACKED)
    undo(llama)
    assert not torch.allclose(gradients(llama, PACKED)["lm_head.weight"], once["lm_head.weight"])
    for name, wanted in once.items():
        torch.testing.assert_close(again[name], wanted)
