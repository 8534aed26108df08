"""The suite `paged`: a server's steps over a paged cache of pre-RoPE keys.

The cases are one token of each sequence under every scheme, against the same kernel over keys
rotated beforehand, which is paged attention as other servers have it; and a chunk of a prefill,
against `attention` over contiguous keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.suites.case import Case, Way
from benchmarks.suites.decode import _fastest as fastest_sdpa
from benchmarks.suites.peers import found, peer
from benchmarks.suites.rope import in_graphs
from benchmarks.suites.rows import BASELINE, OURS, PEER, Work
from benchmarks.suites.setup import SAMPLED, Setup, Sizes, machine, one_scheme, relative
from benchmarks.suites.timing import Run
from longitude.core.scheme import Scheme
from longitude.ops.attention import attention
from longitude.ops.paged import gather, paged_attention, plan_paged

BLOCK = 16  # tokens per block, vLLM's default
GOAL, PREFILL_GOAL = 1 / 1.15, 0.95  # minimum speeds, relative to the baseline
SCHEMES = {
    "RoPE": "rope()",
    "YaRN": "rope(frequencies=yarn(4, original={w}))",
    "ReRoPE": "rope(remap=rerope({w}))",
    "leaky ReRoPE": "rope(remap=leaky_rerope({w}, 8))",
    "Self-Extend": "rope(remap=self_extend(8, {w}))",
    "dual chunk": "rope(remap=dual_chunk({w}, {eighth}))",
    "streaming": "rope(remap=streaming(4, {w}))",
}


class Step(NamedTuple):
    """New tokens of equally long sequences, whose blocks are scattered over the cache."""

    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    starts: list[int]
    lens: list[int]

    @classmethod
    def drawn(cls, setup: Setup, s: Sizes, new: int) -> Step:
        blocks = s.tokens // BLOCK
        keys, values = (setup.random(s.batch * blocks, BLOCK, s.kv, s.dim, seed=n) for n in (1, 2))
        order = torch.randperm(s.batch * blocks, generator=torch.Generator().manual_seed(3))
        table = order.view(s.batch, blocks).to(setup.device, torch.int32)
        q = setup.random(s.batch * new, s.heads, s.dim)
        starts = [new * r for r in range(s.batch + 1)]
        return cls(q, keys, values, table, starts, [s.tokens] * s.batch)

    def contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gather queries, keys and values (b h n d) from the cache."""
        q = self.q.unflatten(0, (len(self.lens), -1)).transpose(1, 2)
        positions = range(self.lens[0])
        k, v = (
            torch.cat([gather(x, row, positions) for row in self.table]).contiguous()
            for x in (self.keys, self.values)
        )
        return q, k, v

    def run(self, scheme: Scheme) -> Run:
        """Return a run of the step; its plan is made once, as layers share it."""
        plan = plan_paged(scheme, *self)
        return lambda: paged_attention(scheme, *self, plan=plan)


def cases(setup: Setup) -> Iterator[Case]:
    """Yield one token at each length, of one sequence and of several, then a chunk of a prefill."""
    sizes = (32, 8, 128) if setup.cuda else (8, 2, 64)
    lengths = setup.lengths((32768, 131072), (4096,))
    for n in lengths:
        for batch in (1, 8) if setup.cuda else (1,):
            case = _decoding(setup, Sizes(batch, *sizes[:2], n, sizes[2]))
            yield in_graphs(case) if setup.cuda else case
    yield from _prefills(setup, Sizes(1, *sizes[:2], min(lengths), sizes[2]))


def _schemes(n: int) -> dict[str, Scheme]:
    w = min(4096, n // 4)
    return {name: one_scheme(text.format(w=w, eighth=w // 8)) for name, text in SCHEMES.items()}


def _decoding(setup: Setup, s: Sizes) -> Case:
    step = Step.drawn(setup, s, new=1)
    contiguous = step.contiguous()
    kernel, attend = fastest_sdpa(setup, contiguous)
    rotated, goal = one_scheme("causal()"), setup.goal({"speed": GOAL})
    base, floor = "paged attention over rotated keys", f"SDPA, contiguous rotated keys ({kernel})"
    judge = partial(_error, step)
    ways = [
        Way(base, step.run(rotated), BASELINE, partial(judge, rotated)),
        Way(floor, lambda: attend(*contiguous).transpose(1, 2).flatten(0, 1), PEER),
        *(
            Way(f"longitude, {name}", step.run(scheme), OURS, partial(judge, scheme), goal)
            for name, scheme in _schemes(s.tokens).items()
        ),
    ]
    if setup.peers and setup.cuda:
        for name, tensor_cores in (("", False), (", tensor cores", True)):
            make = partial(_infer, step, tensor_cores)
            ways.append(peer(f"FlashInfer over rotated keys{name}", "flashinfer", make))
    what = "one token of each sequence" + ", in CUDA graphs" * setup.cuda
    return _case(setup, s, what, base, ways, step)


def _prefills(setup: Setup, s: Sizes) -> Iterator[Case]:
    """Yield the prefill of a prompt's last quarter, the rest of it in the cache."""
    step = Step.drawn(setup, s, new=s.tokens // 4)
    q, k, v = step.contiguous()
    q_pos, k_pos = range(s.tokens - q.shape[2], s.tokens), range(s.tokens)
    for name, scheme in _schemes(s.tokens).items():
        base, goal = "attention over contiguous keys", setup.goal({"speed": PREFILL_GOAL})
        contiguous = partial(attention, scheme, q, k, v, q_pos, k_pos)
        judge = partial(_error, step, scheme)
        ways = [
            Way(base, contiguous, BASELINE, lambda out, judge=judge: judge(out[0].transpose(0, 1))),
            Way("longitude", step.run(scheme), OURS, judge, goal),
        ]
        yield _case(setup, s, f"the last quarter of a prompt, {name}", base, ways, step)


def _case(setup: Setup, s: Sizes, what: str, base: str, ways: list[Way], step: Step) -> Case:
    sizes = f"{s}, {setup.written}"
    work = Work("paged", what, sizes, s.tokens, base, machine(setup.device))
    return Case(work, ways, step[:4], step.keys.nbytes + step.values.nbytes, "B/s")


def _error(step: Step, scheme: Scheme, out: Any) -> float:
    """Return the first sequence's error at its last tokens, against float64; out: (tokens h d)."""
    stop, n = step.starts[1], step.lens[0]
    rows = range(max(0, stop - SAMPLED), stop)
    q = step.q[rows.start : stop].transpose(0, 1)[None]
    k, v = (gather(x, step.table[0], range(n)) for x in (step.keys, step.values))
    q_pos = range(n - len(rows), n)
    want = attention(
        scheme, q.double(), k.double(), v.double(), q_pos, range(n), backend="eager"
    )  # fmt: skip
    return relative(out[rows.start : stop].transpose(0, 1)[None], want)


def _infer(step: Step, tensor_cores: bool) -> Run:
    (wrapper,) = found("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
    workspace = torch.empty(2**27, dtype=torch.uint8, device=step.q.device)
    (batch, blocks), (_, size, kv, d) = step.table.shape, step.keys.shape
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=step.q.device) * blocks
    last = torch.full((batch,), size, dtype=torch.int32, device=step.q.device)
    decoder = wrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    decoder.plan(
        offsets, step.table.flatten(), last, step.q.shape[1], kv, d, size, q_data_type=step.q.dtype
    )
    return lambda: decoder.run(step.q, (step.keys, step.values))
