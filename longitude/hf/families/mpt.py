"""MPT: ALiBi as in the paper, handed to each attention as `position_bias`, (heads, 1, max_seq_len).

MosaicML 2023. transformers makes it for `max_seq_len` keys and fails on one more; here it is made
for the keys there are, by the same function, so it never ends. Keys count from the last one
backwards, so left padding moves nothing. transformers leaves `alibi_bias_max` unread and always
takes 8: a checkpoint that was trained with 16 (StoryWriter) needs alibi(steepness=16).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.hf.families.alibi import Arguments, attentions, settled, sloped, times
from longitude.parts import Alibi

OWN = Scheme.of(Alibi())
BUILD = "build_mpt_alibi_tensor"


def claims(model: nn.Module) -> bool:
    """Whether this is transformers' MPT."""
    return bool(_attentions(model)) and any(hasattr(m, BUILD) for m in model.modules())


def scheme(model: nn.Module) -> Scheme:
    """ALiBi, always."""
    return OWN


def patch(
    model: nn.Module, scheme: Scheme | Layers, *, force: bool = False
) -> AbstractContextManager[Scheme]:
    """The model with a scheme's slopes, and with no last position."""
    build: Callable[..., Tensor] = next(
        getattr(module, BUILD) for module in model.modules() if hasattr(module, BUILD)
    )

    def long_enough(given: Arguments, ratio: Tensor) -> Arguments:
        mask = given["attention_mask"]
        bias = build(len(ratio), mask.shape[-1], device=mask.device)
        return {"position_bias": times(bias, ratio)}

    return sloped(model, _attentions(model), long_enough, settled(model, scheme, OWN), OWN)


def _attentions(model: nn.Module) -> list[Any]:
    return attentions(model, "mpt", "MptAttention")
