"""The suite `decode`: one token over a long context whose keys are cached pre-RoPE, against SDPA
over keys rotated beforehand, which reads every key just once: no method can read less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.suites.baselines import Attend, quickest
from benchmarks.suites.case import Case, Way
from benchmarks.suites.peers import Unfit, found, peer
from benchmarks.suites.rope import BASE, in_graphs
from benchmarks.suites.rows import BASELINE, OURS, Work
from benchmarks.suites.setup import Setup, Sizes, machine, one_scheme, relative
from benchmarks.suites.timing import Run
from longitude.cache import Cache
from longitude.core.scheme import Scheme
from longitude.ops.attention import attention

GOAL = 1 / 1.05  # of SDPA's speed
SCHEMES = {
    "RoPE": "rope()",
    "leaky ReRoPE": "rope(remap=leaky_rerope({w}, 8))",
    "Self-Extend": "rope(remap=self_extend(8, {w}))",
    "dual chunk": "rope(remap=dual_chunk({w}, {eighth}))",
}
Qkv = tuple[Tensor, Tensor, Tensor]


def cases(setup: Setup) -> Iterator[Case]:
    """Yield each scheme at each length, for one sequence and for several. CUDA graphs come last, so
    that a failing capture can't affect other cases."""
    for graphs in (False, True) if setup.cuda else (False,):
        for n in setup.lengths((32768, 131072), (4096,)):
            for batch in (1, 8) if setup.cuda else (1,):
                s = Sizes(batch, 32, 8, n, 128) if setup.cuda else Sizes(batch, 8, 2, n, 64)
                qkv = setup.qkv(s, rows=1)
                for name in SCHEMES:
                    case = _case(setup, s, qkv, name, graphs)
                    yield in_graphs(case) if graphs else case


def _case(setup: Setup, s: Sizes, qkv: Qkv, name: str, graphs: bool) -> Case:
    w = min(4096, s.tokens // 4)
    scheme = one_scheme(SCHEMES[name].format(w=w, eighth=w // 8))
    kernel, attend = _fastest(setup, qkv)
    q, k, v = qkv
    base, judge = f"SDPA on rotated keys ({kernel})", partial(_error, scheme, qkv)
    goal = setup.goal({"speed": GOAL})
    ways = [
        Way(base, lambda: attend(q, k, v), BASELINE, partial(_error, one_scheme("causal()"), qkv)),
        Way("longitude, pre-RoPE keys", partial(_ours, scheme, qkv), OURS, judge, goal),
    ]
    if not graphs:  # a cache grows with every step: no two steps are the same
        ways.append(_cached(scheme, qkv, judge))
    if setup.peers and setup.cuda and name == "RoPE":
        ways.append(peer("FlashInfer, pre-RoPE keys", "flashinfer", partial(_infer, qkv), judge))
        ways.append(peer("flash-attn on rotated keys", "flash_attn", partial(_flash, qkv)))
    what = f"one token, {name}" + (", in CUDA graphs" if graphs else "")
    sizes = f"{s}, {setup.written}"
    work = Work("decode", what, sizes, s.tokens, base, machine(setup.device))
    return Case(work, ways, qkv, k.nbytes + v.nbytes, "B/s")


def _ours(scheme: Scheme, qkv: Qkv) -> Tensor:
    n = qkv[1].shape[2]
    return attention(scheme, *qkv, range(n - 1, n), range(n))


def _cached(scheme: Scheme, qkv: Qkv, judge: Callable[[Any], float]) -> Way:
    """A step of `Cache`: each run adds the token once more, so the cache grows by a few tokens.

    Only its first output is judged, which is over the same keys as the other methods'.
    """
    q, k, v = qkv
    cache, positions = Cache(scheme), count(k.shape[2] - 1)
    cache.add(k[:, :, :-1], v[:, :, :-1], range(k.shape[2] - 1))

    def step() -> Tensor:
        pos = next(positions)
        cache.add(k[:, :, -1:], v[:, :, -1:], range(pos, pos + 1))
        return cache.attend(q, range(pos, pos + 1))

    return Way("longitude's cache, one step", step, OURS, judge)


def _fastest(setup: Setup, qkv: Qkv) -> tuple[str, Attend]:
    """Return the fastest SDPA and its name: with the heads that share keys as rows of one query
    block, which reads the keys once, or with SDPA's own grouping."""

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, _, d = q.shape
        return sdpa(q.view(b, k.shape[1], -1, d), k, v).view(b, h, 1, d)

    if not setup.cuda:
        return "SDPA", rows
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: SDPBackend, attend: Attend) -> Attend:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v)

        return run

    ways = {
        "flash, heads as rows": by(SDPBackend.FLASH_ATTENTION, rows),
        "cuDNN, heads as rows": by(SDPBackend.CUDNN_ATTENTION, rows),
        "flash": by(SDPBackend.FLASH_ATTENTION, partial(sdpa, enable_gqa=True)),
        "as SDPA chooses": rows,
    }
    return quickest(ways, qkv)


def _error(scheme: Scheme, qkv: Qkv, out: Any) -> float:
    """Return the relative error of the first sequence's output against float64."""
    q, k, v = (x[:1].double() for x in qkv)
    n = k.shape[2]
    want = attention(scheme, q, k, v, range(n - 1, n), range(n), backend="eager")
    return relative(out[:1], want)


def _infer(qkv: Qkv) -> Run:
    """FlashInfer also rotates keys as it reads them: base and linear factor only, one sequence."""
    (decode,) = found("flashinfer", "single_decode_with_kv_cache")
    q, k, v = qkv
    if q.shape[0] > 1:
        raise Unfit("the plain function is for one sequence")
    query, keys, values = q[0, :, 0].contiguous(), k[0].contiguous(), v[0].contiguous()
    options = {"kv_layout": "HND", "pos_encoding_mode": "ROPE_LLAMA", "rope_theta": BASE}
    return lambda: decode(query, keys, values, **options)[None, :, None]


def _flash(qkv: Qkv) -> Run:
    (decode,) = found("flash_attn", "flash_attn_with_kvcache")
    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv)
    return lambda: decode(q, k, v).transpose(1, 2)
