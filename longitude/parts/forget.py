"""Forget gates (FoX): c_i - c_j added to each score, c the running sum of log-gates.

Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate". A gate for each
token and head, f_t = σ(w_h · x_t + b_h), x_t the attention layer's input, and c_t = Σ_{u ≤ t} log
f_u: what lies between a key and a query decides how much of the key is forgotten. The bias is not
scaled by 1/√d. `gate="bias"` learns one gate per head, a learned ALiBi; `gate="fixed"` keeps f =
exp(-1 / τ_h), τ geometric from `shortest` to `longest` tokens, which is ALiBi with slopes 1 / τ_h
(the defaults are those of eight heads). "bias" starts from the same gates. Site ⑤.

The sums reach `attention` as `forget_sums`: `nn.PositionAttention` computes them from the layer's
input, and a `Cache` keeps one number per key and head, in float32 or wider. Plain kernels take them
as extra head dimensions (`ops.extra_dims`), and add them as exactly as they compute q·k, however
large they grow; with padding, packed texts or few queries they become an additive mask.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from longitude.core.part import Bias, Choice, Dims, Index, K, Q, Rows, Term, Vectors, Weights, part
from longitude.core.validate import PositiveFloat, UserError
from longitude.parts.biases import linear_term


@part("forget", site="bias", paper="Lin et al. 2025, arXiv:2503.02130")
class Forget(Bias):
    gate: Literal["full", "bias", "fixed"] = "full"
    shortest: PositiveFloat = 2
    longest: PositiveFloat = 256

    def check(self) -> None:
        if self.shortest > self.longest:
            raise UserError(
                f"forget: shortest must not be above longest, but got {self.shortest:g} and "
                f"{self.longest:g}: exchange them."
            )

    @property
    def gated(self) -> bool:
        """Whether the term depends on the text, through the sums of the gates."""
        return self.gate == "full"

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        if self.gate == "full":  # initialised like torch.nn.Linear
            shapes = {"weight": (dims.heads, dims.dim), "bias": (dims.heads,)}
            bound = dims.dim**-0.5
            return {k: (2 * torch.rand(s, generator=rng) - 1) * bound for k, s in shapes.items()}
        if self.gate == "bias":  # σ(b) = exp(-1 / τ)
            return {"bias": -torch.expm1(1 / self._tokens(dims.heads)).log().float()}
        return {}

    def _tokens(self, heads: int) -> Tensor:
        """The time constant τ of each head in tokens, in float64."""
        share = torch.linspace(0, 1, heads, dtype=torch.float64)
        return self.shortest * (self.longest / self.shortest) ** share

    def log_gates(self, x: Vectors, weights: Weights) -> Tensor:
        """log f of each head and token (b h n), given the layer's input."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = linear(x.to(wide), weights["weight"].to(wide), weights["bias"].to(wide))
        return logsigmoid(logits).transpose(-1, -2)

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        if "sums" in weights:
            of_q, of_k = weights["sums_of_queries"], weights["sums"]

            def term(b: Index, h: Index, i: Index, j: Index) -> Tensor:
                return of_q[b, h, i] - of_k[b, h, j]

            return term
        # "full" without sums, as in charts (`attention` refuses it): the gate of a zero input
        learned = weights.get("bias")
        fixed = 1 / self._tokens(q.shape[1])
        return linear_term(fixed if learned is None else -logsigmoid(learned), q, q_pos, k_pos)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(), cls("bias", longest=max(length / 2, 4))]
