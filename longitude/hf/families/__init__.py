"""Models without rotation: one small file for each family, which changes its table or its bias.

A family is a module with the three functions of `Family`. Ask `family_of` before looking for
rotary embeddings: a Falcon with ALiBi holds one that it never uses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import nn

from longitude.core.scheme import Layers, Scheme
from longitude.hf.families import bloom, falcon_rw, learned, mpt


@runtime_checkable
class Family(Protocol):
    """What a family's module offers."""

    def claims(self, model: nn.Module) -> bool:
        """Whether the model is one of this family's."""
        ...

    def scheme(self, model: nn.Module) -> Scheme:
        """The scheme that the model has by itself."""
        ...

    def patch(
        self, model: nn.Module, scheme: Scheme | Layers, *, force: bool = False
    ) -> AbstractContextManager[Scheme]:
        """The model under another scheme, whose full form it gives, and on exit exactly as it was.
        What can't be is refused before anything is touched."""
        ...


FAMILIES: tuple[Family, ...] = (bloom, mpt, falcon_rw, learned)


def family_of(model: nn.Module) -> Family | None:
    """The family of a model whose positions are not rotations; None where none is known."""
    return next((family for family in FAMILIES if family.claims(model)), None)
