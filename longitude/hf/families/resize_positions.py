"""Learned positions written out: the rows that a part would read past a table's end, as a longer
table of the model's own. Any program that loads the model then has them, and needs no code of
ours."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families import learned
from longitude.hf.families.validate import name


def longer(model: Any, scheme: Scheme | Layers, length: int) -> Any:
    """A copy of a model whose table holds `length` positions, as the scheme reads them."""
    if not learned.claims(model):
        raise UserError(f"{name(model)} has no table of positions that could be longer.")
    with learned.patch(model, scheme) as full:
        part: Any = full.embed
    if part.reach is not None and part.reach < length:
        raise UserError(
            f"{part} reaches {part.reach:,} positions, but {length:,} are asked for: ask for fewer."
        )
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - part.length  # some count rows for padding as well
    weights = dict(model.state_dict())
    for path, module in model.named_modules():
        if any(module is seat.table for seat in learned.tables(model)):
            weights[f"{path}.weight"] = _rows(module, part, length)
    made = type(model)(config).to(model.dtype).eval()
    made.load_state_dict(weights)
    made.generation_config = getattr(model, "generation_config", None)
    return made


@torch.no_grad()
def _rows(table: nn.Embedding, part: Any, length: int) -> Tensor:
    """The rows for padding, and one for each position."""
    held = table.weight
    wide = held.to(torch.promote_types(held.dtype, torch.float32))
    rows = part.rows(wide, torch.arange(length, device=held.device))
    return torch.cat([held[: part.offset], rows.to(held.dtype)])
