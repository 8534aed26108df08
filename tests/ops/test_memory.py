"""Memory is linear in n: no tensor that a call makes, and nothing it keeps for backward, grows as
n²."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longitude import Dims, attention
from longitude.ops import eager, sdpa
from tests.grid import scheme

HEADS, D = 2, 16


class Largest(TorchDispatchMode):
    """Watches the size of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor):
                self.numel = max(self.numel, made.untyped_storage().nbytes() // made.element_size())
        return out


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (eager, sdpa):
        monkeypatch.setattr(module, "BLOCK_SCORES", 2**14)


def watch(text: str, n: int, backend: Any, grad: bool, **options: Any) -> tuple[int, int]:
    """The largest tensor of a call, and how many numbers it keeps for backward."""
    s, kept = scheme(text), 0
    rng = torch.Generator().manual_seed(0)
    x = [torch.randn(1, HEADS, n, D, generator=rng, requires_grad=grad) for _ in range(3)]
    weights = s.init(Dims(32, HEADS, D), rng)

    def keep(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.numel()
        return t

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        attention(s, *x, range(n), range(n), weights, backend=backend, **options)
    return largest.numel, kept


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("rope(remap=leaky_rerope(64, 8))", "native"),
        ("rope(remap=dual_chunk(96, 24))", "native"),
        ("rope() + window(64, sinks=4)", "native"),
        pytest.param("alibi()", "native", marks=pytest.mark.slow),
        pytest.param("t5()", "native", marks=pytest.mark.slow),
        pytest.param("rope(remap=leaky_rerope(64, 8)) + alibi()", "auto", marks=pytest.mark.slow),
        pytest.param("rope(remap=rerope(64))", "eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_memory_is_linear(text: str, backend: Any, grad: bool) -> None:
    sizes = [watch(text, n, backend, grad) for n in (512, 1024, 2048)]
    for small, large in pairwise(sizes):
        assert large[0] <= 2.1 * small[0], sizes
        assert large[1] <= 2.6 * small[1] + 1, sizes  # far keys have an output from some length on
    assert sizes[-1][0] < 2048 * 2048 / 4, sizes
