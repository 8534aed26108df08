"""The kernels' references in plain torch: what each computes, the full score matrix at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.ops.bands import BandCall, BandGradients, BandKernels, Bias, Outs, Start, Sums
from longitude.ops.decode import FIELDS, DecodePlan
from longitude.ops.passes import accum_dtype
from longitude.ops.plan import Band, BandPiece
from longitude.parts.rope import Pairs, apply_rotary


def band_reference(call: BandCall, start: Start | None = None) -> tuple[Outs, Sums]:
    """Reference for kernels.banded: output and log-sum-exp, the full score matrix at once."""
    scores, v = scores_of(call), call.v
    lse = scores.logsumexp(-1)
    out = weights(scores, lse) @ _per_head(call.q, v).to(lse.dtype)
    if start is not None:
        more = torch.full_like(lse, float("-inf"))
        more[:, :, start.top :] = start.lse
        so_far = torch.zeros_like(out)
        so_far[:, :, start.top :] = start.out
        total = torch.logaddexp(lse, more)
        share, rest = (torch.where(total == -torch.inf, 0, (x - total).exp()) for x in (lse, more))
        out, lse = out * share[..., None] + so_far * rest[..., None], total
    return out.to(v.dtype), lse


def scores_of(call: BandCall) -> Float[Tensor, "b h n m"]:
    """Every score in float32 at least, -inf outside the band and out of reach."""
    q, k, bias, band = call.q, call.k, call.bias, call.band
    wide = accum_dtype(q)
    content = q.to(wide) @ _per_head(q, k).to(wide).mT * call.scale
    away = _distances(q, k)
    seen = (away >= band.lo) & (away < band.hi)
    if call.reach is not None:
        seen = seen & (away < call.reach[..., None, None])
    if call.chunk is not None:
        size, lo, hi, row, column = call.chunk
        rows, columns = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        chunks = (rows[:, None] + row) // size - (columns + column) // size
        seen = seen & (chunks >= lo) & (chunks < hi)
    scores = content if bias is None else content + bias.table.to(wide)[:, _entries(away, bias)]
    return scores.masked_fill(~seen, float("-inf"))


def _distances(q: Tensor, k: Tensor) -> Tensor:
    rows = torch.arange(q.shape[2], device=q.device)
    return rows[:, None] - torch.arange(k.shape[2], device=q.device)


def _entries(away: Tensor, bias: Bias) -> Tensor:
    return (away - bias.first).clamp(0, bias.table.shape[1] - 1)


def _per_head(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def weights(scores: Tensor, lse: Tensor) -> Tensor:
    """e^(score - lse), and nothing where nothing is seen."""
    lse = lse.to(scores.dtype)[..., None]
    return torch.where(scores == -torch.inf, 0, (scores - lse).exp())


def band_backward_reference(
    call: BandCall, grad: Outs, out: Outs, lse: Sums, table: bool = True, wide: bool = True
) -> BandGradients:
    """Reference for the gradients, given the output and log-sum-exp of the softmax that the band is
    a part of; the table's last entry gets what lies beyond it, too."""
    accum = accum_dtype(call.q)
    q, k, v, grad, out = (x.to(accum) for x in (*call[:3], grad, out))
    bias, group = call.bias, q.shape[1] // k.shape[1]
    p = weights(scores_of(call), lse)
    ds = p * (grad @ _per_head(q, v).mT - (grad * out).sum(-1, keepdim=True))
    dq = ds @ _per_head(q, k) * call.scale
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q * call.scale, p.mT @ grad))
    if bias is None or not table:
        return BandGradients(dq, dk, dv, None)
    entries = _entries(_distances(q, k), bias).flatten()
    d_table = torch.zeros_like(bias.table, dtype=accum).index_add(1, entries, ds.sum(0).flatten(1))
    return BandGradients(dq, dk, dv, d_table)


def together_reference(
    pairs: Sequence[tuple[Tensor, Tensor]], pieces: Sequence[BandPiece], v: Tensor, scale: float,
    rows: int, out: Tensor | None,
) -> tuple[Outs, Sums]:  # fmt: skip
    """Reference for several bands in one launch: one after the other, over their own rows."""
    wide, (b, h) = accum_dtype(v), pairs[0][0].shape[:2]
    whole = Start(
        v.new_zeros(b, h, rows, v.shape[3]), v.new_full((b, h, rows), -torch.inf).to(wide)
    )
    for (q, k), one in zip(pairs, pieces, strict=True):
        band, chunk = Band(one.band.lo - one.top, one.band.hi - one.top), one.chunk
        chunk = chunk and chunk._replace(row=chunk.row + one.top)
        call = BandCall(q, k, v[:, :, slice(*one.columns)], None, band, scale, chunk=chunk)
        own = Start(whole.out[:, :, one.top :], whole.lse[:, :, one.top :])
        for so_far, more in zip(own[:2], band_reference(call, own), strict=True):
            so_far.copy_(more)
    return (whole.out if out is None else out.copy_(whole.out)), whole.lse


REFERENCE = BandKernels(band_reference, band_backward_reference, together_reference)


def decode_reference(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv m d"],
    v: Float[Tensor, "b hkv m dv"],
    plan: DecodePlan,
    pairs: Pairs = "half",
    scale: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    key_padding: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Reference for kernels.decode in float64: each key is rotated by its block, then by its offset
    in the block."""
    b, h, nq, d = q.shape
    wide_q, wide_k = q.double(), k.repeat_interleave(h // k.shape[1], 1).double()
    scores = torch.full((b, h, nq, k.shape[2]), -torch.inf, dtype=torch.float64, device=q.device)
    for r in range(b):
        ints = plan.ints[r % len(plan.ints)][: plan.segments * (FIELDS + 2 * nq)]
        tables = plan.floats[r % len(plan.floats)].view(plan.segments, nq, 2, -1)
        for one, own in zip(ints.view(plan.segments, -1).tolist(), tables.double(), strict=True):
            _, _, frame, first, offset, span, chunk, per, lead, wrap, low, high = one[:FIELDS]
            at = torch.arange(low, high, device=q.device)
            block = at // chunk * per + at % chunk // span - first + lead
            inner, outer = (
                (c[None, None, frame, n].double(), s[None, None, frame, n].double())
                for (c, s), n in ((plan.steps, at % chunk % span), (plan.starts, block % wrap))
            )
            here = slice(low + offset, high + offset)
            rotated = apply_rotary(
                apply_rotary(wide_k[r : r + 1, :, here], *inner, pairs), *outer, pairs
            )
            query = apply_rotary(
                wide_q[r : r + 1], own[None, None, :, 0], own[None, None, :, 1], pairs
            )
            bounds = torch.tensor(one[FIELDS:], device=q.device).view(nq, 2, 1)
            hidden = (at < bounds[:, 0]) | (at >= bounds[:, 1])
            product = (query @ rotated.mT)[0] * (d**-0.5 if scale is None else scale)
            scores[r, :, :, here] = torch.where(hidden, scores[r, :, :, here], product)
    if key_padding is not None:
        scores = scores.masked_fill(key_padding[:, None, None], -torch.inf)
    if sink_logits is not None:
        sink = sink_logits.double().view(1, h, 1, 1).expand(b, h, nq, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[2]]
    return (weights @ v.double().repeat_interleave(h // k.shape[1], 1)).to(q.dtype)
