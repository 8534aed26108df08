"""The choice of kernels as a value: from scheme, shapes, dtype, device and gradients alone.

`make_plan` reads a `CallSpec`, which holds no tensor and no state: equal specs give equal plans, on
the first call and the hundredth. `attention` runs a plan, `explain` prints it, tests compare it.

A backend is a function from a spec to a plan, or to a sentence that says why it can't run the call:

- banded: bands of distances in one running softmax by our own kernel (windows, remaps, biases of
  the distance alone, FIRE), after the far pairs as one tile of the fastest plain kernel;
- alibi: one causal call of SDPA over longer heads, whose extra dimensions carry the bias;
- flex: FlexAttention, compiled, for terms that no other kernel supports;
- native: PyTorch's kernels: one call of SDPA or tiles merged by their log-sum-exp, else a dense
  mask in blocks of queries; our own for a few queries (`decode`);
- eager: the full score matrix in blocks of queries; it runs everything.

On Hopper our warp-specialised kernel runs forwards, after FlashAttention 4 if that is installed.
cuDNN's kernel takes 70 ms to plan each new shape, which pays off from `CUDNN_OPERATIONS` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from statistics import fmean
from typing import Literal, NamedTuple

import torch

from longitude.core.part import QueryRows
from longitude.core.region import Area
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops import decode
from longitude.ops.extra_dims import slopes_of, sum_dims
from longitude.ops.inputs import AttentionInputs
from longitude.ops.kernels.launch import Device, device_of
from longitude.ops.passes import Tile, batches, query_rows, region_areas, tiles
from longitude.parts.biases import Alibi, AlibiInterpolated, NtkAlibi

Backend = Literal["auto", "eager", "native", "flex", "banded", "alibi"]
HALF = (torch.float16, torch.bfloat16)
CUDNN_OPERATIONS = 1e11  # in a tile's two products
FLASH4_OPERATIONS = 1.5e11  # a quarter of a millisecond, as long as a call takes on the host
FLASH4_BANDS = 1e12  # in the average band: below, our warp-specialised kernel is faster
BACKWARD_OPERATIONS = 5  # a call with gradients saves about this many times as much
BAND_QUERIES = 16  # fewer leave a GPU idle: each block of queries is one program
SUM_QUERIES = 32  # fewer don't repay copying keys to prepend forget sums
CHUNK_SHAPES = 40  # tiles of chunks repay their cuDNN plans from this many CUDNN_OPERATIONS on
MAX_CUDNN_HEAD = 128  # forward and backward
HOPPER_HEADS, HOPPER_ROWS = (64, 128), 132 * 128  # rows: one block per multiprocessor
MAX_ALIBI = 2**14  # float32 then keeps q·k to 2^-10, as bfloat16 keeps a weight


class Kernel(Enum):
    """The kernel that runs a step."""

    EAGER = "the full score matrix in blocks of queries"
    SDPA = "scaled_dot_product_attention"
    SDPA_MASKED = "scaled_dot_product_attention under a dense mask, in blocks of queries"
    SDPA_DIAGONALS = "scaled_dot_product_attention under tables of distances, in blocks of queries"
    SDPA_ALIBI = "scaled_dot_product_attention, the bias in extra head dimensions"
    CPU_FLASH = "torch's CPU flash attention"
    FLASH = "FlashAttention 2"
    EFFICIENT = "memory-efficient attention (xformers)"
    CUDNN = "cuDNN's attention"
    FLASH4 = "FlashAttention 4"
    HOPPER = "warp-specialised attention"
    BANDED = "the banded kernel"
    BANDS_TOGETHER = "warp-specialised attention in one launch"
    DECODE = "the decoding kernel, which rotates keys as it reads them"
    FLEX = "FlexAttention"


class Merge(Enum):
    """How the parts of one softmax are combined."""

    NONE = "nothing to merge"
    LSE = "merged by their log-sum-exp"
    RUNNING_SOFTMAX = "in one running softmax"


class Band(NamedTuple):
    """The pairs of indices with lo <= i - j < hi."""

    lo: int
    hi: int

    def within(self, n: int, m: int) -> Band:
        """Return the same pairs for n rows and m columns, with bounds clipped to these."""
        lo, hi = max(self.lo, 1 - m), min(self.hi, n)
        return Band(lo, hi) if lo < hi else Band(0, 0)


class Chunk(NamedTuple):
    """Pairs with lo <= i//size - j//size < hi, and the positions of the first row and column."""

    size: int
    lo: int
    hi: int
    row: int
    column: int


