"""What a scheme asks of a model that has no rotation: its one part, or the sentence why not."""

from __future__ import annotations

from typing import Any

from torch import nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown


def only_part(model: nn.Module, scheme: Scheme | Layers, own: Scheme, site: str, takes: str) -> Any:
    """The scheme's part at the one site where this model has positions. A direction that the text
    leaves out is the model's own."""
    one = scheme.layer(0)
    alike = all(scheme.layer(i) == one for i in range(len(scheme)))
    parts = [p for p in one.parts if p not in own.mask]
    if not alike or len(parts) != 1 or parts[0].site != site:
        raise UserError(
            f"{name(model)} has {own}, in whose place {shown(scheme)} can't be put: give it "
            f"{takes}, and nothing else."
        )
    return parts[0]


def name(model: nn.Module) -> str:
    """The model as its user knows it."""
    return type(model).__name__
