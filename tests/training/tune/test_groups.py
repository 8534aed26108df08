"""LongLoRA's groups against attention written out with one mask for each half of the heads."""

from __future__ import annotations

import pytest
import torch

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.patch import apply, undo
from longitude.training.tune.shifted_groups import grouped, shifted

N, SIZE = 32, 8


def written_out(model, layer, x, pos, position_ids):
    """What a layer's attention gives, from its weights alone."""
    attention = layer.self_attn
    cos, sin = model.model.rotary_emb(x, position_ids)
    q, k, v = (
        proj(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )

    def turned(y):
        a, b = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

    heads, half = q.shape[1], q.shape[1] // 2
    k, v = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k, v))
    scores = turned(q) @ turned(k).mT / attention.head_dim**0.5
    i, j = torch.arange(pos.shape[-1])[:, None], torch.arange(pos.shape[-1])
    masks = [
        (i >= j) & ((pos[i] + move) // SIZE == (pos[j] + move) // SIZE) for move in (0, SIZE // 2)
    ]
    seen = torch.stack([masks[h >= half] for h in range(heads)])
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def test_half_the_heads_have_their_groups_moved_by_half(llama):
    llama.double()
    apply(llama, grouped(parse("rope(frequencies=linear(2))"), SIZE))
    seen = {}
    layer = llama.model.layers[0]
    hook = layer.self_attn.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(x=kwargs["hidden_states"], out=out[0]),
        with_kwargs=True,
    )
    ids = torch.randint(61, (2, N), generator=torch.Generator().manual_seed(1))
    with shifted(llama, SIZE), torch.no_grad():
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
    apply(llama, grouped(parse("rope(frequencies=linear(2))"), SIZE))
    x = llama.get_input_embeddings()(torch.arange(N)[None]).detach().requires_grad_()
    with shifted(llama, SIZE):
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
        apply(llama, grouped(parse("rope(frequencies=linear(2))"), SIZE))
        with shifted(llama, SIZE):
            within = llama(ids, use_cache=False).logits
        apply(llama, "rope(frequencies=linear(2))")
        after = llama(ids, use_cache=False).logits
    assert torch.equal(before, after) and not torch.allclose(before, within)


@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(16, 8))", "rope() + logn(64)"])
def test_schemes_of_absolute_positions_are_refused(text):
    with pytest.raises(UserError, match="schemes of distances alone"):
        grouped(parse(text), SIZE)
