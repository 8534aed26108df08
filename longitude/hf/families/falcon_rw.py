"""Falcon-RW (`alibi=True`): ALiBi whose bias is scaled with the scores, by 1/√d, in bfloat16 steps.

Penedo et al. 2023, arXiv:2306.01116. "alibi()" means the model's own slopes, m_h/√d: 1/√d belongs
to the architecture, and alibi_interpolated(4) stretches the model fourfold as it does any other.
transformers puts the bias into the attention mask and, in its eager attention, adds it a second
time: an eager Falcon-RW therefore has alibi_interpolated(0.5), and alibi() mends it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.hf.families.alibi import Arguments, attentions, settled, sloped, times
from longitude.parts import Alibi, AlibiInterpolated


def claims(model: nn.Module) -> bool:
    """Whether this is transformers' Falcon, and one that turns nothing."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(config, "alibi", False)) and bool(_attentions(model))


def scheme(model: nn.Module) -> Scheme:
    """ALiBi; where transformers adds it twice, with slopes of twice the size."""
    config: Any = model.config
    twice = config._attn_implementation != "sdpa"
    return Scheme.of(AlibiInterpolated(0.5) if twice else Alibi())


def patch(
    model: nn.Module, scheme: Scheme | Layers, *, force: bool = False
) -> AbstractContextManager[Scheme]:
    """The model with a scheme's slopes."""
    own = _own(model)
    return sloped(model, _attentions(model), _times, settled(model, scheme, own), own)


def _times(given: Arguments, ratio: Tensor) -> Arguments:
    """The bias by itself, and as the mask has it: hidden keys stay at the least number."""
    bias, mask = given["alibi"], given["attention_mask"]
    hidden = mask == torch.finfo(mask.dtype).min
    bias = bias if bias.dim() == 4 else bias.unflatten(0, (-1, len(ratio)))
    return {
        "alibi": times(bias, ratio),
        "attention_mask": torch.where(hidden, mask, times(mask, ratio)),
    }


_own = scheme  # `patch` has a scheme of that name


def _attentions(model: nn.Module) -> list[Any]:
    return attentions(model, "falcon", "FalconAttention")
