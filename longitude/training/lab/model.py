"""The lab's decoder: bytes in, bytes out, positions wherever its scheme puts them.

One decoder with two blocks. `llama`: RMSNorm, SwiGLU, no biases (every comparison of the lab uses
it). `gpt`: LayerNorm, GELU, biases, which GPT-2 and BLOOM have too. Both put the norm before each
sublayer and read the output off the embedding's own weights. Position enters through a scheme at
the six sites and nowhere else, and attention is `longitude.attention`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.part import Dims, Pos
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.nn import PositionAttention, PositionEmbedding
from longitude.training.lab.config import VOCABULARY, Shape

EPSILON = 1e-5


class Decoder(nn.Module):
    """Tokens to logits, or straight to the loss where targets are given.

    Weights are drawn from `seed` alone, on the CPU: the same on every machine and device.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        scheme, rng = parse(shape.scheme), torch.Generator().manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, shape.dim)
        self.positions = PositionEmbedding(scheme, shape.dim, rng)
        # positions that are not learned are of size one: tokens meet them at √dim times their own
        # (Vaswani et al. 2017), or they would drown
        fixed = self.positions.scheme.embed is not None and not len(self.positions.weights)
        self.size = shape.dim**0.5 if fixed else 1.0
        self.norm_in = _norm(shape) if shape.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(_Block(shape, scheme, i, rng) for i in range(shape.layers))
        self.norm = _norm(shape)
        _initialise(self, shape, rng)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        pos: Pos | None = None,
        targets: Int[Tensor, "b n"] | None = None,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n vocabulary"] | Float[Tensor, ""]:
        """Logits; with `targets` the sum of their losses, each times its weight.

        `pos` is what a training step drew; without it the scheme's test-time positions.
        """
        pos = self.positions.positions(tokens.shape[1]) if pos is None else pos
        x = self.norm_in(self.positions(self.tokens(tokens) * self.size, pos))
        for block in self.blocks:
            x = block(x, pos)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="none"
        ).view_as(targets)
        return (losses if weights is None else losses * weights).sum()


class _Block(nn.Module):
    """Attention, then a feed-forward, each behind its norm and added to what came in."""

    def __init__(
        self, shape: Shape, scheme: Scheme | Layers, index: int, rng: torch.Generator
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(shape), _norm(shape)
        self.attend = _Attend(shape, scheme, index, rng)
        self.feed = _SwiGLU(shape) if shape.block == "llama" else _Gelu(shape)

    def forward(self, x: Tensor, pos: Pos) -> Tensor:
        x = x + self.attend(self.norm1(x), pos)
        return x + self.feed(self.norm2(x))


class _Attend(nn.Module):
    def __init__(
        self, shape: Shape, scheme: Scheme | Layers, index: int, rng: torch.Generator
    ) -> None:
        super().__init__()
        bias, dims = shape.block == "gpt", Dims(shape.dim, shape.heads, shape.head_dim)
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=bias)
        self.out = nn.Linear(shape.dim, shape.dim, bias=bias)
        self.at = PositionAttention(scheme, dims, layer=index, layers=shape.layers, rng=rng)

    def forward(self, x: Tensor, pos: Pos) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        return self.out(self.at(q, k, v, pos).transpose(1, 2).flatten(2))


class _SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Gelu(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def _norm(shape: Shape) -> nn.Module:
    kind = nn.RMSNorm if shape.block == "llama" else nn.LayerNorm
    return kind(shape.dim, eps=EPSILON)


def _initialise(model: Decoder, shape: Shape, rng: torch.Generator) -> None:
    """GPT-2's start: normal with 0.02, what is added to the residual stream smaller by its
    depth."""
    for name, p in model.named_parameters():
        if ".at." in name or name.startswith("positions."):
            continue  # a part starts its own weights
        if p.dim() == 2:
            last = name.endswith(("out.weight", "down.weight"))
            with torch.no_grad():
                p.normal_(0.0, 0.02 / (2 * shape.layers) ** 0.5 if last else 0.02, generator=rng)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
