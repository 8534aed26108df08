"""Choosing the next token: the likeliest one, or a draw from what a temperature and top-p leave.

Nucleus sampling, Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration": the fewest
tokens whose probabilities sum to p or more are drawn from. Draws are made on the CPU, so that a
seed means the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.fields import Mistake, shown


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 takes the likeliest; without a seed, draws differ
    from run to run."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise Mistake(
                f"a temperature is 0 (the likeliest token) or more, but got "
                f"{shown(self.temperature)}: use 0 to 1.5."
            )
        if not 0 < self.top_p <= 1:
            raise Mistake(f"top_p is a share, but got {shown(self.top_p)}: use 0.9, or 1 for all.")

    def rng(self) -> torch.Generator:
        """What a run of draws is made with."""
        rng = torch.Generator()
        if self.seed is None:
            rng.seed()
        else:
            rng.manual_seed(self.seed)
        return rng

    def choose(self, logits: Float[Tensor, " v"], rng: torch.Generator) -> int:
        """One token."""
        if self.temperature == 0:
            return int(logits.argmax())
        shares = (logits.double().cpu() / self.temperature).softmax(-1)
        shares, tokens = shares.sort(descending=True, stable=True)
        shares = shares * (shares.cumsum(-1) - shares < self.top_p)  # the first always stays
        return int(tokens[torch.multinomial(shares, 1, generator=rng)])
