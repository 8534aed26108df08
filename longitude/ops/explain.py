"""What `auto` picks for a call, and why: the backend, its way, its passes, and who refused.

No attention is computed, so that it may be asked of the largest call; the answer is a value that
prints as a few lines:

    rope(remap=leaky_rerope(1024, 8)) on 1 × 8 heads × 4,096 tokens of 64, float32, cpu
    native: 72 tiles in 12 calls of torch's CPU kernel, merged by their log-sum-exp
      pass 1, where 0 <= i-j < 1024: 4 lower, 3 upper
      pass 2, where 1024 <= i-j, q at i/8 + 896, k at j/8: 1 lower
    not banded: it pays on CUDA only
    not alibi: it pays on CUDA only
    not flex: it pays on CUDA only
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Real
from torch import Tensor

from longitude.core.part import Region, Weights
from longitude.core.region import FAR, SAME, Area, Shift
from longitude.core.scheme import Scheme
from longitude.ops import banded
from longitude.ops import sdpa as native
from longitude.ops.aten import CPU, CUDNN, EFFICIENT, FLASH, Operator
from longitude.ops.attention import considered, module
from longitude.ops.inputs import AttentionInputs, contiguous, prepare
from longitude.ops.passes import Pass, make_passes
from longitude.ops.rented import HOPPER, quickest_for
from longitude.ops.tiles import Tile, batches, split, tiles

KERNELS = (
    (CPU, "torch's CPU"),
    (FLASH, "flash attention's"),
    (EFFICIENT, "xformers'"),
    (CUDNN, "our own, and once its shape has come often cuDNN's,"),
    (HOPPER, "flash attention's, and once its shape has come often cuDNN's,"),
)


@dataclass(frozen=True)
class PassTold:
    """One turn of q and k: where it holds, what positions become there, and its tiles by kind."""

    where: tuple[str, ...]
    turns: str
    tiles: dict[str, int]

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.tiles.items())
        where = f"where {' or '.join(self.where)}"
        return ", ".join(filter(None, (where, self.turns))) + (f": {kinds}" if kinds else "")


@dataclass(frozen=True)
class Explanation:
    """What runs a call: a backend and its way, the passes, and why the others do not."""

    call: str
    backend: str
    way: str
    passes: tuple[PassTold, ...]
    refused: dict[str, str]

    def __str__(self) -> str:
        passes = [f"  pass {n}, {one}" for n, one in enumerate(self.passes, 1)]
        refused = [f"not {name}: {why}" for name, why in self.refused.items()]
        return "\n".join([self.call, f"{self.backend}: {self.way}", *passes, *refused])


def explain(
    scheme: Scheme,
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
    """How `attention` would run the same call; a backend that can't run it raises as it would."""
    options = {"scale": None, "segments": None, "length": None, **options}
    p = prepare(scheme, q, k, v, q_pos, k_pos, weights, **options)
    chosen = module(backend, p)
    name = chosen.__name__.rsplit(".", 1)[1]
    refused = {other: why for other, why in considered(p) if why} if backend == "auto" else {}
    ways = {"native": _native, "banded": _banded}
    way = ways[name](p) if name in ways else (chosen.__doc__ or name).splitlines()[0].rstrip(".")
    return Explanation(_call(p), name, way, tuple(map(_told, make_passes(p))), refused)


def _call(p: AttentionInputs) -> str:
    b, h, n, d = p.q.shape
    keys = "" if p.k.shape[2] == n else f" over {p.k.shape[2]:,} keys"
    shared = "" if p.k.shape[1] == h else f" (keys: {p.k.shape[1]})"
    what = f"{b} × {h} heads{shared} × {n:,} tokens{keys} of {d}"
    return f"{p.scheme} on {what}, {str(p.q.dtype).removeprefix('torch.')}, {p.q.device.type}"


