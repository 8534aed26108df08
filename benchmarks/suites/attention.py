"""The suite `attention`: calls under a scheme, against the fastest that its structure allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.attention_peers import peers_of
from benchmarks.suites.baselines import Base, Qkv, plain, windowed
from benchmarks.suites.case import Case, Way
from benchmarks.suites.rows import BASELINE, MERGED, ONE_PASS, OURS, ROOM, Work
from benchmarks.suites.setup import Setup, Sizes, machine, one_scheme, relative, sampled
from benchmarks.suites.timing import seconds
from longitude.core.part import Dims
from longitude.core.scheme import Scheme
from longitude.ops.attention import attention

CUDA_LENGTHS, CPU_LENGTHS = (8192, 32768, 131072), (1024,)
FAR = {8192: 0.80, 32768: 0.92, 131072: 0.97}  # minimum speed, × the baseline's, by length
WITHIN = dict.fromkeys(CUDA_LENGTHS, 0.8)  # 1.25 times the baseline's time
CONTENT = {32768: 0.4}  # for scores with a term of content and distance
TERMS = 512  # distances that such a term distinguishes
CALLS = {1: "first", 2: "second", 5: "fifth"}  # at a new length, that are timed
LONGER = 16  # tokens between one new length and the next
CPU_GOALS = 4096  # tokens from which on the goals of a CPU apply


@dataclass(frozen=True)
class Kind:
    """A scheme to measure: in `text`, `{w}` is the window and `{eighth}` an eighth of it. `best` is
    the kind of baseline, `goals` the minimum speed by length, `longest` the greatest length that is
    measured, `grad` whether gradients are timed, `batch` the number of sequences."""

    name: str
    text: str
    best: str = "rotated"
    goals: Mapping[int, float] = field(default_factory=dict)
    windows: tuple[int, ...] = (0,)
    longest: int = 131072
    grad: bool = False
    batch: int = 1
    first: bool = False  # the first calls at a new length are timed, too
    on_cpu: float | None = None  # minimum speed on a CPU, from 4,096 tokens on


BOTH = (1024, 4096)
LEAKY, SELF = "rope(remap=leaky_rerope({w}, 8))", "rope(remap=self_extend(8, {w}))"
KINDS = (
    Kind("RoPE", "rope()", goals=WITHIN),
    Kind("YaRN + logn", "rope(frequencies=yarn(4, original=2048)) + logn(2048)", "sharper", WITHIN),
    Kind("leaky ReRoPE", LEAKY, goals=FAR, windows=BOTH, first=True, on_cpu=1 / 1.25),
    Kind("Self-Extend", SELF, goals=FAR, windows=BOTH, first=True, on_cpu=1 / 1.25),
    Kind("dual chunk", "rope(remap=dual_chunk({w}, {eighth}))", windows=(4096,),
         goals={8192: 0.80, 32768: 0.90, 131072: 0.95}),
    Kind("T5's bias", "t5()", "plain", {8192: 0.80, 32768: 0.93}, on_cpu=1 / 2.2),
    Kind("ALiBi", "alibi()", "plain", {8192: 0.80, 32768: 0.85}, on_cpu=1 / 2.2),
    Kind("KERPLE", "kerple_log()", "plain", {8192: 0.80, 32768: 0.85}, on_cpu=0.4),
    Kind("FIRE", "fire()", "plain", {8192: 0.5, 32768: 0.5}, longest=32768, on_cpu=0.4),
    Kind("window + 4 sinks", "rope() + window({w}, sinks=4)", "windowed",
         dict.fromkeys(CUDA_LENGTHS, 1 / 1.1), (1024,)),
    Kind("streaming", "rope(remap=streaming(4, {w}))", "windowed", WITHIN, (1024,)),
    Kind("LM-Infinite", "rope(remap=lm_infinite({w}, 4))", "windowed", WITHIN, (1024,)),
    Kind("Shaw", f"shaw({TERMS // 2 - 1})", "plain", CONTENT, longest=32768, on_cpu=0.4),
    Kind("Transformer-XL", f"transformer_xl(clamp={TERMS - 1})", "plain", CONTENT, longest=32768,
         on_cpu=0.4),
    Kind("DeBERTa", f"deberta({TERMS // 2}) + bidirectional()", "full", CONTENT, longest=32768,
         on_cpu=0.4),
    Kind("leaky ReRoPE, with gradients", LEAKY, goals={8192: 0.8, 32768: 0.92}, windows=(4096,),
         longest=32768, grad=True),
    Kind("T5's bias, with gradients", "t5()", "plain", longest=8192, grad=True),
    Kind("ALiBi, with gradients", "alibi()", "plain", longest=8192, grad=True),
    Kind("leaky ReRoPE, with gradients", LEAKY, goals={8192: 0.8}, windows=(4096,), longest=8192,
         grad=True, batch=4),
)  # fmt: skip


def cases(setup: Setup) -> Iterator[Case]:
    """Yield each kind at every length up to its longest."""
    for n in setup.lengths(CUDA_LENGTHS, CPU_LENGTHS):
        judge = None
        for kind in KINDS:
            if n > kind.longest:
                continue
            s = replace(sizes(setup, n), batch=kind.batch)
            if judge is None or len(judge.qkv[0]) != s.batch:
                judge = Judge(setup.qkv(s))
            for w in kind.windows:
                yield _case(setup, kind, s, judge, _window(w, n))
            if kind.first and setup.cuda:  # on a CPU no kernel plans new lengths
                yield first_calls(setup, kind, s, _window(kind.windows[-1], n))


def sizes(setup: Setup, n: int) -> Sizes:
    """Return a call's sizes; on a GPU the heads of an 8B model, four query heads per key head."""
    return Sizes(1, 32, 8, n, 128) if setup.cuda else Sizes(1, 4, 4, n, 64)


