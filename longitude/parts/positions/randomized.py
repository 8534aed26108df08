"""Randomized positions: n of the first `max` positions, drawn without replacement and sorted.

Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers".
Training sees every position below `max` although its sequences are short; queries and keys share
one draw. Without a generator the ids are evenly spaced over [0, max), Su's test-time form (kexue.fm
9444): ordinary positions 0..n-1 at test time would be a mismatch with training.
"""

import torch

from longitude.part import Mistake, Pos, part, positive


@part("randomized", site="positions", paper="Ruoss et al. 2023, arXiv:2305.16843")
class Randomized:
    max: int

    def check(self) -> None:
        positive(self, "max")

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if n > self.max:
            raise Mistake(
                f"randomized: {n} tokens do not fit into {self.max} positions: raise max to at "
                f"least {n}."
            )
        if rng is None:
            return torch.arange(n) * self.max // max(n, 1)
        return torch.randperm(self.max, generator=rng, device=rng.device)[:n].sort().values
