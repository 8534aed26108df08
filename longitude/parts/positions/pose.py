"""PoSE: positional skip-wise training. Short sequences whose chunks are moved apart.

Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise
Training". The n tokens are cut into `chunks` consecutive pieces; each piece after the first is
moved on by a random skip. Skips never shrink, ids inside a piece stay consecutive, and the last
position stays below `target`: a training window of n tokens then covers every relative distance of
the target window. Plain ids at test time.
"""

import torch

from longitude.part import Mistake, Pos, part, positive


@part("pose", site="positions", paper="Zhu et al. 2023, arXiv:2309.10400")
class Pose:
    target: int
    chunks: int = 2

    def check(self) -> None:
        positive(self, "target", "chunks")

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        if n > self.target or n < self.chunks:
            raise Mistake(
                f"pose: {n} tokens do not fit {self.chunks} chunks below position {self.target}: "
                f"train on {self.chunks} to {self.target} tokens."
            )
        device, pieces = rng.device, self.chunks - 1
        cuts = torch.randperm(n - 1, generator=rng, device=device)[:pieces].sort().values + 1
        skips = (
            torch.randint(self.target - n + 1, (pieces,), generator=rng, device=device)
            .sort()
            .values
        )
        tokens = torch.arange(n, device=device)
        piece = torch.searchsorted(cuts, tokens, right=True)
        return tokens + torch.cat([skips.new_zeros(1), skips])[piece]
