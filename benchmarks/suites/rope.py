"""The suite `rope`: q and k rotated together, against a copy of both.

A rotation reads and writes as much as a copy, plus its tables: a copy is the upper bound of speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.case import Case, Way
from benchmarks.suites.peers import Unfit, found, peer
from benchmarks.suites.rows import BASELINE, OURS, Work
from benchmarks.suites.setup import Setup, Sizes, machine, relative, sampled
from benchmarks.suites.timing import Run, graphed
from longitude.ops.kernels.launch import usable
from longitude.parts.rope import Pairs, apply_rotary

Pair = tuple[Tensor, Tensor]
Apply = Callable[[Tensor, Tensor], Pair]
BASE = 10000.0
GOAL, GOAL_MS = 0.95, 0.016  # of a copy's speed; milliseconds for one token of 64 sequences


@dataclass(frozen=True, eq=False)
class Turn:
    """Queries, keys, their positions (b|1, n), and the number of dimensions to rotate."""

    q: Tensor
    k: Tensor
    pos: Tensor
    pairs: Pairs = "half"
    rotary: int = 0  # 0: all dimensions

    @property
    def width(self) -> int:
        return self.rotary or self.q.shape[-1]

    def angles(self) -> Tensor:
        """Return the angles (b|1, n, half) in float64."""
        steps = torch.arange(0, self.width, 2, dtype=torch.float64, device=self.q.device)
        return self.pos[..., None].double() * BASE ** (-steps / self.width)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (b|1, 1, n, half) in float32."""
        angle = self.angles()[:, None]
        return angle.cos().float(), angle.sin().float()

    def error(self, made: Any, back: bool = False) -> float:
        """Return the relative error of the rotated q against float64, at sampled tokens."""
        rows = sampled(self.q.shape[2], self.q.device)
        angle = self.angles()[:, None][:, :, rows] * (-1 if back else 1)
        return relative(made[0][:, :, rows], _rotated(self.q[:, :, rows], angle, self.pairs))


def _rotated(x: Tensor, angle: Tensor, pairs: Pairs) -> Tensor:
    """Rotate by the formula, in float64."""
    x64, width = x.double(), 2 * angle.shape[-1]
    rotary, rest = x64[..., :width], x64[..., width:]
    a, b = rotary.chunk(2, -1) if pairs == "half" else rotary.unflatten(-1, (-1, 2)).unbind(-1)
    halves = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    rotated = torch.cat(halves, -1) if pairs == "half" else torch.stack(halves, -1).flatten(-2)
    return torch.cat([rotated, rest], -1)


