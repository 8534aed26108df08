"""Tokens per second of `longitude train`, beside a decoder of the same shape written as usual:
nanoGPT's loop, SDPA, and transformers' rotation with its tables in a buffer.

    python -m benchmarks.train [--size tiny] [--length 256] [--batch 16] [--device cuda]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.side_by_side import compare, show
from longitude.core.text import parse
from longitude.training.data import Corpus, gather, join
from longitude.training.distributed import World
from longitude.training.lab.model import DecoderConfig
from longitude.training.lab.run import RunOptions, decoder_config, make_job, make_run
from longitude.training.loop import take_step

BASELINE = "nanoGPT-style, rope"


def main() -> None:
    args = options().parse_args()
    device, corpus = torch.device(args.device), gather()
    if device.type == "cuda":
        torch.set_num_threads(1)  # as `longitude train` does; it helps the baselines as much
    run_options = RunOptions(length=args.length, size=args.size, batch=args.batch, steps=10**6)
    shape = decoder_config(parse("rope()"), args.length, args.size)
    tokens = args.steps * args.batch * args.length
    what = f"{args.size}, {args.batch} × {args.length} tokens a step, {args.steps} steps a round"
    for scheme in map(str.strip, args.schemes.split(";")):
        # each scheme has its own baseline: compiled graphs of several schemes interfere with each
        # other, which a run of `longitude train` never sees
        torch.compiler.reset()
        ways = {
            BASELINE: usual(shape, corpus, args, rotary=True),
            "nanoGPT-style, learned": usual(shape, corpus, args, rotary=False),
            f"longitude {scheme}": ours(run_options, scheme, corpus, device, args.steps),
        }
        rows = compare(ways, BASELINE, args.rounds, {}, device.type == "cuda")
        for row in rows:
            row.name += f" ({tokens / row.ms * 1e3:,.0f} tokens/s)"
        show(f"training on {args.device}: {what}", rows, BASELINE, args.json)


def ours(
    run_options: RunOptions, scheme: str, corpus: Corpus, device: torch.device, steps: int
) -> Callable[[], None]:
    """Return a run of `steps` steps of our training loop."""
    world = World(device)
    run = make_run(run_options, parse(scheme), 0, corpus, world)
    job, count = make_job(run, corpus, world, compiled=None), itertools.count()

    def go() -> None:
        for step in itertools.islice(count, steps):
            take_step(job, step, world)

    return go


def usual(
    shape: DecoderConfig, corpus: Corpus, args: argparse.Namespace, rotary: bool
) -> Callable[[], None]:
    """Return a run of `args.steps` steps of the usual loop."""
    device = torch.device(args.device)
    model = Usual(shape, rotary).to(device)
    run = torch.compile(model) if device.type == "cuda" else model
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = join(corpus.train)
    torch.set_float32_matmul_precision("high")

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - args.length, (args.batch,)).tolist()
        x, y = (
            torch.stack([tokens[s + k : s + k + args.length] for s in starts]).long()
            for k in (0, 1)
        )
        if device.type == "cuda":
            x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        return x, y

    def go() -> None:
        for _ in range(args.steps):
            x, y = batch()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = run(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return go


class Usual(nn.Module):
    """A decoder as one usually writes it: nanoGPT's structure with Llama's block."""

    def __init__(self, shape: DecoderConfig, rotary: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, shape.dim)
        self.places = None if rotary else nn.Embedding(shape.length, shape.dim)
        self.blocks = nn.ModuleList(UsualBlock(shape, rotary) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        if self.places is not None:
            h = h + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), y.view(-1))


class UsualBlock(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderConfig, rotary: bool) -> None:
        super().__init__()
        d, self.heads, self.rotary = shape.dim, shape.heads, rotary
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = (nn.Linear(d, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, d, bias=False)
        size = d // shape.heads
        inv = 1e4 ** (-torch.arange(0, size, 2) / size)
        angle = torch.outer(torch.arange(shape.length), inv).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if self.rotary:
            q, k = (t * self.cos.to(t.dtype) + _rotated(t) * self.sin.to(t.dtype) for t in (q, k))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).reshape(b, n, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--schemes", default="rope(); alibi(); t5()")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
