"""Scales: a factor on each query, so that attention stays as sharp over more keys.

logn scales by the logarithm of the number of visible keys (Su 2021), scalable softmax by a learned
multiple of it (Nakanishi 2025), Llama 4 and DroPE by the logarithm of the position, `temperature`
by a constant. Site ④: `scale(q_pos, seen, weights)`, where `seen` counts the keys each query may
see.
"""

import math
from collections.abc import Iterable
from typing import ClassVar

import torch

from longitude.core.lengths import Lengths, Setting, combinations
from longitude.core.part import Choice, Dims, Factors, Rows, Scale, Weights, part
from longitude.core.validate import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UserError,
)
from longitude.parts.rope import Rope


@part(
    "logn",
    site="scale",
    paper="Su 2021, kexue.fm/archives/8823; Chiang & Cholak 2022, arXiv:2202.12172",
)
class LogN(Scale):
    """logn: queries scaled by log_L n, n the number of keys they may see, L the trained length.

    Su 2021, "Entropy invariance of attention" (kexue.fm 8823); Chiang & Cholak 2022. `clip` keeps
    the factor at 1 or above, max(1, log_L n): the form for models trained without it, which an
    unclipped factor would cool below the trained length (n = 64, L = 512: 0.667). Causal: n = i +
    1; bidirectional: the unpadded keys.
    """

    train: int
    clip: bool = True

    def check(self) -> None:
        if self.train < 2:
            raise UserError(
                f"logn: the trained length must be at least 2, but got {self.train}: the "
                f"formula divides by its logarithm."
            )

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        factor = seen.clamp(min=1).to(torch.float64).log() / math.log(self.train)
        return (factor.clamp(min=1) if self.clip else factor)[:, None]

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(Rope(), cls(length, clip=False))]


@part("ssmax", site="scale", paper="Nakanishi 2025, arXiv:2501.19399")
class SsMax(Scale):
    """Scalable softmax: logits × s_h ln n, n the number of keys a query may see, s_h learned for
    each head.

    Nakanishi 2025, "Scalable-Softmax Is Superior for Attention". The paper's fits lie near s =
    0.43, where s starts.
    """

    start: float = 0.43

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"s": torch.full((dims.heads,), float(self.start))}

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        return weights["s"][None, :, None] * seen.clamp(min=1).to(torch.float64).log()[:, None]

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(Rope(), cls())]


@part("log_position", site="scale", paper="Puvvada et al. 2025, arXiv:2504.08719")
class LogPosition(Scale):
    """SWAN's scale: queries × ln(a + p + 1) / ln(a + L), by their own position p.

    Puvvada et al. 2025, "SWAN-GPT: An Efficient and Scalable Approach for Long-Context Language
    Modeling", on its layers without positions: a logarithm of the position, fitted on longer
    windows. The paper's constants are not public: a is 0 here by default, and the factor is 1 at
    the last token of the trained length L. It differs from logn by counting positions, not visible
    keys.
    """

    train: int
    offset: float = 0

    def check(self) -> None:
        if self.offset < 0 or self.train + self.offset < 2:
            raise UserError(
                f"log_position: the trained length and the offset must give at least 2, but got "
                f"{self.train} and {self.offset}: the formula divides by their sum's logarithm."
            )

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        count = (q_pos.to(torch.float64) + 1 + self.offset).clamp(min=1)
        return (count.log() / math.log(self.train + self.offset))[:, None]

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]


@part("temperature", site="scale", paper="Hinton et al. 2015, arXiv:1503.02531")
class Temperature(Scale):
    """A constant temperature: logits divided by t.

    Hinton et al. 2015. YaRN's own temperature is part of `yarn`; this one is for trying others.
    """

    t: PositiveFloat

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        return torch.full((1, 1, 1), 1 / self.t, dtype=torch.float64, device=q_pos.device)


@part("llama4_temperature", site="scale", paper="Meta 2025, Llama 4; transformers modeling_llama4")
class Llama4Temperature(Scale):
    """Llama 4's temperature: 1 + scale · ln(1 + ⌊(pos + offset) / floor⌋).

    Meta 2025, Llama 4, on its layers without positions. Ministral 3 uses the same with offset 0.
    """

    floor: PositiveInt = 8192
    scale_by: float = 0.1
    offset: NonNegativeInt = 1

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        steps = torch.floor((q_pos.to(torch.float64) + self.offset) / self.floor)
        capturing = q_pos.is_cuda and torch.cuda.is_current_stream_capturing()
        if not (q_pos.is_meta or capturing) and bool((steps < 0).any()):
            raise UserError(
                f"llama4_temperature: the logarithm of negative positions is undefined, but got "
                f"{float(q_pos.min()):g}: give positions from {-self.offset} on."
            )
        return (1 + self.scale_by * torch.log1p(steps))[:, None]


@part("drope", site="scale", paper="Gelberg et al. 2025, arXiv:2512.12167")
class Drope(Scale):
    """DroPE: no rotation, and past the trained length L logits × β = 1 + c ln(n / L); 1 inside it.

    Gelberg et al. 2025, "Extending the Context of Pretrained LLMs by Dropping Their Positional
    Embeddings". A RoPE model loses its rotation and is trained a little more at its own length
    (`longitude tune --recipe drope`). The paper takes one β for a call of n tokens: give that
    number as `length`. Without it n counts the keys that each query may see, so that decoding
    equals prefill and nothing changes inside the window. The paper fits c by perplexity at the
    target length: 0.103 for SmolLM-360M, 0.412 for a model of 494M trained from scratch.
    """

    train: PositiveInt
    c: NonNegativeFloat = 0.103
    length: int | None = None
    drops_rotation: ClassVar[bool] = True  # applied to a model with RoPE, it removes the rotation

    def check(self) -> None:
        if self.length is not None and self.length < 1:
            raise UserError(f"drope: length must be at least 1, but got {self.length}: give more.")

    def beta(self, length: int) -> float:
        """The factor for a query that sees `length` keys."""
        return 1 + self.c * math.log(max(1.0, (self.length or length) / self.train))

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        n = torch.full_like(seen, self.length) if self.length else seen
        return (1 + self.c * (n.to(torch.float64) / self.train).clamp(min=1).log())[:, None]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(c=[0.0, 0.05, 0.103, 0.2, 0.412])
