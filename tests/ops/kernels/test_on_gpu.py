"""On a GPU: turning and joining at real sizes, in CUDA graphs, and past what 32 bits count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longitude import attention, parse
from longitude.ops import plan as plans
from longitude.ops.inputs import prepare
from longitude.ops.lse_merge import MergeOneByOne, TileOutput
from longitude.parts.rope import Pairs, apply_rotary
from longitude.parts.rotary_tables import Tables

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device="cuda", dtype=dtype)


def tables(n: int, half: int, batch: int = 1, start: int = 0) -> Tables:
    inv = 10000.0 ** (-torch.arange(half, device="cuda", dtype=torch.float64) / half)
    first = start + 1000 * torch.arange(batch, device="cuda", dtype=torch.float64)
    angle = (first[:, None, None, None] + torch.arange(n, device="cuda")[:, None]) * inv
    return angle.cos().float(), angle.sin().float()


def error(got: Tensor, x: Tensor, by: Tables, pairs: Pairs) -> float:
    """Against float64, on 256 tokens."""
    rows = torch.randint(x.shape[2], (256,), device="cuda")
    want = apply_rotary(x[:, :, rows].double(), *(t[:, :, rows].double() for t in by), pairs)
    return float((got[:, :, rows].double() - want).norm() / want.norm())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor by the kernel."""
    from longitude.ops.kernels.rope import rotate_qk

    return rotate_qk(x, x[:, :1], (cos, sin), (cos, sin))[0]