def _window(w: int, n: int) -> int:
    """Return the window of a call: `w` from 8,192 tokens on, in proportion less below."""
    return min(w, max(2, w * n // CUDA_LENGTHS[0])) if w else 0


def _case(setup: Setup, kind: Kind, s: Sizes, judge: Judge, w: int) -> Case:
    scheme = one_scheme(kind.text.format(w=w, eighth=max(1, w // 8)))
    q, k, v = (x.detach().requires_grad_(kind.grad) for x in judge.qkv)
    base = _baseline(setup, kind, (q, k, v), w)
    weights = fresh(scheme, s, setup.device, kind.grad)
    goal = setup.goal(_goal(kind, scheme, s.tokens))
    if kind.on_cpu and not setup.cuda and s.tokens >= CPU_GOALS:
        goal = {"speed": kind.on_cpu}
    check = partial(judge.error, one_scheme(base.scheme)) if base.scheme else None
    run, error = partial(attended, scheme, (q, k, v), weights), partial(judge.error, scheme)
    if kind.grad:
        backward = partial(_there_and_back, torch.randn_like(q), (q, k, v))
        speed_goal = {name: least for name, least in goal.items() if name == "speed"}
        ways = [Way(base.name, partial(backward, base.run))]
        ways.append(Way("longitude", partial(backward, run), goal=speed_goal))
    else:
        ways = [Way(base.name, base.run, BASELINE, check), Way("longitude", run, OURS, error, goal)]
    if setup.peers and not kind.grad:
        window = w if kind.best == "windowed" else None
        ways += peers_of(setup, scheme, (q, k, v), weights, window, error)
    name, sizes = kind.name + (f", window {w:,}" if w else ""), f"{s}, {setup.written}"
    work = Work("attention", name, sizes, s.tokens, base.name, machine(setup.device))
    return Case(work, ways, judge.qkv, _operations(kind, s, w), "FLOP/s")


def first_calls(setup: Setup, kind: Kind, s: Sizes, w: int) -> Case:
    """The first calls at a new length. Each round's length is new, a few tokens greater than the
    baseline's, which has run before. Calls are timed one by one, including the host's latency."""
    scheme = one_scheme(kind.text.format(w=w, eighth=max(1, w // 8)))
    qkv = setup.qkv(s)
    base = _baseline(setup, kind, qkv, w)
    names = {n: f"longitude, {ordinal} call" for n, ordinal in CALLS.items()}

    def readings(rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in (base.name, *names.values())}
        for index in range(1, rounds + 1):
            new = setup.qkv(replace(s, tokens=s.tokens + LONGER * index))
            for n in range(1, max(CALLS) + 1):
                elapsed = seconds(partial(attended, scheme, new, {}), setup.cuda)
                if n in names:
                    times[names[n]].append(elapsed)
            times[base.name].append([seconds(base.run, setup.cuda) for _ in range(3)][-1])
        return times

    run, goal = partial(attended, scheme, qkv, {}), setup.goal(_goal(kind, scheme, s.tokens))
    speed_goal = {name: least for name, least in goal.items() if name == "speed"}
    ways = [Way(base.name, base.run, BASELINE)]
    ways += [Way(name, run, OURS, goal=speed_goal if n > 1 else {}) for n, name in names.items()]
    name = f"{kind.name}, window {w:,}, calls at a new length"
    work = Work("attention", name, f"{s}, {setup.written}", s.tokens, base.name,
                machine(setup.device))  # fmt: skip
    return Case(work, ways, qkv, readings=readings)


def _goal(kind: Kind, scheme: Scheme, n: int) -> dict[str, float]:
    """Return the goals: speed by length, error by whether parts of a softmax are merged, memory."""
    speed = {"speed": kind.goals[n]} if n in kind.goals else {}
    remaps = scheme.rotary is not None and scheme.rotary.remap is not None
    flat = any(part.flat_beyond for part in scheme.bias)
    merges = remaps or flat or len(scheme.areas()) > 1
    return {**speed, "error": MERGED if merges else ONE_PASS, "memory": ROOM}


def _baseline(setup: Setup, kind: Kind, qkv: Qkv, w: int) -> Base:
    make: dict[str, Callable[[], Base]] = {
        "rotated": lambda: plain(setup, qkv),
        "sharper": lambda: plain(setup, qkv, sharper=_sharper(qkv[0].shape[2])),
        "plain": lambda: plain(setup, qkv, rotated=False),
        "windowed": lambda: windowed(setup, qkv, w),
        "full": lambda: plain(setup, qkv, causal=False, rotated=False),
    }
    return make[kind.best]()


def _sharper(n: int) -> float:
    """Return the factor of YaRN ×4 with logn(2048) on the scores of the last of n rows."""
    return (0.1 * math.log(4) + 1) ** 2 * max(1.0, math.log(n) / math.log(2048))


def attended(scheme: Scheme, qkv: Qkv, weights: dict[str, Tensor]) -> Tensor:
    """Our attention over all tokens."""
    n = qkv[0].shape[2]
    return attention(scheme, *qkv, range(n), range(n), weights)


def _there_and_back(grad: Tensor, qkv: Qkv, run: Callable[[], Any]) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients of q, k and v."""
    with torch.enable_grad():
        return torch.autograd.grad(run(), qkv, grad)


def fresh(scheme: Scheme, s: Sizes, device: torch.device, grad: bool = False) -> dict[str, Tensor]:
    """Return weights of learned parts as initialised for training."""
    weights = scheme.init(Dims(s.heads * s.dim, s.heads, s.dim), torch.Generator().manual_seed(0))
    return {name: w.to(device).requires_grad_(grad) for name, w in weights.items()}


def _operations(kind: Kind, s: Sizes, w: int) -> float:
    """Count the multiplications and additions of the two matrix products over visible pairs;
    backward has 2.5 times as many as forward, as in flash attention."""
    n = s.tokens
    pairs = n * n / 2
    if kind.best == "windowed":
        pairs = n * min(w, n)
    elif kind.best == "full":
        pairs = n * n
    return 4 * pairs * s.dim * s.heads * s.batch * (3.5 if kind.grad else 1)


class Judge:
    """Errors against float64: each scheme's attention at sampled rows of q, computed once."""

    def __init__(self, qkv: Qkv) -> None:
        self.qkv, self.rows = qkv, sampled(qkv[0].shape[2], qkv[0].device)
        self._known: dict[str, Tensor] = {}

    def error(self, scheme: Scheme, out: Any) -> float:
        """Return the relative error of an output's sampled rows against float64."""
        return relative(out[:, :, self.rows], self._want(scheme))

    def _want(self, scheme: Scheme) -> Tensor:
        if scheme.written not in self._known:
            q, k, v = (x.detach() for x in self.qkv)
            s = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3])
            weights = {name: w.double() for name, w in fresh(scheme, s, q.device).items()}
            pos = torch.arange(s.tokens, device=q.device)
            q_rows = q[:, :, self.rows].double()
            call = (scheme, q_rows, k.double(), v.double(), self.rows, pos, weights)
            self._known[scheme.written] = attention(*call, backend="eager")
        return self._known[scheme.written]
