"""Chance as a pure function: what is drawn depends on the seed, the step and the purpose alone.

So nothing about the order of the data needs saving, a resumed run draws what the killed one would
have drawn, and each of several processes can make its own rows.
"""

from __future__ import annotations

from hashlib import sha256

import torch


def generator(seed: int, step: int = 0, purpose: str = "") -> torch.Generator:
    """A fresh generator on the CPU. Steps of one seed and purpose never share a state: torch's
    own seeding keeps 32 bits, so the step is added to the hash and not hashed with the rest."""
    start = int.from_bytes(sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")
    return torch.Generator().manual_seed((start + step) % 2**32)
