"""How a call would run, printed from its plan: the kernels, the passes, and why others can't.

No attention is computed, so even the largest call can be explained:

    rope(remap=leaky_rerope(1024, 8)) on 1 × 8 heads × 4,096 tokens of 64, float32, cpu
    native: 72 tiles in 12 calls of torch's CPU flash attention, merged by their log-sum-exp
      pass 1, where 0 <= i-j < 1024: 4 lower, 3 upper
      pass 2, where 1024 <= i-j, q at i/8 + 896, k at j/8: 1 lower
    not banded: it is faster on CUDA only
    not alibi: it is faster on CUDA only
    not flex: it is faster on CUDA only
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Real
from torch import Tensor

from longitude.core.part import Weights
from longitude.core.region import SAME, Area, PairShifts, Shift
from longitude.core.scheme import Scheme
from longitude.ops.inputs import prepare
from longitude.ops.passes import Pass, batches, make_passes
from longitude.ops.plan import CallSpec, Kernel, Merge, Plan, make_plan


@dataclass(frozen=True)
class Explanation:
    """A call in words: its shapes, its plan and its passes."""

    call: str
    plan: Plan
    passes: tuple[str, ...]

    @property
    def backend(self) -> str:
        return self.plan.backend

    @property
    def declined(self) -> dict[str, str]:
        """Why the backends that are faster elsewhere don't run this call."""
        return dict(self.plan.declined)

    def __str__(self) -> str:
        passes = [f"  pass {n}, {one}" for n, one in enumerate(self.passes, 1)]
        declined = [f"not {name}: {why}" for name, why in self.plan.declined.items()]
        return "\n".join([self.call, f"{self.backend}: {steps(self.plan)}", *passes, *declined])


def explain(
    scheme: Scheme | str,
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    q_pos: range | Real[Tensor, " nq"] | Real[Tensor, "#b nq"],
    k_pos: range | Real[Tensor, " nk"] | Real[Tensor, "#b nk"],
    weights: Weights | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> Explanation:
    """Explain how `attention` would run this call; raise for a backend that can't run it."""
    p = prepare(scheme, q, k, v, q_pos, k_pos, weights, **options)
    b, h, n, d = q.shape
    keys = "" if k.shape[2] == n else f" over {k.shape[2]:,} keys"
    shared = "" if k.shape[1] == h else f" (keys: {k.shape[1]})"
    sizes = f"{b} × {h} heads{shared} × {n:,} tokens{keys} of {d}"
    call = f"{p.scheme} on {sizes}, {str(q.dtype).removeprefix('torch.')}, {q.device.type}"
    plan = make_plan(p, backend)
    return Explanation(call, plan, tuple(_pass(*item, plan) for item in enumerate(make_passes(p))))


def steps(plan: Plan) -> str:
    """Describe the kernels of a plan in a sentence."""
    if not plan.steps:
        return "nothing to compute, zeros"
    parts: dict[str, None] = {}
    tiles: dict[str, tuple[int, int]] = {}  # by kernel: its tiles and its calls
    for s in plan.steps:
        kernel, tile = s.kernel.value, s.tiles[0] if s.tiles else None
        if s.bands:
            parts[f"{len(s.bands)} band{'s' * (len(s.bands) != 1)} by {kernel}"] = None
            if s.forward:
                parts[f"forward both by {Kernel.BANDS_TOGETHER.value}"] = None
        elif s.kernel in (Kernel.SDPA, Kernel.FLASH4) and plan.merge is Merge.NONE and tile:
            parts[f"one {'full' if tile.kind == 'full' else 'causal'} {kernel}"] = None
        elif plan.merge is Merge.RUNNING_SOFTMAX and tile:
            parts[f"{tile.height:,} × {tile.width:,} by {kernel}"] = None
        elif plan.merge is Merge.LSE and tile:
            n, calls = tiles.get(kernel, (0, 0))
            tiles[kernel] = n + len(s.tiles), calls + len(batches(s.tiles))
        else:
            parts[kernel] = None
    tile_calls = [f"{n} tiles in {calls} calls of {kernel}" for kernel, (n, calls) in tiles.items()]
    merged = "" if plan.merge is Merge.NONE else f", {plan.merge.value}"
    if plan.extra_dims:
        merged += f", the sums of forget gates in {plan.extra_dims} extra head dimensions"
    return ", then ".join([*parts, *tile_calls]) + merged


def _pass(n: int, one: Pass, plan: Plan) -> str:
    """Describe where a pass applies, how it shifts positions, and its tiles by kind."""
    call, region, kinds = CallSpec.of(one.inputs).sums_in_heads, one.region, ""
    words = [f"where {' or '.join(map(_area, one.areas))}"]
    if region is not None:
        sides = (("q", "i", region.q), ("k", "j", region.k))
        words += [f"{side} at {_shift(shift, at)}" for side, at, shift in sides if shift != SAME]
        words += [f"its own {region.frequencies}"] if region.frequencies else []
    if call.by_position and not one.inputs.empty:
        run = [t for s in plan.steps if plan.merge is Merge.LSE and n in s.passes for t in s.tiles]
        count = Counter(t.kind for t in run or call.tiles(one.areas))
        kinds = ", ".join(f"{many} {kind}" for kind, many in count.items())
    return ", ".join(words) + (f": {kinds}" if kinds else "")


def _shift(shift: Shift | PairShifts, at: str) -> str:
    if isinstance(shift, PairShifts):
        exact = f"; true for pairs {', '.join(map(str, shift.exact))}" if shift.exact else ""
        return f"({', '.join(_shift(band, at) for band in shift.bands)} by band of pairs{exact})"
    at = at if shift.modulo is None else f"({at} mod {shift.modulo})"
    if shift.divide == float("inf"):
        at = "0"
    elif shift.divide != 1:
        at = f"⌊{at}/{shift.divide:g}⌋" if shift.floor else f"{at}/{shift.divide:g}"
    at = f"{shift.add:g}" if at == "0" else at + (f" + {shift.add:g}" if shift.add else "")
    return at if shift.least is None else f"min({at}, {shift.least:g})"


def _area(area: Area) -> str:
    """Describe the bounds of an area."""
    chunks = [(f"i//{c.size} - j//{c.size}", c.lo, c.hi) for c in area.chunks]
    bounds = (("i-j", area.lo, area.hi), ("j", area.first, area.last), ("i", area.top, area.bottom))
    words = [
        (f"{lo} <= " if lo is not None else "") + what + (f" < {hi}" if hi is not None else "")
        for what, lo, hi in (*bounds, *chunks)
        if (lo, hi) != (None, None)
    ]
    return " and ".join(words) or "everywhere"
