"""The loss by slices is the plain one, and so is its gradient."""

from __future__ import annotations

import pytest
import torch

from longitude.training.loss import chunked_loss, plain_loss


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
