"""BLOOM: ALiBi as in the paper, handed to each attention as `alibi`, (batch · heads, 1, keys).

BigScience 2022, arXiv:2211.05100. Keys stand where the attention mask counts them, so left padding
moves nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.hf.families.alibi import Arguments, attentions, settled, sloped, times
from longitude.parts import Alibi

OWN = Scheme.of(Alibi())


def claims(model: nn.Module) -> bool:
    """Whether this is transformers' BLOOM."""
    return bool(_attentions(model))


def scheme(model: nn.Module) -> Scheme:
    """ALiBi, always."""
    return OWN


def patch(
    model: nn.Module, scheme: Scheme | Layers, *, force: bool = False
) -> AbstractContextManager[Scheme]:
    """The model with a scheme's slopes."""
    return sloped(model, _attentions(model), _times, settled(model, scheme, OWN), OWN)


def _times(given: Arguments, ratio: Tensor) -> Arguments:
    bias = given["alibi"].unflatten(0, (-1, len(ratio)))
    return {"alibi": times(bias, ratio).flatten(0, 1)}


def _attentions(model: nn.Module) -> list[Any]:
    return attentions(model, "bloom", "BloomAttention")
