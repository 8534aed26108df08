"""Bands of distances in one running softmax, with exact gradients.

For windows, remaps, the biases of the distance alone (T5, ALiBi, KERPLE, Sandwich), and FIRE.

Every area of every pass is a band of pairs (`bands`). Each band starts from the output and
log-sum-exp of the bands before it, so nothing has to be merged. The far pairs of a remap, or of a
bias that becomes constant, are one tile of a plain kernel, which runs first; the constant shifts
its log-sum-exp by one number per head. Each band computes its own gradients from the log-sum-exp of
the whole softmax. The table's gradient needs nothing from the far tile: a row's score gradients sum
to zero, so the gradient of the last entry is minus the sum of the others (and of a sink's).

A causal window without a bias is differentiated faster by other kernels than by the banded one: by
torch's FlashAttention 2 with a window argument, or, over blocks as long as the window is wide, by
cuDNN's causal kernel. A block has a lower triangle, and over the block before it an upper one, run
as a lower one with rows and columns reversed (two thirds of FlashAttention's time on an H200).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.part import Bias as BiasPart
from longitude.core.part import Weights
from longitude.ops.bands import (
    SHARE_ROWS,
    BandCall,
    BandKernels,
    Bias,
    Shares,
    Start,
    largest_ahead,
    reach_of,
)
from longitude.ops.gpu_operators import Three, laid_like
from longitude.ops.inputs import AttentionInputs, weights_of
from longitude.ops.kernels.launch import triton_available, usable
from longitude.ops.lse_merge import (
    OPERATORS,
    Forward,
    GradientPart,
    GradientSum,
    Operator,
    backward,
    forward,
    sink_gradients,
    stacked,
)
from longitude.ops.passes import ALL, Rotation, Windows, dense, make_passes, sliced
from longitude.ops.plan import Band, BandPiece, Kernel, Plan, Step, TableSpan
from longitude.parts.distance_bias import ByDistance
from longitude.parts.fire import Fire
from longitude.parts.rotary_tables import Memo, Tables

aten = torch.ops.aten
# rotated(pass_index, rows, columns): these rows of q and columns of k, rotated for that pass
Rotated = Callable[[int, slice, slice], tuple[Tensor, Tensor]]
Rotations = tuple[Rotation | None, ...]  # of all passes


def run(p: AttentionInputs, plan: Plan, kernels: BandKernels | None = None) -> Tensor:
    """Compute attention band by band, by our kernels or by those given."""
    bands: _Bands = p.once(("bands", kernels), lambda: _Bands.of(p, plan, kernels))
    bias = None if bands.table is None else bias_of(p, bands.table)
    if not p.needs_grad:
        return bands.forward(p.q, p.k, p.v, bias, p.sink_logits)[0]
    table, ahead = (bias.table, bias.ahead) if bias else (None, None)
    return _Banded.apply(bands, p.q, p.k, p.v, table, ahead, p.sink_logits)  # type: ignore[no-any-return]


class _Bands(NamedTuple):
    """All that a call needs besides its tensors."""

    kernels: BandKernels
    pieces: tuple[BandPiece, ...]
    far: Step | None
    table: TableSpan | None
    scale: float
    rotations: Rotations
    cut: dict[int, Rotation]  # of passes that one band reads, cut to its rows and columns
    together: tuple[BandPiece, ...]  # the bands that one launch runs forward, if any
    twice: Callable[..., Any] | None  # rotates q and k for both bands in one launch

    @classmethod
    def of(cls, p: AttentionInputs, plan: Plan, kernels: BandKernels | None) -> _Bands:
        if kernels is None:
            from longitude.ops.kernels.banded_backward import KERNELS as kernels  # imports Triton
        *far, near = plan.steps
        together = near.bands if near.kernel is Kernel.BANDS_TOGETHER else near.forward
        rotations = tuple(one.rotation() for one in make_passes(p))
        read = [(one.pass_index, _rows(one), slice(*one.columns)) for one in together]
        if not together:
            read = [(one.pass_index, ALL, slice(*one.columns)) for one in near.bands]
            read += [(step.passes[0], *_far_extent(step)[:2]) for step in far]
        uses = Counter(n for n, _, _ in read)
        cut = {n: one.cut(*where) for n, *where in read if (one := rotations[n]) and uses[n] == 1}
        twice, far_step = None, far[0] if far else None
        if len(together) == len(cut) == 2 and triton_available(p.q.device):
            from longitude.ops.kernels.rope import Twice  # imports Triton

            (first, *first_cut), (second, rows, columns) = read
            if first_cut == [ALL, slice(0, p.k.shape[2])]:
                full, part = cut[first], cut[second]
                offsets = (rows.start or 0, columns.start)
                twice = Twice((*full.q, *full.k), (*part.q, *part.k), offsets,
                              full.pairs)  # fmt: skip
        return cls(kernels, near.bands, far_step, near.table, p.scale, rotations, cut, together,
                   twice)  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Any, ...], list[Tensor | None]]:
        """Return output, log-sum-exp, what the far tile's backward needs, and each band's reach.

        The rotated q and k of a band are freed before those of the next are computed.
        """
        rotated = self.rotated(q, k)
        reaches: list[Tensor | None] = [None] * len(self.pieces) if self.together else []
        start, extra = Start(*self._together(q, k, v, rotated)) if self.together else None, ()
        if self.far is not None and not self.together:
            rows, columns, causal = _far_extent(self.far)
            hopper = causal and self.far.kernel is Kernel.HOPPER
            qkv = (
                *rotated(self.far.passes[0], ALL if hopper else rows, columns),
                sliced(v, columns),
            )
            if hopper:  # over all rows, so that the next band can write over the output
                band = Band(rows.start - columns.start, q.shape[2])
                call = BandCall(*qkv, None, band, self.scale)
                start = Start(*self.kernels.forward(call, None))
            else:
                result = forward(OPERATORS[self.far.kernel], *qkv, causal, self.scale)
                start, extra = Start(result.out, result.lse.float(), rows.start), result.extra
            if bias is not None:
                start = start._replace(lse=start.lse + bias.table[:, -1:])
        reached = self.table is not None and self.table.reached
        if bias is not None and reached and bias.ahead is None:
            bias = bias._replace(ahead=largest_ahead(bias.table))
        for piece in () if self.together else self.pieces:
            call = self.call(piece, rotated, v, bias)
            if reached:
                call = call._replace(reach=reach_of(call))
            reaches.append(call.reach)
            start = Start(*self.kernels.forward(call, start))
            del call
        assert start is not None
        out, lse = start.out, start.lse
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = (out * (lse - total).exp()[..., None]).to(v.dtype), total
        return out, lse, extra, reaches

    def _together(self, q: Tensor, k: Tensor, v: Tensor, rotated: Rotated) -> tuple[Tensor, Tensor]:
        """Return output (written over rotated queries, if any) and log-sum-exp of all bands."""
        pieces = self.together
        if self.twice is not None:
            pairs = self.twice(q, k)
        else:
            cuts = [(piece.pass_index, _rows(piece), slice(*piece.columns)) for piece in pieces]
            pairs = [rotated(*cut) for cut in cuts]
        out = None
        for piece, (rotated_q, _) in zip(pieces, pairs, strict=True):
            if not piece.top and self.rotations[piece.pass_index]:
                out = rotated_q
        assert self.kernels.together is not None
        return self.kernels.together(pairs, pieces, v, self.scale, q.shape[2], out)

    def call(self, piece: BandPiece, rotated: Rotated, v: Tensor, bias: Bias | None) -> BandCall:
        """Return the call of a band: its slice of columns, and a table that counts from them."""
        columns = slice(*piece.columns)
        q, k = rotated(piece.pass_index, ALL, columns)
        bias = bias and bias._replace(first=bias.first + columns.start)
        return BandCall(q, k, sliced(v, columns), bias, piece.band, self.scale, chunk=piece.chunk)

    def rotated(self, q: Tensor, k: Tensor) -> Rotated:
        """Return a function that rotates q and k on demand: in full and once if bands share it."""
        latest: dict[int, tuple[Tensor, Tensor]] = {}

        def rotated(n: int, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            rotation = self.rotations[n]
            if rotation is None:
                return sliced(q, rows), sliced(k, columns)
            if n in self.cut:
                return self.cut[n].apply(sliced(q, rows), sliced(k, columns))
            if n not in latest:
                latest.clear()
                latest[n] = rotation.apply(q, k)
            return sliced(latest[n][0], rows), sliced(latest[n][1], columns)

        return rotated


def _rows(piece: BandPiece) -> slice:
    """Return the rows that a band of a joint launch reads, from its first visible one on."""
    return slice(piece.top, None) if piece.top else ALL


def _far_extent(far: Step) -> tuple[slice, slice, bool]:
    """Return the rows and columns of the far tile, and whether it is causal."""
    (t,) = far.tiles
    return slice(t.top, t.top + t.height), slice(t.left, t.left + t.width), t.kind == "lower"


class _Banded(torch.autograd.Function):
    """apply(bands, q, k, v, table, ahead, sinks).

    q and k are saved pre-RoPE and rotated again for the gradients, which takes less time than
    keeping every rotated copy in memory would.
    """

    @staticmethod
    def forward(ctx: Any, bands: _Bands, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
                ahead: Tensor | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
        bias = None if table is None else Bias(table, bands.table.first, ahead)  # type: ignore[union-attr]
        out, lse, ctx.extra, ctx.reaches = bands.forward(q, k, v, bias, sinks)
        ctx.bands = bands
        ctx.save_for_backward(q, k, v, table, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        bands, grad = ctx.bands, grad_outputs[0]
        q, k, v, table, sinks, out, lse = ctx.saved_tensors
        if bands.far is not None or any(piece.backward in OPERATORS for piece in bands.pieces):
            grad = laid_like(grad, out)  # as cuDNN requires: once for all of its calls
        rotated = bands.rotated(q, k)
        bias = None if table is None else Bias(table, bands.table.first)
        totals = _Gradients((q, k, v), bands.rotations)
        wide = len(bands.pieces) > 1 or bands.far is not None
        d_table = torch.zeros_like(bias.table) if bias and ctx.needs_input_grad[4] else None
        for piece, reach in zip(bands.pieces, ctx.reaches, strict=True):
            call = bands.call(piece, rotated, v, bias)._replace(reach=reach)
            if piece.backward is Kernel.FLASH:
                parts = [_full_parts(window_backward_flash(call, grad, out, lse))]
            elif piece.backward in OPERATORS:
                parts = window_backward_tiles(call, grad, out, lse, OPERATORS[piece.backward])
            else:
                gradients = bands.kernels.backward(call, grad, out, lse, d_table is not None, wide)
                parts = [_full_parts(gradients[:3])]
                if d_table is not None and gradients.table is not None:
                    d_table = d_table + gradients.table
            for part in parts:
                totals.add(piece.pass_index, 0, piece.columns[0], part)
            del call
        if bands.far is not None:
            rows, columns, causal = _far_extent(bands.far)
            far_lse = lse if table is None else lse - table[:, -1:]
            q, k = rotated(bands.far.passes[0], rows, columns)
            result = Forward(sliced(out, rows), sliced(far_lse, rows), ctx.extra)
            operator, values = OPERATORS[bands.far.kernel], sliced(v, columns)
            grads = backward(
                operator, sliced(grad, rows), q, k, values, result, causal, bands.scale
            )
            totals.add(bands.far.passes[0], rows.start, columns.start, _full_parts(grads))
        d_sinks = None if sinks is None else sink_gradients(sinks, grad, out, lse)
        if d_table is not None and bands.table.flat:
            d_table[:, -1] = -d_table[:, :-1].sum(1) - (0 if d_sinks is None else d_sinks)
        return None, *(total.result() for total in totals.totals), d_table, None, d_sinks


class _Gradients:
    """Gradients of q, k and v, summed from parts, each rotated back as its pass was rotated."""

    def __init__(self, tensors: Three, rotations: Rotations) -> None:
        self.rotations, rotation = rotations, next(filter(None, rotations), None)
        self.totals = [GradientSum(x, rotation.pairs if rotation else "half") for x in tensors]

    def add(self, n: int, top: int, left: int, made: Sequence[GradientPart]) -> None:
        """Add the parts of pass n; its q begins at row `top`, its k and v at column `left`."""
        rotation, begins = self.rotations[n], (top, left, left)
        tables = (rotation.q, rotation.k, None) if rotation else (None, None, None)
        for total, part, begin, rotary in zip(self.totals, made, begins, tables, strict=True):
            starts = [begin + start for start in part.starts]
            total.add(part._replace(starts=starts, tables=rotary))


def bias_of(p: AttentionInputs, span: TableSpan) -> Bias:
    """Return the sum of all biases as a float32 table: a row per head, an entry per distance.

    It is memoised where nothing is learned (ALiBi, Sandwich). Weights can be written to in place,
    so a learned table is computed anew.
    """
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    offset, part = p.q_pos[0] - p.k_pos[0], p.scheme.bias[0]
    if isinstance(part, Fire):
        arguments = (p.q_pos, p.k_pos, span.first + offset, SHARE_ROWS)
        if usable(p.q):
            from longitude.ops.kernels.fire import share_table  # it imports Triton

            table, shares = share_table(part, weights_of(part.name, p.weights), *arguments)
            return Bias(table, -offset, shares=shares)
        weights = {name: x.float() for name, x in p.weights.items()}
        table, *shares = _term(part, p.q.shape[1], p.q.device, weights).by_share(*arguments)
        return Bias(table, -offset, shares=Shares(*shares))
    sizes = (p.q.shape[1], span.first + offset, span.last + offset, p.q.device)
    learned = any(weights_of(part.name, p.weights) for part in p.scheme.bias)
    if learned or _capturing(p.q.device) or torch.is_inference_mode_enabled():
        return Bias(_sum(p.scheme.bias, *sizes, p.weights), span.first)
    table, ahead = _tables(p.scheme.bias, *sizes)
    return Bias(table, span.first, ahead)


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, whose values no other call can use yet."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _sum(bias: tuple[BiasPart, ...], heads: int, first: int, last: int, device: torch.device,
         weights: Weights) -> Float[Tensor, "h r"]:  # fmt: skip
    values = []
    for part in bias:
        term = _term(part, heads, device, weights)
        assert isinstance(term, ByDistance)
        if term.rows is not None:  # T5: the row of each distance is fixed
            entries = _entries.__wrapped__ if _capturing(device) else _entries
            values.append(term.rows[entries(part, first, last, device)].mT.float())
            continue
        distances = torch.arange(first, last + 1, device=device)
        values.append(term.of_heads(heads, distances).float())
    return sum(values[1:], values[0]).expand(heads, -1)


def _term(part: BiasPart, heads: int, device: torch.device, weights: Weights) -> Any:
    """Return the term of a bias that reads only the sizes of q and k, which are empty here."""
    query = torch.empty(1, heads, 1, 1, device=device)
    here = torch.empty(1, 1, dtype=torch.int64, device=device)
    return part.term(query, query, here, here, weights_of(part.name, weights), 1.0)


@lru_cache(maxsize=64)
def _entries(part: BiasPart, first: int, last: int, device: torch.device) -> Tensor:
    """Return the row of `term.rows` that each distance reads."""
    with torch.inference_mode(False), torch.no_grad():  # memoised: may serve training later
        return part.entry(torch.arange(first, last + 1, device=device))  # type: ignore[attr-defined]


@partial(Memo, limit=2**24)  # numbers in all cached tables together
def _tables(
    bias: tuple[BiasPart, ...], heads: int, first: int, last: int, device: torch.device
) -> Tables:
    table = _sum(bias, heads, first, last, device, {})
    return table, largest_ahead(table)


def _full_parts(made: Three) -> list[GradientPart]:
    """Wrap the gradients of all rows and columns that a kernel was given."""
    return [GradientPart(x[None], [0]) for x in made]


def window_backward_flash(call: BandCall, grad: Tensor, out: Tensor, lse: Tensor) -> Three:
    """Return the gradients of a causal window by FlashAttention 2, given the output and log-sum-exp
    of a softmax over more than the window: one pass over the pairs, where our kernel takes two."""
    n, hi = call.q.shape[2], call.band.hi
    tensors = (grad, call.q, call.k, call.v, out)
    tokens_first = dense(*(x.transpose(1, 2) for x in tensors))
    gradients = aten._flash_attention_backward(
        *tokens_first, lse.contiguous(), None, None, n, n, 0.0, True, *_no_dropout(call.q.device),
        scale=call.scale, window_size_left=-1 if hi >= n else hi - 1, window_size_right=0,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


@lru_cache(maxsize=64)
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the random state that the kernel expects without dropout."""
    return torch.empty(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def window_backward_tiles(
    call: BandCall, grad: Tensor, out: Tensor, lse: Tensor, operator: Operator
) -> list[list[GradientPart]]:
    """Return the gradients of q, k and v over full blocks, by causal tiles of another operator
    (cuDNN's): lower triangles, which are views, and upper ones, which one launch copies."""
    size, n, batch = call.band.hi, call.q.shape[2], grad.shape[0]

    def blocks(x: Tensor) -> Tensor:  # to (b·t h size d): a view if tokens precede heads
        return x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)

    dout, q, k, v, o = map(blocks, (grad, call.q, call.k, call.v, out))
    lses = blocks(lse[..., None])
    gradients = backward(operator, dout, q, k, v, Forward(o, lses[..., 0]), True, call.scale)
    starts = list(range(0, n, size))
    lower = [GradientPart(x.unflatten(0, (batch, -1)).transpose(0, 1), starts) for x in gradients]
    tops, height = starts[1:], size - 1
    lefts = [top - height for top in tops]
    rows = [Windows(x, tops, height) for x in (grad, out, call.q)]
    columns = [Windows(x, lefts, height) for x in (call.k, call.v)]
    dout, o, q, k, v = stacked([*rows, *columns], flipped=True)
    (lses,) = stacked([Windows(lse[..., None], tops, height)], flipped=True)
    gradients = backward(operator, dout, q, k, v, Forward(o, lses[..., 0]), True, call.scale)
    upper = [
        GradientPart(x.unflatten(0, (len(tops), -1)), starts, flipped=True)
        for x, starts in zip(gradients, (tops, lefts, lefts), strict=True)
    ]
    return [lower, upper]