class BandPiece(NamedTuple):
    """A band of one pass: its columns, pairs of indices, first row, and backward kernel."""

    pass_index: int
    columns: tuple[int, int]
    band: Band
    chunk: Chunk | None = None
    top: int = 0
    backward: Kernel = Kernel.BANDED


class TableSpan(NamedTuple):
    """A bias table: first and last distance, whether flat beyond, whether far keys are skipped."""

    first: int
    last: int
    flat: bool
    reached: bool


@dataclass(frozen=True)
class Step:
    """One kernel over tiles or bands of some passes. `forward` holds the bands that one launch runs
    in the forward, in place of all steps."""

    kernel: Kernel
    passes: tuple[int, ...]
    tiles: tuple[Tile, ...] = ()
    bands: tuple[BandPiece, ...] = ()
    forward: tuple[BandPiece, ...] = ()
    table: TableSpan | None = None


@dataclass(frozen=True)
class Plan:
    """The steps of a call, how they merge, and why `auto` declined the backends before this one."""

    backend: str
    steps: tuple[Step, ...]
    merge: Merge = Merge.NONE
    extra_dims: int = 0  # per head, which carry the sums of forget gates
    declined: Mapping[str, str] = field(default_factory=dict)


class CallSpec(NamedTuple):
    """All that the choice may depend on. Positions that are tensors are None here."""

    scheme: Scheme
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: Device
    q_pos: range | None
    k_pos: range | None
    rows: QueryRows | None  # query positions, where frequencies change with them
    gradients: bool
    positive_scale: bool
    overflows: bool
    options: frozenset[str]  # of dropout, softcap, key_padding, segments, sink_logits, lengths

    @classmethod
    def of(cls, p: AttentionInputs) -> CallSpec:
        (batch, heads, queries, head_dim), (keys, value_dim) = p.q.shape, p.v.shape[2:]
        options = {
            "dropout": p.dropout, "softcap": p.softcap, "key_padding": p.key_padding is not None,
            "segments": p.segments is not None, "sink_logits": p.sink_logits is not None,
            "lengths": not isinstance(p.k_length, int),
        }  # fmt: skip
        return cls(
            p.scheme, batch, heads, queries, keys, head_dim, value_dim, p.q.dtype,
            device_of(p.q.device),
            p.q_pos if isinstance(p.q_pos, range) else None,
            p.k_pos if isinstance(p.k_pos, range) else None,
            query_rows(p), p.needs_grad, p.scale > 0, p.overflows,
            frozenset(name for name, value in options.items() if value),
        )  # fmt: skip

    @property
    def contiguous(self) -> bool:
        """Whether positions are ranges."""
        return self.q_pos is not None and self.k_pos is not None

    @property
    def specialised(self) -> bool:
        """Whether our warp-specialised kernel runs the call: a forward alone, with many rows."""
        fits = self.dtype in HALF and self.head_dim == self.value_dim in HOPPER_HEADS
        fits = fits and self.queries > decode.MAX_QUERIES and self.positive_scale
        enough = self.batch * self.heads * self.queries >= HOPPER_ROWS
        return self.device.hopper and fits and enough and not self.gradients

    @property
    def by_torch(self) -> CallSpec:
        """The same call without our warp-specialised kernel."""
        return self._replace(device=self.device._replace(hopper=False))

    @property
    def by_position(self) -> bool:
        """Whether visibility follows from contiguous positions alone, and scores from q·k alone."""
        hidden = self.options & {"softcap", "key_padding", "segments"}
        return self.contiguous and not self.scheme.bias and not hidden

    @property
    def sums_in_heads(self) -> CallSpec:
        """The call with forget sums in extra head dimensions; unchanged if that is not faster."""
        gated = len(self.scheme.bias) == 1 and getattr(self.scheme.bias[0], "gated", False)
        few = self.queries < (SUM_QUERIES if len(self.pass_areas) == 1 else 2)
        size = self.head_dim + sum_dims(self.dtype)
        fits = lse_kernel(self.device.type, self.dtype, size) and self.value_dim <= size
        if not (gated and fits and self.positive_scale) or few:
            return self
        return self._replace(scheme=replace(self.scheme, bias=()), head_dim=size, value_dim=size)

    @property
    def pass_areas(self) -> list[tuple[Area, ...]]:
        """The areas of each pass."""
        return [areas for _, areas in region_areas(self.scheme, self.rows)]

    def tiles(self, areas: tuple[Area, ...], small: bool = False) -> tuple[Tile, ...]:
        """Cut areas into tiles; small ones on a CPU, unless gradients would have to be summed."""
        assert self.q_pos is not None and self.k_pos is not None
        small = small and self.device.type == "cpu" and not self.gradients
        return tiles(areas, self.q_pos, self.k_pos, "small" if small else "triangles")

    def windows(self) -> list[tuple[Tile, ...]]:
        """Return each pass's tiles for FlashAttention 4, a band as one; none if that is slower."""
        if not self.device.flash4 or self.q_pos is None or self.k_pos is None:
            return []
        cuts = [tiles(areas, self.q_pos, self.k_pos, "windows") for areas in self.pass_areas]
        pairs = [len(same) * same[0].pairs for cut in cuts for same in batches(cut)]
        pays = pairs and fastest_kernel(self, fmean(pairs), bands=True) is Kernel.FLASH4
        return cuts if pays else []


