"""A window's gradients by causal tiles, under the softmax of more than the window: the twin's, on a
CPU by torch's kernel there, on a GPU by cuDNN's."""

from __future__ import annotations

import pytest
import torch

from longitude.ops import swa_cudnn as paved
from longitude.ops.aten import CPU
from longitude.ops.band import Band, Part, backward_eager, eager
from longitude.ops.rented import Rent

LAID = [False, True]  # heads before tokens in memory, or tokens before heads


def a_window(wide: int, n: int, dtype: torch.dtype, laid: bool, heads=(6, 2)) -> Part:
    rng = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    h, hkv = heads
    q, k, v = (torch.randn(2, one, n, 64, generator=rng).to(device, dtype) for one in (h, hkv, hkv))
    if laid:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return Part(q, k, v, None, Band(0, wide), 0.125)


def in_a_larger_softmax(part: Part):
    out, lse = eager(part._replace(band=Band(0, part.q.shape[2])))
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out), out, lse


@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize(("wide", "n"), [(8, 16), (4, 20), (2, 6)])
def test_tiles_give_the_gradients_of_the_band(wide, n, laid):
    part = a_window(wide, n, torch.float32, laid)
    part = part._replace(q=part.q.cpu(), k=part.k.cpu(), v=part.v.cpu())
    given = in_a_larger_softmax(part)
    made = paved.backward(part, *given, by=CPU)
    for one, want in zip(made[:3], backward_eager(part, *given)[:3], strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-5)


def test_only_whole_blocks_worth_a_launch_are_paved(monkeypatch):
    monkeypatch.setattr(paved, "cudnn_for", lambda q: paved.CUDNN)
    assert paved.takes(a_window(2048, 4096, torch.bfloat16, False, heads=(1, 1)))
    assert not paved.takes(a_window(2048, 5000, torch.bfloat16, False, heads=(1, 1)))
    assert not paved.takes(a_window(1024, 4096, torch.bfloat16, False, heads=(1, 1)))
    assert not paved.takes(a_window(4096, 4096, torch.bfloat16, False, heads=(1, 1)))
    assert not paved.takes(a_window(2048, 4096, torch.float32, False, heads=(1, 1)))


def test_a_shape_is_paved_once_it_has_paid_for_its_plans(monkeypatch):
    part = a_window(2048, 4096, torch.bfloat16, False, heads=(1, 1))
    one = paved.SHARE * 4.0 * part.q.numel() * 2048
    monkeypatch.setattr(paved, "RENT", Rent(2.5 * one))
    assert [paved.due(part) for _ in range(5)] == [True, True, True, False, False]


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)])
def test_cudnn_gives_the_gradients_of_the_band(laid, heads):
    part = a_window(2048, 6144, torch.bfloat16, laid, heads)
    if not paved.takes(part):
        pytest.skip("cuDNN is not the fastest here")
    grad, out, lse = in_a_larger_softmax(part)
    if laid:
        grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
    made = paved.backward(part, grad, out, lse)
    for one, want in zip(made[:3], backward_eager(part, grad, out, lse)[:3], strict=True):
        assert (one.float() - want).norm() < 1e-2 * want.norm()
