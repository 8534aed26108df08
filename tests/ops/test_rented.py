"""Two kernels for one shape: when the one that plans has paid for its plan."""

import torch
from torch import Tensor

from longitude.ops.aten import CPU, Operator, Ran
from longitude.ops.rented import Rent, Rented


def counted(calls: list[str], name: str) -> Operator:
    """The CPU's kernel under another name."""

    def forward(*args: object) -> Ran:
        calls.append(name)
        return CPU.forward(*args)

    def backward(*args: object) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(f"{name} backward")
        return CPU.backward(*args)

    return Operator(forward, backward)


def drawn(n: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, 8, generator=rng) for _ in range(3)]


def test_a_shape_that_comes_again_is_planned() -> None:
    calls: list[str] = []
    price = 3 * 2.0 * 2 * 16 * 8 * 16  # what three causal calls of 16 tokens come to
    rented = Rented(counted(calls, "ready"), counted(calls, "planned"), Rent(price))
    for _ in range(5):
        rented.forward(*drawn(16), True, 1.0)
    assert calls == ["ready"] * 3 + ["planned"] * 2
    calls.clear()
    rented.forward(*drawn(17), True, 1.0)  # another shape begins anew
    rented.forward(*drawn(16), False, 1.0)
    rented.forward(*drawn(16), True, 1.0)
    assert calls == ["ready", "ready", "planned"]


def test_backward_is_of_the_kernel_that_ran() -> None:
    calls: list[str] = []
    rented = Rented(counted(calls, "ready"), counted(calls, "planned"), Rent(1.0))
    q, k, v = drawn(16)
    first = rented.forward(q, k, v, True, 1.0)
    second = rented.forward(q, k, v, True, 1.0)
    expected = CPU.backward(q, q, k, v, CPU.forward(q, k, v, True, 1.0), True, 1.0)
    for ran in (second, first):
        for one, other in zip(rented.backward(q, q, k, v, ran, True, 1.0), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert calls == ["ready", "planned", "planned backward", "ready backward"]


def test_what_is_remembered_stays_small(monkeypatch) -> None:
    monkeypatch.setattr("longitude.ops.rented.SHAPES", 4)
    rented = Rented(CPU, CPU, Rent(1e30))
    for n in range(1, 10):
        rented.forward(*drawn(n), True, 1.0)
    assert len(rented.rent.paid) == 4