def cases(setup: Setup) -> Iterator[Case]:
    """Yield cases: both layouts, half of each head, gradients, and one token of many sequences."""
    for n in setup.lengths((8192,), (2048,)):
        s = Sizes(4, 32, 8, n, 128) if setup.cuda else Sizes(1, 8, 2, n, 64)
        q, k, _ = setup.qkv(s)
        full = Turn(q, k, torch.arange(n, device=setup.device)[None])
        yield _case(setup, "half pairs", s, full)
        yield _case(setup, "adjacent pairs", s, Turn(q, k, full.pos, "adjacent"))
        yield _case(setup, "half of each head", s, Turn(q, k, full.pos, rotary=s.dim // 2))
        yield _there_and_back(setup, s, full)
        if setup.cuda:
            yield in_graphs(_there_and_back(setup, s, full, ", in CUDA graphs"))
    s = Sizes(64, 32, 8, 1, 128) if setup.cuda else Sizes(64, 8, 2, 1, 64)
    q, k, _ = setup.qkv(s)
    pos = torch.arange(4096, 4096 + s.batch, device=setup.device)[:, None]
    yield _case(setup, "one token of each", s, Turn(q, k, pos), {"ms": GOAL_MS})
    if setup.cuda:
        name, goal = "one token of each, in CUDA graphs", {"ms": GOAL_MS}
        yield in_graphs(_case(setup, name, s, Turn(q, k, pos), goal))


def _work(setup: Setup, name: str, s: Sizes, copies: str) -> Work:
    sizes = f"{s}, {setup.written}"
    return Work("rope", f"rotate, {name}", sizes, s.tokens, copies, machine(setup.device))


def _case(setup: Setup, name: str, s: Sizes, t: Turn, goal: dict[str, float] | None = None) -> Case:
    goal = setup.goal(goal or {"speed": GOAL})
    ways = [
        Way("a copy of q and k", lambda: (t.q.clone(), t.k.clone()), BASELINE),
        Way("longitude", partial(ours(t), t.q, t.k), OURS, t.error, goal),
        *(_peers(setup, t) if setup.peers else ()),
    ]
    amount = 2 * (t.q.nbytes + t.k.nbytes)
    return Case(_work(setup, name, s, "a copy of q and k"), ways, (t.q, t.k), amount, "B/s")


def ours(t: Turn) -> Apply:
    """Return our rotation: the kernel if it can run here, otherwise the eager rotation."""
    cos, sin = t.tables()
    if usable(t.q):
        from longitude.ops.kernels.rope import rotate_qk

        return lambda q, k: rotate_qk(q, k, (cos, sin), (cos, sin), t.pairs)
    return lambda q, k: (apply_rotary(q, cos, sin, t.pairs), apply_rotary(k, cos, sin, t.pairs))


def in_graphs(case: Case) -> Case:
    """Return the case with each available method captured in a CUDA graph."""
    ways = [
        Way(w.name, w.run and partial(_captured, w.run, []), w.kind, w.error, w.goal, w.why)
        for w in case.ways
    ]
    return Case(case.work, ways, case.inputs, case.amount, case.unit)


def _captured(run: Run, kept: list[Run]) -> object:
    """Capture the graph at the first run, replay it at later ones."""
    if not kept:
        kept.append(graphed(run))
    return kept[0]()


def _there_and_back(setup: Setup, s: Sizes, t: Turn, how: str = "") -> Case:
    """Forward and backward against two copies, since backward rotates the gradients back."""
    q, k = (x.detach().requires_grad_() for x in (t.q, t.k))
    dq, dk = (setup.random(*x.shape, seed=9) for x in (q, k))
    gradients = Turn(dq, dk, t.pos)

    def both(apply: Apply) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            rotated = apply(q, k)
            return torch.autograd.grad(rotated, (q, k), (dq, dk))

    judge = partial(gradients.error, back=True)
    ways = [
        Way("two copies of q and k", lambda: [x.detach().clone() for x in (q, k, q, k)], BASELINE),
        Way("longitude", partial(both, ours(t)), OURS, judge, setup.goal({"speed": GOAL})),
    ]
    if setup.peers:
        for name, make in _transformers(setup, t):
            wrap = partial(_with, make, both)
            ways.append(peer(name, "transformers", wrap, judge))
    amount = 4 * (q.nbytes + k.nbytes)
    work = _work(setup, "forward and backward" + how, s, "two copies of q and k")
    return Case(work, ways, (q, k), amount, "B/s")


def _with(make: Callable[[], Apply], both: Callable[[Apply], object]) -> Run:
    apply = make()
    return lambda: both(apply)


def _peers(setup: Setup, t: Turn) -> list[Way]:
    def way(name: str, package: str, make: Callable[[], Apply]) -> Way:
        return peer(name, package, lambda: partial(make(), t.q, t.k), t.error)

    ways = [way(name, "transformers", make) for name, make in _transformers(setup, t)]
    if t.pos.shape[1] > 1:
        ways.append(way("x-transformers", "x_transformers", partial(_x_transformers, t)))
    if setup.cuda:
        ways.append(peer("Liger, in place", "liger_kernel", partial(_liger, t), t.error))
        ways.append(way("flash-attn's kernel", "flash_attn", partial(_flash, t)))
        ways.append(peer("FlashInfer", "flashinfer", partial(_flashinfer, t), t.error))
        ways.append(way("flash-linear-attention", "fla", partial(_linear, t)))
    return ways


def _transformers(setup: Setup, t: Turn) -> list[tuple[str, Callable[[], Apply]]]:
    """transformers' rotation of the same layout, eager and compiled, by name."""
    model = "llama" if t.pairs == "half" else "cohere"

    def make(compiled: bool) -> Apply:
        module = f"transformers.models.{model}.modeling_{model}"
        (apply,) = found(module, "apply_rotary_pos_emb")
        apply = torch.compile(apply, dynamic=False) if compiled else apply
        cos, sin = (x.to(t.q.dtype) for x in _spread(t))
        if t.width == t.q.shape[-1]:
            return lambda q, k: apply(q, k, cos, sin)

        def part(q: Tensor, k: Tensor) -> Pair:  # as transformers' models with partial rotary do
            a, b = apply(q[..., : t.width], k[..., : t.width], cos, sin)
            return torch.cat([a, q[..., t.width :]], -1), torch.cat([b, k[..., t.width :]], -1)

        return part

    ways = [("transformers", partial(make, False))]
    return [*ways, ("transformers, compiled", partial(make, True))] if setup.compiles else ways


def _spread(t: Turn) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (b|1, n, width), one value per dimension as in transformers."""
    half = t.angles()
    angles = torch.cat([half, half], -1) if t.pairs == "half" else half.repeat_interleave(2, -1)
    return angles.cos().float(), angles.sin().float()


def _x_transformers(t: Turn) -> Apply:
    """x-transformers' rotation, which can rotate adjacent pairs only."""
    (apply,) = found("x_transformers.x_transformers", "apply_rotary_pos_emb")
    if t.pairs != "adjacent":
        raise Unfit("it rotates adjacent pairs only")
    freqs = t.angles().float().repeat_interleave(2, -1)
    return lambda q, k: (apply(q, freqs), apply(k, freqs))


def _liger(t: Turn) -> Run:
    (apply,) = found("liger_kernel.transformers.rope", "liger_rotary_pos_emb")
    if t.pairs != "half" or t.width != t.q.shape[-1]:
        raise Unfit("it rotates half pairs of full heads only")
    # strided as in a model, (b, n, h, d) in memory; its kernel rotates in place
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (t.q, t.k))
    cos, sin = (x.to(t.q.dtype).contiguous() for x in _spread(t))
    return lambda: apply(q, k, cos, sin)


def _flash(t: Turn) -> Apply:
    (apply,) = found("flash_attn.layers.rotary", "apply_rotary_emb")
    if t.pos.shape[0] > 1:
        raise Unfit("it takes one table for all sequences")
    cos, sin = (x[0, 0].to(t.q.dtype) for x in t.tables())
    interleaved = t.pairs == "adjacent"

    def one(x: Tensor) -> Tensor:
        return apply(x.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2)

    return lambda q, k: (one(q), one(k))


def _flashinfer(t: Turn) -> Run:
    (apply,) = found("flashinfer", "apply_rope_pos_ids")
    b, _, n, d = t.q.shape
    q, k = (x.transpose(1, 2).reshape(b * n, -1, d).contiguous() for x in (t.q, t.k))
    pos = t.pos.expand(b, n).reshape(-1).int()
    options = {"rotary_dim": t.width, "interleave": t.pairs == "adjacent", "rope_theta": BASE}
    return lambda: [x.view(b, n, -1, d).transpose(1, 2) for x in apply(q, k, pos, **options)]


def _linear(t: Turn) -> Apply:
    (apply,) = found("fla.modules.rotary", "rotary_embedding")
    if t.pos.shape[0] > 1:
        raise Unfit("it takes one table for all sequences")
    cos, sin = (x[0, 0].to(t.q.dtype).contiguous() for x in t.tables())
    interleaved = t.pairs == "adjacent"

    def one(x: Tensor) -> Tensor:
        return apply(x.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2)

    return lambda q, k: (one(q), one(k))