def make_plan(inputs: AttentionInputs, backend: str = "auto") -> Plan:
    """Plan a call for this backend, or for the fastest one that can run it."""
    return inputs.once(backend, lambda: plan_call(CallSpec.of(inputs), backend))


@lru_cache(maxsize=4096)
def plan_call(call: CallSpec, backend: str = "auto") -> Plan:
    """Return the plan of a spec: a pure function, memoised."""
    if backend != "auto" and backend not in BACKENDS:
        raise UserError(f"no backend is called {backend!r}: use auto, {', '.join(BACKENDS)}.")
    if not call.batch * call.heads * call.queries * call.keys * call.head_dim:
        return Plan("native" if backend == "auto" else backend, ())
    declined: dict[str, str] = {}
    for name in AUTO if backend == "auto" else (backend,):
        plan = (backend == "auto" and _slower(name, call)) or BACKENDS[name](call)
        if isinstance(plan, Plan):
            return replace(plan, declined=declined)
        declined[name] = plan
    raise UserError(
        f"{backend} can't run {call.scheme}: {declined[backend]}; use backend='eager' or 'auto'."
    )


def _slower(backend: str, call: CallSpec) -> str | None:
    """Return why a backend that may run the call is skipped: another is faster or more exact."""
    if backend not in ("banded", "alibi", "flex") or call.device.type != "cuda":
        return None if backend in ("native", "eager") else "it is faster on CUDA only"
    if backend == "alibi" and call.dtype not in HALF:
        return "in the wider types its extra dimensions round more than plain attention does"
    if backend == "banded" and call.queries < BAND_QUERIES:
        return f"fewer than {BAND_QUERIES} queries leave most of the GPU idle"
    if call.queries == 1:
        return "a single query runs as one pass of a plain kernel"
    if call.sums_in_heads.by_position or _decodes(call):
        if call.sums_in_heads.windows():
            return "FlashAttention 4 runs each band as one call, and faster"
        chunks = any(area.chunks for areas in call.pass_areas for area in areas)
        chunks = chunks and not call.specialised
        plain = fastest_kernel(call.by_torch, call.queries**2 / CHUNK_SHAPES)
        if chunks and plain is Kernel.CUDNN and call.value_dim == call.head_dim:
            return "at this many queries, cuDNN runs chunks as tiles faster"
        if backend != "banded" or call.dtype not in HALF:
            return "visibility depends on positions alone, so plain kernels run it as tiles"
        if _single_tile(call) is not None and not call.specialised:
            return "one call of a plain kernel suffices"
    return None


def lse_kernel(device: str, dtype: torch.dtype, head_dim: int) -> Kernel | None:
    """Return the plain kernel with a log-sum-exp for this device, type and head size."""
    if device == "cpu":
        fits = dtype in (torch.float32, torch.float64, torch.bfloat16)
        return Kernel.CPU_FLASH if fits else None
    if device == "cuda" and dtype in HALF and head_dim % 8 == 0 and head_dim <= 256:
        return Kernel.FLASH
    fits = device == "cuda" and dtype == torch.float32 and head_dim % 4 == 0
    return Kernel.EFFICIENT if fits else None


