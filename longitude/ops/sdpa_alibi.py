"""ALiBi through a plain causal kernel: the bias rides in sixteen extra head dimensions.

Under softmax a number that a whole row shares does not count, so -m (i - j) is m (j - c) for any c:
a product of something of the head and something of the key, as q·k is. Queries get the slope m in
extra dimensions, keys their distance to the last one. Both are split into a high, a middle and a
low part in the type of q and k, 24 bits together, and every product of two parts has a dimension
of its own: nine, padded to sixteen. No kernel of ours is needed; it is the way where Triton is
missing. What it costs is the type of the sums: far from c, float32 has few bits left for q·k, so
calls whose largest bias exceeds `WIDEST` are refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Bias, Weights
from longitude.ops import sdpa as native
from longitude.ops.inputs import AttentionInputs
from longitude.ops.passes import make_passes
from longitude.parts.alibi import Alibi, AlibiInterpolated, NtkAlibi
from longitude.parts.distance_bias import ByDistance

LINEAR = (Alibi, AlibiInterpolated, NtkAlibi)
EXTRA = 16  # kernels want head sizes in multiples of it
PARTS = 3
UNIT = 256  # keys count in these: 131,072 would not fit into float16
WIDEST = 2**14  # 2^-10 is then what float32 keeps of q·k, as much as a weight in bfloat16


def refuses(p: AttentionInputs) -> str | None:
    """Why the bias can't ride in extra dimensions, or None."""
    if len(p.scheme.bias) != 1 or not isinstance(p.scheme.bias[0], LINEAR):
        return "only a bias that is linear in the distance fits into extra dimensions"
    if p.softcap or p.sink_logits is not None or p.overflows:
        return "it is one call of SDPA, without soft-capping or sinks"
    plain = _plain(p)
    if native.by_mask(plain) or not native.single(plain) or p.q.shape[2] < 2:
        return "it is one causal call of SDPA over contiguous positions"
    if not native.causal(plain, plain.scheme.areas()):
        return "keys ahead have another slope than keys behind"
    widest = float(slopes_of(p.scheme.bias[0], p.q.shape[1]).max()) * p.k.shape[2]
    if p.scale <= 0 or (p.q.dtype != torch.float64 and widest > WIDEST):
        return f"a bias of {widest:,.0f} leaves float32 too few bits for q·k"
    return None


def run(p: AttentionInputs) -> Tensor:
    """Attention by one call of SDPA."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    q, k = make_passes(p)[0].turned()
    slopes = slopes_of(p.scheme.bias[0], q.shape[1]).to(q.device) * (UNIT / p.scale)
    behind = torch.arange(1 - k.shape[2], 1, device=q.device, dtype=torch.float64) / UNIT
    of_q, of_k = parts(slopes, q.dtype), parts(behind, k.dtype)
    q = _longer(q, of_q.repeat_interleave(PARTS, -1)[:, None])
    k = _longer(k, of_k.repeat(1, PARTS))
    v = p.v if p.q.is_cuda else pad(p.v, (0, q.shape[-1] - p.v.shape[-1]))  # CPU: of one size
    grouped = q.shape[1] != k.shape[1]
    out = sdpa(q, k, v, is_causal=True, dropout_p=p.dropout, scale=p.scale, enable_gqa=grouped)
    return out[..., : p.v.shape[-1]]


def parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as sums of three of a narrower type, the largest first."""
    found = []
    for _ in range(PARTS):
        found.append(x.to(dtype))
        x = x - found[-1].to(x.dtype)
    return torch.stack(found, -1)


def _longer(x: Tensor, extra: Tensor) -> Tensor:
    """x with extra dimensions of each head and token, and zeros up to `EXTRA`."""
    extra = pad(extra, (0, EXTRA - extra.shape[-1]))
    return torch.cat([x, extra.expand(*x.shape[:3], EXTRA)], -1)


def _plain(p: AttentionInputs) -> AttentionInputs:
    return replace(p, scheme=replace(p.scheme, bias=()))


@lru_cache(maxsize=64)
def slopes_of(part: Bias, heads: int) -> Tensor:
    """What a linear bias takes off for each step back, one number a head, in float64."""
    one, pos = torch.zeros(1, heads, 1, 1, dtype=torch.float64), torch.zeros(1, 1)
    none: Weights = {}
    term = part.term(one, one, pos, pos, none, 1.0)
    assert isinstance(term, ByDistance)
    return -term.value(torch.arange(heads), torch.ones(1))
