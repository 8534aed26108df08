"""A model's fingerprint: rows and summaries are kept under it, and no other model finds them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLE = 4096  # numbers of each tensor that enter the digest


@torch.no_grad()
def digest(model: Any) -> str:
    """16 hexadecimal digits of every tensor's name, shape and a sample of its numbers: whole for
    small ones, evenly spaced for others, so that a large model costs no more than a small one."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)} ".encode())
        flat = tensor.reshape(-1)
        every = flat[:: max(1, len(flat) // SAMPLE)].float().cpu()
        found.update(every.numpy().tobytes())
    return found.hexdigest()[:16]