def fastest_kernel(call: CallSpec, pairs: float, bands: bool = False) -> Kernel | None:
    """Return the plain kernel for so many pairs per head, a faster one if its call pays off."""
    kernel = lse_kernel(call.device.type, call.dtype, call.head_dim)
    operations = 4.0 * pairs * call.batch * call.heads * call.head_dim
    operations *= BACKWARD_OPERATIONS if call.gradients else 1
    if kernel is not Kernel.FLASH or call.head_dim > MAX_CUDNN_HEAD:
        return kernel
    head_sizes = ((128, 128),) if call.gradients else ((64, 64), (128, 128))  # (d, dv) tested
    fits = call.device.flash4 and (call.head_dim, call.value_dim) in head_sizes
    if fits and operations >= (FLASH4_BANDS if bands and call.specialised else FLASH4_OPERATIONS):
        return Kernel.FLASH4
    if call.specialised:
        return Kernel.HOPPER
    return Kernel.CUDNN if call.device.cudnn and operations >= CUDNN_OPERATIONS else kernel


def _eager(call: CallSpec) -> Plan | str:
    return Plan("eager", (Step(Kernel.EAGER, tuple(range(len(call.pass_areas)))),))


def _native(call: CallSpec) -> Plan | str:
    if "softcap" in call.options:
        return "soft-capping happens between the product and the softmax, inside the kernel"
    if any(getattr(part, "values", False) for part in call.scheme.bias):
        return "Shaw's value side needs the full row of weights"
    if call.overflows:
        return "the decay over so many queries at once would overflow float32"
    all_passes = tuple(range(len(call.pass_areas)))
    if _decodes(call):
        return Plan("native", (Step(Kernel.DECODE, all_passes),))
    plan = _plain_tiles(call)
    if isinstance(plan, Plan) or call.by_position or (call.queries > 1 and len(all_passes) > 1):
        return plan
    from longitude.ops.diagonals import fits_diagonals  # deferred: it imports this module

    kernel = Kernel.SDPA_DIAGONALS if fits_diagonals(call) else Kernel.SDPA_MASKED
    return Plan("native", (Step(kernel, all_passes),))


def _plain_tiles(call: CallSpec) -> Plan | str:
    """Plan one call of SDPA, or tiles, for scores with no term but forget sums in the heads."""
    wide, all_passes = call.sums_in_heads, tuple(range(len(call.pass_areas)))
    if not wide.by_position:
        return "several regions need contiguous positions (ranges), no bias, padding or segments"
    extra = wide.head_dim - call.head_dim
    if (tile := _single_tile(wide)) is not None:
        plain = call.gradients or "dropout" in call.options or not wide.windows()
        kernel = Kernel.SDPA if plain else Kernel.FLASH4
        return Plan("native", (Step(kernel, all_passes, (tile,)),), extra_dims=extra)
    plan = _merged_tiles(wide)
    return plan if isinstance(plan, str) else replace(plan, extra_dims=extra)


def plan_tiles(call: CallSpec) -> Plan | str:
    """Plan the tiles of a call whose output is merged with others, or return why it has none."""
    if not call.by_position or call.overflows:
        return "tiles need contiguous positions, and scores that follow from q·k alone"
    return _merged_tiles(call, small=False)  # because the backward plans again


def _merged_tiles(call: CallSpec, small: bool = True) -> Plan | str:
    """Plan the tiles of every pass, merged by their log-sum-exp."""
    if "dropout" in call.options:
        return "dropout can't be merged across passes"
    if fastest_kernel(call, 0) is None or call.value_dim != call.head_dim:
        return "no kernel gives a log-sum-exp for this device, type or head size"
    if windows := call.windows():
        steps = [Step(Kernel.FLASH4, (n,), tiles) for n, tiles in enumerate(windows) if tiles]
        return Plan("native", tuple(steps), Merge.LSE)
    passes = [((n,), areas) for n, areas in enumerate(call.pass_areas)]
    if call.queries == 1:  # all regions are rotated as one pass
        passes = [(tuple(range(len(passes))), tuple(a for _, areas in passes for a in areas))]
    by_kernel: dict[tuple[tuple[int, ...], Kernel], list[Tile]] = {}
    for n, areas in passes:
        for batch in batches(call.tiles(areas, small)):  # tiles of one shape are one launch
            kernel = fastest_kernel(call.by_torch, len(batch) * batch[0].pairs)
            assert kernel is not None
            by_kernel.setdefault((n, kernel), []).extend(batch)
    steps = [Step(kernel, n, tuple(tiles)) for (n, kernel), tiles in by_kernel.items()]
    return Plan("native", tuple(steps), Merge.LSE)


