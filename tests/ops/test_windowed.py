"""Which bands flash attention's windows take, and on a GPU that their gradients are the band's."""

from __future__ import annotations

import pytest
import torch

from longitude.ops import swa_flash as windowed
from longitude.ops.band import Band, Bias, Part, backward_eager, eager


def a_band(lo: int, hi: int, n: int, m: int, **more: object) -> Part:
    rng = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.randn(2, h, t, 64, generator=rng).to(device, torch.bfloat16)
        for h, t in ((6, n), (2, m), (2, m))
    )
    return Part(q, k, v, None, Band(lo, hi), 0.125)._replace(**more)


def test_causal_windows_of_half_types_are_taken():
    assert windowed.takes(a_band(0, 7, 20, 20))
    assert windowed.takes(a_band(0, 20, 20, 20))
    assert not windowed.takes(a_band(1, 7, 20, 20)), "the diagonal is missing"
    assert not windowed.takes(a_band(0, 7, 20, 24)), "rows and columns begin elsewhere"
    assert not windowed.takes(a_band(0, 7, 20, 20, bias=Bias(torch.zeros(6, 3), 0)))
    wide = a_band(0, 7, 20, 20)
    assert not windowed.takes(wide._replace(q=wide.q.float()))


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("hi", "n"), [(1, 40), (100, 300), (300, 300), (128, 1024)])
def test_its_gradients_are_those_of_the_band_in_a_larger_softmax(hi, n):
    part = a_band(0, hi, n, n)
    assert windowed.takes(part)
    whole = part._replace(band=Band(0, n))
    out, lse = eager(whole)
    grad = torch.randn_like(out)
    wanted = backward_eager(part, grad, out, lse)
    made = windowed.backward(part, grad.transpose(1, 2).contiguous().transpose(1, 2), out, lse)
    for one, want in zip(made[:3], wanted[:3], strict=True):
        assert (one.float() - want).norm() < 1e-2 * want.norm()
