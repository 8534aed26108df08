"""The loss's kernels over a slice of logits, beside their twins in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longitude.ops.kernels import loss as kernels
from longitude.training import loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def slice_of(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits of five tokens, whose targets lie before, in and after the slice."""
    torch.manual_seed(size)
    logits = (4 * torch.randn(5, size)).to(DEVICE, dtype)
    y = torch.tensor([-3, 0, size // 2, size - 1, size + 7], device=DEVICE)
    sums = torch.tensor([-torch.inf, 1.0, -30.0, 40.0, 0.0], device=DEVICE)
    return logits, y, sums, torch.arange(5.0, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 13, 4096, 5000])
def test_a_slice_is_added_to_the_sums_before_it(size, dtype, monkeypatch):
    logits, y, sums, told = slice_of(size, dtype)
    monkeypatch.setattr(loss, "usable", lambda x: False)
    wanted = loss.gather(logits, y, sums, told)
    for made, want in zip(kernels.gather(logits, y, sums, told), wanted, strict=True):
        torch.testing.assert_close(made, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 13, 4096, 5000])
def test_the_gradient_stands_where_the_logits_stood(size, dtype, monkeypatch):
    logits, y, sums, by = slice_of(size, dtype)
    sums[0] = 3.0
    monkeypatch.setattr(loss, "usable", lambda x: False)
    wanted = loss.slopes(logits, y, sums, by)
    made = kernels.slopes(logits, y, sums, by)
    assert made.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(made, wanted)


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_on_a_gpu_the_loss_in_bfloat16_is_near_the_one_in_float32():
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((300, 64), (20000, 64))
    )
    y, weights = torch.randint(20000, (300,), device=DEVICE), torch.rand(300, device=DEVICE)
    wanted = loss.plain_loss(hidden @ weight.mT, y, weights)
    with torch.autocast("cuda", torch.bfloat16):
        found = loss.chunked_loss(hidden, weight, y, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0.0)
    grads = (torch.autograd.grad(x, (hidden, weight)) for x in (found, wanted))
    for made, want in zip(*grads, strict=True):
        assert (made - want).norm() < 2e-2 * want.norm()
