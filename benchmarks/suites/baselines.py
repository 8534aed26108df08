"""Baselines: the fastest attention that a scheme's structure allows, by kernels that are not ours.

If every pair of a causal call is visible, that is a compiled rotation and the fastest plain causal
attention on the device; under a window, it is flash attention with a window. Without CUDA it is
SDPA in each case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.suites.rope import Pair, Turn, ours
from benchmarks.suites.setup import Setup
from benchmarks.suites.timing import Run, seconds

Qkv = tuple[Tensor, Tensor, Tensor]
NAMES = {"CUDNN_ATTENTION": "cuDNN", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "xformers"}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Base(NamedTuple):
    """A baseline: its name, its run, and the scheme whose attention it computes."""

    name: str
    run: Run
    scheme: str


def plain(
    setup: Setup, qkv: Qkv, causal: bool = True, rotated: bool = True, sharper: float = 1.0
) -> Base:
    """Plain attention by the fastest kernel, after a rotation or without. `sharper` is a factor on
    the scores, because a kernel's rounding error grows with them."""
    kernel, attend = fastest(setup, qkv, causal, sharper)
    what = f"plain {'causal' if causal else 'full'} attention ({kernel})"
    mask = "" if causal else " + bidirectional()"
    if not rotated:
        return Base(what, lambda: attend(*qkv), "causal()" if causal else "bidirectional()")
    rotate = _rotator(setup, qkv)
    temperature = "" if sharper == 1 else f" + temperature({1 / sharper!r})"
    return Base(f"rotate + {what}", lambda: attend(*rotate(), qkv[2]), f"rope(){mask}{temperature}")


def windowed(setup: Setup, qkv: Qkv, window: int) -> Base:
    """A rotation and windowed flash attention; plain attention on a CPU or in float32."""
    if not setup.cuda or setup.dtype == torch.float32:
        return plain(setup, qkv)
    rotate, v, n = _rotator(setup, qkv), qkv[2], qkv[0].shape[2]

    def run() -> Tensor:
        x = [t.transpose(1, 2) for t in (*rotate(), v)]
        outputs = torch.ops.aten._flash_attention_forward(
            *x, None, None, n, n, 0.0, True, False, window_size_left=window - 1, window_size_right=0
        )
        return outputs[0].transpose(1, 2)

    return Base("rotate + windowed attention (flash)", run, f"rope() + window({window})")


def fastest(setup: Setup, qkv: Qkv, causal: bool, sharper: float = 1.0) -> tuple[str, Attend]:
    """Return the name of SDPA's fastest kernel for these inputs, and SDPA by that kernel."""
    grouped, scale = qkv[0].shape[1] != qkv[1].shape[1], sharper * qkv[0].shape[-1] ** -0.5
    kwargs = {"is_causal": causal, "enable_gqa": grouped, "scale": scale}
    if not setup.cuda:
        return "SDPA", partial(sdpa, **kwargs)
    return quickest(_kernels(kwargs), qkv)


def quickest(kernels: Mapping[str, Attend], qkv: Qkv) -> tuple[str, Attend]:
    """Return the name and function of the fastest kernel on CUDA; skip those that can't run."""
    took: dict[str, float] = {}
    for name, attend in kernels.items():
        try:
            took[name] = [seconds(lambda a=attend: a(*qkv), True) for _ in range(4)][-1]
        except RuntimeError:
            continue
    best = min(took, key=lambda name: took[name]) if took else [*kernels][-1]
    return best, kernels[best]


def _kernels(how: dict[str, Any]) -> dict[str, Attend]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: SDPBackend) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, **how)

        return attend

    return {name: by(getattr(SDPBackend, key)) for key, name in NAMES.items()}


def _rotator(setup: Setup, qkv: Qkv) -> Callable[[], Pair]:
    """Return a rotation of q and k. On CUDA it is not ours but the formula, compiled by torch."""
    q, k, _ = qkv
    t = Turn(q, k, torch.arange(q.shape[2], device=setup.device)[None])
    apply = ours(t)
    if not (setup.cuda and setup.compiles):
        return lambda: apply(q, k)
    cos, sin = t.tables()
    compiled = torch.compile(_formula, dynamic=False, fullgraph=True)
    return lambda: compiled(q, k, cos, sin)


def _formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    def one(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    return one(q), one(k)