@pytest.mark.parametrize("half", [64, 32])
@pytest.mark.parametrize("pairs", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_turned_at_real_size(pairs: Pairs, half: int, dtype: torch.dtype) -> None:
    from longitude.ops.kernels.rope import rotate_qk

    n = 8192
    q = drawn(4, n, 32, 128, dtype=dtype).transpose(1, 2).requires_grad_()
    k = drawn(4, 8, n, 128, seed=1, dtype=dtype).requires_grad_()
    q_by, k_by = tables(n, half), tables(n, half, batch=4, start=10_000_000)
    got = rotate_qk(q, k, q_by, k_by, pairs)
    least = 3e-3 if dtype == torch.bfloat16 else 3e-7
    for x, made, by in zip((q, k), got, (q_by, k_by), strict=True):
        assert error(made.detach(), x.detach(), by, pairs) < least
        (grad,) = torch.autograd.grad(made, x, made.detach(), retain_graph=True)
        back = (by[0], -by[1])
        assert error(grad, made.detach(), back, pairs) < least


def test_a_known_kernel_serves_only_aligned_pointers() -> None:
    by = tables(33, 32)
    room = drawn(2, 4, 33, 72)
    for start in (0, 0, 1, 0, 3, 8):  # the kernel of the first is known from the second on
        x = room[..., start : start + 64]
        torch.testing.assert_close(rotate(x, *by), apply_rotary(x, *by), rtol=8e-3, atol=8e-3)


def test_turning_in_a_cuda_graph() -> None:
    from longitude.ops.kernels.rope import rotate_qk

    q, k, by = drawn(64, 32, 1, 128), drawn(64, 8, 1, 128, seed=1), tables(1, 64, batch=64)
    for _ in range(3):
        rotate_qk(q, k, by, by)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = rotate_qk(q, k, by, by)
    q.copy_(drawn(64, 32, 1, 128, seed=2))
    graph.replay()
    torch.testing.assert_close(made[0], apply_rotary(q, *by), rtol=8e-3, atol=8e-3)
    torch.testing.assert_close(made[1], apply_rotary(k, *by), rtol=8e-3, atol=8e-3)


def test_more_numbers_than_32_bits_count_and_more_heads_than_16() -> None:
    by = tables(8, 32)
    x = drawn(2, 35_000, 8, 64)
    torch.testing.assert_close(rotate(x, *by), apply_rotary(x, *by), rtol=8e-3, atol=8e-3)
    n = 2**31 // 128 + 100
    x, (cos, sin) = torch.zeros(1, 1, n, 128, device="cuda", dtype=torch.bfloat16), tables(100, 64)
    x[:, :, -100:] = drawn(1, 1, 100, 128)
    last, far = x[:, :, -100:].clone(), torch.zeros(1, 1, n, 64, device="cuda")
    far_sin = torch.zeros_like(far)
    far[:, :, -100:], far_sin[:, :, -100:] = cos, sin
    got = rotate(x, far, far_sin)[:, :, -100:]
    torch.testing.assert_close(got, apply_rotary(last, cos, sin), rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("n", [8192, 8190])
def test_joined_at_real_size(n: int) -> None:
    from longitude.ops.kernels.merge import MergeTogether

    w, h = 1024, 16
    blocks = n // w
    parts = [
        part(blocks, h, w, [w * t for t in range(blocks)], False, 0),
        part(blocks - 1, h, w - 1, [w * t for t in range(1, blocks)], True, 1),
        part(1, h, n - w, [w], False, 2),
        part(1, h, n - blocks * w or 1, [n - (n - blocks * w or 1)], False, 3),
        part(1, h, 100, [7], False, 4),
        part(2, h, 100, [500, 550], True, 5),
    ]
    sinks = drawn(h, seed=9, dtype=torch.float32)
    ways = [MergeOneByOne((1, h, n), parts[0].out), MergeTogether((1, h, n), parts[0].out)]
    for way in ways:
        for one in parts:
            way.add(one)
    (want, want_lse), (got, got_lse) = (way.result(sinks) for way in ways)
    torch.testing.assert_close(got_lse, want_lse)
    torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-5)


def part(count: int, h: int, height: int, tops: list[int], flipped: bool, seed: int) -> TileOutput:
    out = drawn(count, 1, h // 4, height, 4, 128, seed=seed).transpose(3, 4)
    lse = 3 * drawn(count, 1, h // 4, 4, height, seed=seed + 20, dtype=torch.float32)
    return TileOutput(out, lse, tops, flipped)


REMAPS = ("leaky_rerope(1024, 8)", "rerope(512)", "self_extend(8, 1024)", "dual_chunk(1536, 512)",
          "streaming(4, 1020)")  # fmt: skip


@pytest.mark.parametrize("rows", [4096, 1500])
@pytest.mark.parametrize("text", [*(f"rope(remap={r})" for r in REMAPS), "rope() + window(700)"])
def test_flash_attention_4_runs_bands_with_gradients(
    text: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, beside the error of plain attention; with grouped heads and few queries."""
    pytest.importorskip("flash_attn.cute")
    monkeypatch.setattr(plans, "FLASH4_OPERATIONS", 0)
    monkeypatch.setattr(plans, "FLASH4_BANDS", 0)
    plans.plan_call.cache_clear()
    n, errors = 4096, {}
    q, k, v = (drawn(2, n, h, 128, seed=h + m).transpose(1, 2) for m, h in enumerate((8, 2, 2)))
    grad, pos = drawn(2, rows, 8, 128, seed=9).transpose(1, 2), (range(n - rows, n), range(n))
    for scheme in ("rope()", text):
        made = []
        for dtype, backend in ((torch.bfloat16, "auto"), (torch.float64, "eager")):
            given = [x.to(dtype).requires_grad_() for x in (q[:, :, n - rows :], k, v)]
            out = attention(scheme, *given, *pos, backend=backend)
            made.append((out, *torch.autograd.grad(out, given, grad.to(dtype))))
        errors[scheme] = [float((a - b).norm() / b.norm()) for a, b in zip(*made, strict=True)]
    how = plans.make_plan(
        prepare(parse(text), *(x.requires_grad_() for x in (q, k, v)), *pos[1:] * 2)
    )
    plans.plan_call.cache_clear()
    assert {step.kernel for step in how.steps} == {plans.Kernel.FLASH4}
    for own, plain in zip(errors[text], errors["rope()"], strict=True):
        assert own <= 1.4 * plain, errors