def _native(p: AttentionInputs) -> str:
    """Which of native's ways a call goes."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return "nothing to compute, zeros"
    if native.few(p) is not None:
        return "our own kernel for a few queries, which turns keys as it reads them"
    several = p.q.shape[2] == 1 and len(make_passes(p)) > 1
    turned = "keys turned by their distance to the query, then " if several else ""
    if native.by_mask(p):
        return f"{turned}SDPA under a mask of every pair, in blocks of queries"
    if native.single(p):
        causal = native.causal(p, p.scheme.areas())
        return f"{turned}one {'causal' if causal else 'full'} call of SDPA"
    found = [_tiles(one) for one in make_passes(p)] if not several else []
    count, calls = sum(map(len, found)), sum(len(batches(pieces)) for pieces in found)
    named = _kernel(quickest_for(p.q))
    return (
        f"{turned}{count} tiles in {calls} calls of {named} kernel, merged by their log-sum-exp"
        if found
        else f"{turned}the visible spans merged by their log-sum-exp"
    )


def _banded(p: AttentionInputs) -> str:
    """The far tile of a plain kernel, if there is one, and how many bands are left for ours."""
    plan = banded.plan_of(p)
    count = len(plan.pieces)
    ours = f"{count} band{'s' * (count != 1)} by our own kernel, in one softmax"
    if plan.far is None:
        return ours
    (tile, kernel) = plan.far.tile, _kernel(plan.far.operator)
    return f"{tile.height:,} × {tile.width:,} by {kernel} kernel, then {ours}"


def _kernel(operator: Operator | None) -> str:
    return next((name for known, name in KERNELS if known is operator), "a")


def _tiles(one: Pass) -> list[Tile]:
    """The tiles that native runs for a pass."""
    p = one.problem
    if not (contiguous(p.q_pos, p.k_pos) and p.plain):
        return []
    finest = native.FINEST if p.q.device.type == "cpu" else FAR
    found = tiles(one.areas, p.q_pos, p.k_pos)  # type: ignore[arg-type]
    return [piece for t in found for piece in split(t, finest)]


def _told(one: Pass) -> PassTold:
    p = one.problem
    plain = p.plain and contiguous(p.q_pos, p.k_pos)
    found = tiles(one.areas, p.q_pos, p.k_pos) if plain else ()  # type: ignore[arg-type]
    kinds = Counter(t.kind for t in found)
    return PassTold(tuple(map(_area, one.areas)), _turns(one.region), dict(kinds))


def _turns(region: Region | None) -> str:
    """What a region makes of positions, where it makes something of them."""
    if region is None:
        return ""
    sides = [(side, at, getattr(region, side)) for side, at in (("q", "i"), ("k", "j"))]
    moved = [f"{side} at {_shift(shift, at)}" for side, at, shift in sides if shift != SAME]
    own = [f"its own {region.frequencies}"] if region.frequencies else []
    return ", ".join(moved + own)


def _shift(shift: Shift, at: str) -> str:
    at = at if shift.modulo is None else f"({at} mod {shift.modulo})"
    if shift.divide == float("inf"):
        at = "0"
    elif shift.divide != 1:
        at = f"⌊{at}/{shift.divide:g}⌋" if shift.floor else f"{at}/{shift.divide:g}"
    at = f"{shift.add:g}" if at == "0" else at + (f" + {shift.add:g}" if shift.add else "")
    return at if shift.least is None else f"min({at}, {shift.least:g})"


def _area(area: Area) -> str:
    """The bounds that an area has."""
    chunks = [(f"i//{c.size} - j//{c.size}", c.lo, c.hi) for c in area.chunks]
    bounds = (("i-j", area.lo, area.hi), ("j", area.first, area.last), ("i", area.top, area.bottom))
    said = [_bounded(what, lo, hi) for what, lo, hi in (*bounds, *chunks)]
    return " and ".join(filter(None, said)) or "everywhere"


def _bounded(what: str, lo: int | None, hi: int | None) -> str:
    if lo is None and hi is None:
        return ""
    return (f"{lo} <= " if lo is not None else "") + what + (f" < {hi}" if hi is not None else "")
