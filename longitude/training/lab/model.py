"""The lab's decoder: its config, then its modules. Bytes in, bytes out.

One decoder with two blocks. `llama`: RMSNorm, SwiGLU, no biases (every comparison of the lab uses
it). `gpt`: LayerNorm, GELU, biases, as GPT-2 and BLOOM have. Both are pre-norm and tie the output
to the embedding. Position enters through a scheme at the six sites and nowhere else, and attention
is `longitude.attention`.

Each part declares how it is trained (`core/part.py`): `training` lists what `--schemes all` trains
with it, `at_test` returns what replaces it once the model is trained. Position policies draw ids
during training only. Remaps made for inference change distances that a model has learned already:
they have no `training`, and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from longitude.core.part import PARTS, Dims, Pos, Site, as_tensor, optional
from longitude.core.scheme import Layers, Scheme, scheme_of
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.nn import PositionAttention, PositionEmbedding

BLOCKS = ("llama", "gpt")
VOCABULARY = 256  # a token is a byte; byte 0 ends a document and pads
EPSILON = 1e-5
Either = Scheme | Layers


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's configuration. `embed_norm` is BLOOM's norm after the embedding."""

    scheme: str
    length: int
    layers: int
    dim: int
    heads: int
    hidden: int
    block: str = "llama"
    embed_norm: bool = False

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise UserError(f"no block is called {self.block!r}: use {' or '.join(BLOCKS)}.")
        for name in ("length", "layers", "dim", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, but got {getattr(self, name)}.")
        if self.dim % (2 * self.heads):
            raise UserError(
                f"{self.dim} dimensions do not give {self.heads} heads an even size each: "
                f"make dim a multiple of {2 * self.heads}."
            )


@dataclass(frozen=True)
class Size:
    """Layers, width and heads, with suitable training settings; `batch` counts sequences."""

    layers: int
    dim: int
    heads: int
    rate: float
    steps: int
    batch: int

    def hidden(self, block: str) -> int:
        """The width of the feed-forward, for which both blocks have the same number of weights."""
        return -(-8 * self.dim // 3 // 64) * 64 if block == "llama" else 4 * self.dim


SIZES = {  # weights: 0.36M, for two CPU cores; 2.3M; 14M; 128M
    "nano": Size(layers=3, dim=96, heads=3, rate=3e-3, steps=250, batch=16),
    "tiny": Size(layers=5, dim=192, heads=6, rate=2e-3, steps=2000, batch=32),
    "small": Size(layers=8, dim=384, heads=6, rate=1e-3, steps=5000, batch=64),
    "125m": Size(layers=18, dim=768, heads=12, rate=6e-4, steps=20000, batch=256),
}


class Decoder(nn.Module):
    """A decoder from tokens to logits, or to the loss if targets are given. Weights are drawn from
    `seed` alone, on the CPU: the same on every machine and device."""

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        scheme, rng = parse(config.scheme), torch.Generator().manual_seed(seed)
        self.tokens = nn.Embedding(VOCABULARY, config.dim)
        self.positions = PositionEmbedding(scheme, config.dim, rng)
        # position vectors that are not learned have entries of size one: tokens are multiplied by
        # √dim (Vaswani et al. 2017), or positions would drown them out
        fixed = self.positions.scheme.embed is not None and not len(self.positions.weights)
        self.size = config.dim**0.5 if fixed else 1.0
        self.norm_in = _norm(config) if config.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(_Block(config, scheme, i, rng) for i in range(config.layers))
        self.norm = _norm(config)
        # GPT-2's initialisation: normal with 0.02, smaller by depth for residual projections
        for name, p in self.named_parameters():
            if ".at." in name or name.startswith("positions."):
                continue  # a part initialises its own weights
            if p.dim() == 2 and not p.is_meta:
                added = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * config.layers) ** 0.5 if added else 0.02
                nn.init.normal_(p, 0.0, std, rng)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        pos: Pos | None = None,
        targets: Int[Tensor, "b n"] | None = None,
        weights: Float[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n vocabulary"] | Float[Tensor, ""]:
        """Return the logits, or with `targets` the weighted sum of their losses. `pos` are the
        positions of a training step; by default, the scheme's test-time positions."""
        pos = self.positions.positions(tokens.shape[1]) if pos is None else pos
        x = self.norm_in(self.positions(self.tokens(tokens) * self.size, pos))
        for block in self.blocks:
            x = block(x, pos)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        logits = logits.float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
        return (losses if weights is None else losses * weights).sum()


class _Block(nn.Module):
    """Attention, then a feed-forward, each with a pre-norm and a residual connection."""

    def __init__(
        self, config: DecoderConfig, scheme: Either, index: int, rng: torch.Generator
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.attend = _Attend(config, scheme, index, rng)
        self.feed = _FeedForward(config)

    def forward(self, x: Tensor, pos: Pos) -> Tensor:
        x = x + self.attend(self.norm1(x), pos)
        return x + self.feed(self.norm2(x))


class _Attend(nn.Module):
    def __init__(
        self, config: DecoderConfig, scheme: Either, index: int, rng: torch.Generator
    ) -> None:
        super().__init__()
        bias = config.block == "gpt"
        dims = Dims(config.dim, config.heads, config.dim // config.heads)
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=bias)
        self.out = nn.Linear(config.dim, config.dim, bias=bias)
        self.at = PositionAttention(scheme, dims, layer=index, layers=config.layers, rng=rng)

    def forward(self, x: Tensor, pos: Pos) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        return self.out(self.at(q, k, v, pos, x=x).transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    """SwiGLU in the llama block, GELU in the gpt block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        gpt = config.block == "gpt"
        self.gate = None if gpt else nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=gpt)
        self.down = nn.Linear(config.hidden, config.dim, bias=gpt)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _norm(config: DecoderConfig) -> nn.Module:
    kind = nn.RMSNorm if config.block == "llama" else nn.LayerNorm
    return kind(config.dim, eps=EPSILON)


# which schemes can be trained


def at_test(scheme: Either) -> Either:
    """Return a scheme's form at test time, without what is for training alone."""
    if isinstance(scheme, Layers):
        return replace(scheme, schemes=tuple(map(at_test, scheme.schemes)))
    if scheme.rotary is None or not hasattr(scheme.rotary.remap, "at_test"):
        return scheme
    remap = optional(scheme.rotary.remap, "at_test")
    return replace(scheme, rotary=replace(scheme.rotary, remap=remap))


def check_trainable(scheme: Either, length: int, layers: int) -> None:
    """Raise unless a decoder of this length and depth can be trained with the scheme."""
    for spec in dict.fromkeys(scheme.layer(n, layers) for n in range(layers)):
        if spec.rotary and spec.rotary.remap and not hasattr(spec.rotary.remap, "training"):
            raise UserError(
                f"{shown(spec.rotary.remap)} is made for reading with a trained model, so it can't "
                f"be trained: train {shown(replace(spec.rotary, remap=None))} and read with the "
                f"remap."
            )
        if not spec.causal:
            raise UserError(
                f"{spec} lets tokens see those ahead, which a decoder must predict: "
                f"leave bidirectional() out."
            )
        if any(getattr(b, "bidirectional", False) for b in spec.bias):
            raise UserError(f"{spec} is made for encoders: give its bias one direction.")
        # a table that is too short, or positions that a part can't take, fail here and not in the
        # first step
        pos = as_tensor(spec.positions.ids(length, rng=torch.Generator().manual_seed(0)))
        if spec.embed:
            dims = Dims(8, 2, 4)
            spec.embed.embed(torch.zeros(1, length, dims.dim), pos, spec.embed.init(dims, None))
        for bias in spec.bias:
            if pos.is_floating_point() and getattr(bias, "integer_positions", False):
                raise UserError(
                    f"{spec.positions} draws positions that are not whole, which {bias} has no "
                    f"entry for: use it with rope(), sinusoidal() or alibi()."
                )


def trainable_schemes(length: int, layers: int) -> tuple[str, ...]:
    """Return the schemes of every encoding that can be trained on `length` tokens, and HWFA."""
    order = get_args(Site)
    classes = sorted(PARTS.values(), key=lambda cls: order.index(cls.site))  # type: ignore[attr-defined]
    schemes = [scheme_of(choice) for cls in classes for choice in optional(cls, "training", length)]
    window = hwfa_window(length, layers)
    return (*map(dump, schemes), dump(parse(f"hwfa({length}, layers={layers}, window={window})")))


def hwfa_window(length: int, layers: int) -> int:
    """The window of HWFA's local layers: (w - 1)(layers - 1) + 1 = 3/4 of the length (Su 2023)."""
    return max(2, round((0.75 * length - 1) / max(1, layers - 1)) + 1)


def parse_schemes(text: str, length: int, layers: int) -> tuple[Either, ...]:
    """Parse a `;`-separated list of schemes, or `all`; raises unless each can be trained."""
    names = trainable_schemes(length, layers) if text.strip() == "all" else text.split(";")
    schemes = tuple(dict.fromkeys(parse(name) for name in names if name.strip()))
    if not schemes:
        raise UserError('--schemes names none: give some, as in "rope(); alibi()", or all.')
    for scheme in schemes:
        check_trainable(scheme, length, layers)
    return schemes