def _single_tile(call: CallSpec) -> Tile | None:
    """Return the tile of a call that one causal or full call of SDPA computes, or None."""
    one_pass = call.queries == 1 or len(call.pass_areas) == 1
    if not (one_pass and call.by_position) or "sink_logits" in call.options:
        return None
    pieces, shape = call.tiles(call.scheme.areas()), (call.queries, call.keys)
    tile = pieces[0] if len(pieces) == 1 and (pieces[0].height, pieces[0].width) == shape else None
    return tile if tile and tile.kind != "upper" else None


def _decodes(call: CallSpec) -> bool:
    """Whether our own kernel runs a few queries over contiguous positions."""
    if call.queries > decode.MAX_QUERIES or not (call.contiguous and call.device.triton):
        return False
    if call.gradients or call.options & {"softcap", "dropout", "segments", "lengths"}:
        return False
    assert call.k_pos is not None
    fits = decode.unsupported_tensors((call.dtype,), max(call.head_dim, call.value_dim)) is None
    near = call.k_pos.start >= 0 and call.k_pos.stop <= decode.MAX_POSITION
    return fits and near and decode.supports(call.scheme)


def _flex(call: CallSpec) -> Plan | str:
    bias = call.scheme.bias
    if any(getattr(part, "values", False) for part in bias):
        return "Shaw's value side needs the full row of weights"
    if "dropout" in call.options or (call.gradients and call.device.type == "cpu"):
        return "flex has no dropout, and no backward when uncompiled (on a CPU)"
    if any(getattr(part, "grows", False) for part in bias):
        return "its table of distances would take memory that grows with n²"
    if call.gradients and any(getattr(part, "many_reads", False) for part in bias):
        return "compiled flex can't differentiate a weight that a term reads several times"
    if call.overflows or (call.head_dim < 16 and call.device.type == "cuda"):
        return "its decay would overflow float32, or heads of under 16 not compile"
    from longitude.ops.bands import far_tiles  # deferred: it imports this module

    steps = *far_tiles(call), *(Step(Kernel.FLEX, (n,)) for n in range(len(call.pass_areas)))
    return Plan("flex", steps, Merge.LSE if len(steps) > 1 else Merge.NONE)


def _alibi(call: CallSpec) -> Plan | str:
    bias = call.scheme.bias
    if len(bias) != 1 or not isinstance(bias[0], (Alibi, AlibiInterpolated, NtkAlibi)):
        return "only a bias that is linear in the distance fits into extra dimensions"
    if call.options & {"softcap", "sink_logits"} or call.overflows:
        return "it is one call of SDPA, without soft-capping or sinks"
    tile = _single_tile(call._replace(scheme=replace(call.scheme, bias=())))
    if tile is None or call.queries < 2:
        return "it is one causal call of SDPA over contiguous positions"
    if tile.kind != "lower":
        return "keys ahead of a query have a different slope than keys behind it"
    widest = float(slopes_of(bias[0], call.heads).max()) * call.keys
    if not call.positive_scale or (call.dtype != torch.float64 and widest > MAX_ALIBI):
        return f"a bias of {widest:,.0f} leaves float32 too few bits for q·k"
    return Plan("alibi", (Step(Kernel.SDPA_ALIBI, (0,), (tile,)),))


def _banded(call: CallSpec) -> Plan | str:
    from longitude.ops.bands import plan_banded  # deferred: it imports this module

    return plan_banded(call)


BACKENDS: dict[str, Callable[[CallSpec], Plan | str]] = {
    "eager": _eager, "native": _native, "flex": _flex, "banded": _banded, "alibi": _alibi,
}  # fmt: skip
AUTO = ("banded", "alibi", "flex", "native", "eager")  # in this order; the last runs everything
