"""Models that don't rotate by a token position: ALiBi (alibi.py), learned tables (learned.py), rows
and columns of images (axial.py).

A `Family` defines how to recognise such a model, which scheme it has and how to patch it. Call
`family_of` before looking for rotary embeddings: a Falcon with ALiBi has one that it never uses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown

Patch = Callable[[nn.Module, Scheme | Layers, bool], AbstractContextManager[Scheme]]


@dataclass(frozen=True, eq=False)
class Family:
    """How models of one family are recognised and patched.

    `patch(model, scheme, force)` refuses a scheme the family can't run before it changes anything,
    yields the scheme in full, and restores the model exactly on exit.
    """

    name: str
    claims: Callable[[nn.Module], bool]
    scheme: Callable[[nn.Module], Scheme]
    patch: Patch


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model; None for text models with rotary embeddings and others."""
    from longitude.hf.families.alibi import BLOOM, FALCON_RW, MPT
    from longitude.hf.families.axial import AXIAL
    from longitude.hf.families.learned import LEARNED

    return next((f for f in (BLOOM, MPT, FALCON_RW, LEARNED, AXIAL) if f.claims(model)), None)


def only_part(model: nn.Module, scheme: Scheme | Layers, own: Scheme, site: str, takes: str) -> Any:
    """Return the scheme's part at the one site where this model encodes positions.

    A direction of attention that the scheme leaves out is the model's own.
    """
    parts = [p for p in scheme.layer(0).parts if p not in own.mask]
    if len(set(scheme.schemes)) > 1 or len(parts) != 1 or parts[0].site != site:
        raise UserError(
            f"{type(model).__name__} has {own}, which {shown(scheme)} can't replace: give it only "
            f"{takes}."
        )
    return parts[0]
