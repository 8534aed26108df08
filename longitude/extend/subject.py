"""What is measured: a loaded model, what it was trained to, and a digest of its weights."""

from __future__ import annotations

from typing import Any

from longitude.eval.rows import Subject
from longitude.extend.candidates import family
from longitude.fields import Mistake, shown
from longitude.hf.digest import digest
from longitude.hf.patch import own_scheme, trained_length
from longitude.text import dump


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
