"""The loss: by slices it is the plain one; of a model it is that of its own logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from longitude.hf import layer
from longitude.hf.loading import load
from longitude.hf.patch import apply
from longitude.ops.attention import attention
from longitude.training.loss import LossModel, chunked_loss, plain_loss

SCHEMES = ["rope(remap=leaky_rerope(4, 8))", "rope(frequencies=yarn(2, original=256))"]
N = 24


@pytest.mark.parametrize(
    ("vocabulary", "size", "biased"), [(50, 7, False), (64, 16, True), (5, 9, True)]
)
def test_by_slices_it_is_the_plain_one(vocabulary, size, biased):
    torch.manual_seed(0)
    given = {"dtype": torch.float64, "requires_grad": True}
    hidden, weight = torch.randn(2, 6, 8, **given), torch.randn(vocabulary, 8, **given)
    bias = torch.randn(vocabulary, **given) if biased else None
    targets = torch.randint(vocabulary, (2, 6))
    weights = torch.rand(2, 6, dtype=torch.float64)
    learn = [x for x in (hidden, weight, bias) if x is not None]

    logits = hidden @ weight.mT + (0 if bias is None else bias)
    each = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    wanted = (each * weights).sum()
    found = chunked_loss(hidden, weight, targets, weights, bias, size)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(plain_loss(logits, targets, weights), wanted)
    for a, b in zip(
        torch.autograd.grad(found, learn), torch.autograd.grad(wanted, learn), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_logits_far_from_zero_do_not_overflow():
    hidden, weight = torch.full((1, 1, 1), 100.0), torch.tensor([[3.0], [2.0], [-3.0]])
    loss = chunked_loss(hidden, weight, torch.tensor([[0]]), torch.ones(1, 1), size=1)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


def batch(vocabulary=61, seed=0):
    row = torch.randint(vocabulary, (2, N + 1), generator=torch.Generator().manual_seed(seed))
    return row[:, :-1], row[:, 1:], torch.rand(2, N, generator=torch.Generator().manual_seed(1))


def plain(logits, targets, weights):
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


@pytest.mark.parametrize("text", [None, "rope(remap=leaky_rerope(8, 4))"])
def test_it_is_the_cross_entropy_of_the_models_logits(llama, text):
    if text:
        apply(llama, text)
    tokens, targets, weights = batch()
    pos = torch.arange(N).expand(2, -1)
    model_loss = LossModel(llama)
    assert model_loss.plain_head and model_loss.separates_documents()
    found = model_loss(tokens, pos, targets, weights)
    torch.testing.assert_close(found, plain(llama(tokens).logits, targets, weights))


@pytest.mark.parametrize("text", [None, "rope(remap=leaky_rerope(8, 4))"])
def test_packed_documents_are_read_as_each_alone(llama, text):
    if text:
        apply(llama, text)
    tokens, targets, weights = batch()
    cut = 10
    pos = torch.cat([torch.arange(cut), torch.arange(N - cut)]).expand(2, -1)
    alone = [
        plain(llama(tokens[:, some]).logits, targets[:, some], weights[:, some])
        for some in (slice(cut), slice(cut, None))
    ]
    found = LossModel(llama)(tokens, pos, targets, weights)
    torch.testing.assert_close(found, sum(alone))


@pytest.mark.parametrize("text", ["rope(frequencies=linear(2))", "rope(remap=leaky_rerope(8, 4))"])
def test_a_skip_of_drawn_positions_is_no_new_document(llama, text):
    """What the first chunk holds is seen by the second."""
    apply(llama, text)
    tokens, targets, weights = batch()
    weights[:, :-1] = 0  # the last token alone is scored
    pos = torch.cat([torch.arange(10), torch.arange(40, 40 + N - 10)]).expand(2, -1)
    model_loss = LossModel(llama, drawn=True)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 61
    a, b = (model_loss(t, pos, targets, weights).item() for t in (tokens, other))
    assert a != b
    full = llama(tokens, position_ids=pos, attention_mask=torch.ones_like(tokens)).logits
    assert a == pytest.approx(plain(full, targets, weights).item(), rel=1e-5)


@pytest.mark.parametrize(("name", "packs"), [("tiny-learned", True), ("tiny-alibi", False)])
def test_other_families_say_what_they_can(name, packs):
    model, _ = load(name, device="cpu", quiet=True)
    model_loss = LossModel(model)
    tokens, targets, weights = batch(256)
    assert model_loss.separates_documents() is packs
    found = model_loss(tokens, torch.arange(N).expand(2, -1), targets, weights)
    torch.testing.assert_close(found, plain(model(tokens).logits, targets, weights))


def test_a_head_that_does_more_than_multiply_is_asked_itself():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=1.0,
        initializer_range=0.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    tokens, targets, weights = batch()
    model_loss = LossModel(model)
    assert not model_loss.plain_head
    found = model_loss(tokens, torch.arange(N).expand(2, -1), targets, weights)
    torch.testing.assert_close(found, plain(model(tokens).logits, targets, weights))


def gradients(model_loss: LossModel) -> tuple[float, dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(61, (2, 60), generator=rng) for _ in range(2))
    pos = torch.cat([torch.arange(45), torch.arange(15)]).expand(2, -1)  # two documents
    weights = torch.rand(2, 60, generator=rng, dtype=torch.float64)
    model_loss.zero_grad()
    loss = model_loss(tokens, pos, targets, weights)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model_loss.named_parameters()}


@pytest.mark.parametrize(
    "text",
    [
        "rope(remap=leaky_rerope(16, 4))",
        "rope(remap=rerope(16))",
        "rope(remap=self_extend(4, 16))",
        "rope(remap=dual_chunk(24, 8))",
        "rope(frequencies=yarn(4, original=16)) + window(12) + logn(16)",
    ],
)
def test_merged_passes_have_the_gradients_of_eager(llama, text, monkeypatch):
    apply(llama.double(), text)
    model_loss = LossModel(llama)
    loss, made = gradients(model_loss)
    monkeypatch.setattr(layer, "attention", partial(attention, backend="eager"))
    wanted_loss, wanted = gradients(model_loss)
    assert loss == pytest.approx(wanted_loss, rel=1e-9)
    for name, want in wanted.items():
        torch.testing.assert_close(made[name], want, rtol=1e-7, atol=1e-9)


# some CPUs have no bfloat16 product, and warn about it
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("scheme", SCHEMES, ids=["ours", "stock"])
def test_the_loss_in_bfloat16_is_near_the_one_in_float32(llama, scheme):
    apply(llama, scheme)
    model_loss, ids, pos = LossModel(llama), torch.arange(12)[None], torch.arange(12)[None]
    losses = []
    for mixed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model_loss(ids, pos, ids + 1, torch.ones(1, 12))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
