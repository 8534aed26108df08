"""What is measured: a loaded model, what it was trained to, and a digest of its weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from longitude.eval.rows import Subject
from longitude.extend.candidates import family
from longitude.fields import Mistake, shown
from longitude.hf.patch import own_scheme, trained_length
from longitude.text import dump

SAMPLE = 4096  # numbers of each tensor that enter the digest


def subject(model: Any, name: str, revision: str | None = None) -> Subject:
    """The facts of a model that stand in the key of every row."""
    own = own_scheme(model)
    trained = trained_length(model)
    if trained is None:
        raise Mistake(
            f"{name} does not say how long it was trained to: set max_position_embeddings in its "
            f"config.json."
        )
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise Mistake(
            f"{shown(name)} is no causal language model ({type(model).__name__}): extend measures "
            f"how well the next token is told."
        )
    parameter = next(model.parameters())
    return Subject(
        name=name,
        weights=digest(model),
        scheme=dump(own),
        family=family(own),
        trained=trained,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        revision=revision,
    )


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
