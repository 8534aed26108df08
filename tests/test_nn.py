"""The two modules: parameters from the parts, results from `attention`, angles that no cast
reaches."""

from __future__ import annotations

import pytest
import torch

from longitude import Cache, Dims, UserError, attention, parse
from longitude.nn import PositionAttention, PositionEmbedding
from tests.grid import scheme

DIMS = Dims(32, 4, 8)


def qkv(n: int = 12) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, n, 8, generator=rng) for h in (4, 2, 2)]


def test_embedding_draws_positions_and_adds_them() -> None:
    module = PositionEmbedding("randomized(64) + sinusoidal()", 32)
    drawn = module.positions(10, torch.Generator().manual_seed(1))
    assert isinstance(drawn, torch.Tensor) and drawn.unique().numel() == 10
    x = torch.zeros(1, 10, 32)
    assert torch.allclose(module(x, drawn)[0, :, 0], drawn.double().sin().float(), atol=1e-6)
    assert not list(module.parameters())


def test_learned_positions_train_and_name_hierarchical_past_their_table() -> None:
    module = PositionEmbedding("learned(16) + rope()", 32)
    module(torch.zeros(1, 16, 32), range(16)).sum().backward()
    assert [p.shape for p in module.parameters()] == [(16, 32)]
    with pytest.raises(UserError, match=r"hierarchical\(16\)"):
        module(torch.zeros(1, 17, 32), range(17))


def test_attention_module_is_attention_with_its_parameters() -> None:
    module = PositionAttention("t5() + ssmax()", DIMS, rng=torch.Generator().manual_seed(0))
    assert {name for name, _ in module.named_parameters()} == {
        "weights.t5/table",
        "weights.ssmax/s",
    }
    q, k, v = qkv()
    out = module(q, k, v, range(12))
    weights = {"t5.table": module.weights["t5/table"], "ssmax.s": module.weights["ssmax/s"]}
    assert torch.equal(
        out, attention(scheme("t5() + ssmax()"), q, k, v, range(12), range(12), weights)
    )
    out.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_each_layer_takes_its_own_scheme() -> None:
    text = "layers(rope() + window(4), rope() + window(4), t5())"
    modules = [PositionAttention(text, DIMS, layer=n, layers=6) for n in range(6)]
    assert [str(m.scheme) for m in modules] == [
        "rope() + window(4)",
        "rope() + window(4)",
        "t5()",
    ] * 2
    with pytest.raises(UserError, match="do not tile"):
        PositionAttention(text, DIMS, layer=0, layers=7)


def test_decoding_with_a_cache_equals_the_whole() -> None:
    module = PositionAttention("rope(frequencies=dynamic_yarn(4), remap=leaky_rerope(4, 2))", DIMS)
    q, k, v = qkv()
    whole, cache = module(q, k, v, range(12)), Cache(module.scheme, length=12)
    for t in range(12):
        here = (slice(None), slice(None), slice(t, t + 1))
        got = module(q[here], k[here], v[here], range(t, t + 1), cache=cache)
        assert torch.allclose(got, whole[here], atol=1e-5, rtol=0)


def test_a_cast_reaches_no_angle() -> None:
    module = PositionAttention("rope() + kerple_log()", DIMS)
    n, start = 6, 1_000_000
    near = module(*qkv(n), range(n))
    module.to(torch.bfloat16).to(torch.float32)
    weights = [p.detach().clone() for p in module.parameters()]
    far = module(*qkv(n), range(start, start + n))
    assert torch.allclose(near, far, atol=2e-2)  # the learned bias was rounded, and nothing else
    plain = PositionAttention("rope()", DIMS)
    want = plain(*qkv(n), range(n))
    plain.to(torch.bfloat16)
    assert torch.allclose(plain(*qkv(n), range(start, start + n)), want, atol=1e-5)
    assert not list(plain.buffers()) and weights


def test_state_round_trips() -> None:
    a, b = (
        PositionAttention("shaw(4)", DIMS, rng=torch.Generator().manual_seed(n)) for n in (0, 1)
    )
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(*qkv(), range(12)), b(*qkv(), range(12)))
    assert str(parse("shaw(4)")) in repr(a)
