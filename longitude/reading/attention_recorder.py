"""What each key got of a forward's attention, seen where every attention passes: in its softmax.

A torch function mode sees `softmax` and `scaled_dot_product_attention` go by, whichever model calls
them, and changes nothing. The first has the weights already; from the second's arguments those of
the last query are made once more. So no model needs another attention, or a word of its own, for
its weights to be known. Kernels that call neither (flash, flex) leave nothing to see.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class Watch(TorchFunctionMode):
    """Adds up the weights of the last query of row 0 over `keys` keys, over heads and layers."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys, self.layers = keys, 0
        self.total: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._add(_weights(*args, **kwargs))
        elif func in SOFTMAX and isinstance(out, Tensor) and out.dim() == 4:
            self._add(out[0, :, -1])
        return out

    def shares(self) -> Float[Tensor, " keys"] | None:
        """The mean weight of each key, or None where no attention was seen."""
        return None if self.total is None else self.total / self.layers

    def _add(self, weights: Tensor) -> None:
        if weights.shape[-1] - self.keys not in (0, 1):  # one more: a sink that is no token
            return
        mean = _wide(weights[..., : self.keys]).mean(0)
        self.total = mean if self.total is None else self.total + mean.to(self.total.device)
        self.layers += 1


def _weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last query's weights (h, keys) in row 0."""
    q, k = _wide(query[0, :, -1:]), _wide(key[0])
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = (q @ k.mT)[:, 0] * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        seen = attn_mask.expand(query.shape[0], query.shape[1], -1, -1)[0, :, -1]
        if seen.dtype == torch.bool:
            scores = scores.masked_fill(~seen, -torch.inf)
        else:
            scores = scores + _wide(seen)
    return scores.softmax(-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
