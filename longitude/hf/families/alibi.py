"""ALiBi models: BLOOM, MPT and Falcon-RW. Their slopes can be changed.

Press et al. 2021, arXiv:2108.12409. transformers adds m_h · j instead of -m_h · (i - j), which
softmax can't distinguish. Every replacement only has other slopes m'_h, so its bias is the model's
times m'_h / m_h; padding, caches and rounding stay the model's. Each attention module receives the
bias as an argument, which a forward pre-hook on that module rescales.

The three differ in how the bias is passed: BLOOM (BigScience 2022, arXiv:2211.05100) as `alibi`,
(batch · heads, 1, keys); MPT (MosaicML 2023) as `position_bias`, (heads, 1, max_seq_len);
Falcon-RW (Penedo et al. 2023, arXiv:2306.01116) as `alibi` and inside the attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families import Family, only_part
from longitude.hf.probe import replaced
from longitude.parts import Alibi, AlibiInterpolated, NtkAlibi

LINEAR = (Alibi, AlibiInterpolated, NtkAlibi)
TAKES = "alibi(…), alibi_interpolated(…) or ntk_alibi(…)"
Arguments = dict[str, Any]
Rescale = Callable[[Arguments, Tensor], Arguments]  # (arguments, slope ratios) -> changes
HOOKED = "_longitude_rescaled"  # the attribute of a module under such a patch


def slopes(part: Any, heads: int) -> Float[Tensor, " {heads}"]:
    """Return the slope of each head: what a linear bias subtracts per unit of distance."""
    q, ones = torch.zeros(1, heads, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.int64)
    term, zero = part.term(q, q, ones, ones - 1, {}, 1.0), torch.tensor(0)
    return -term(zero, torch.arange(heads), zero, zero)


def attentions(model: nn.Module, kind: str, attention: str) -> list[nn.Module]:
    """Return the model's modules of this transformers class, or of a class derived from it."""
    home = f"transformers.models.{kind}.modeling_{kind}"
    return [
        module
        for module in model.modules()
        if any(c.__module__ == home and c.__name__ == attention for c in type(module).__mro__)
    ]


def _times(bias: Tensor, ratio: Tensor) -> Tensor:
    """Multiply a bias (…, h, q, k) by its head's ratio, with one rounding."""
    return (bias * ratio.to(bias.device)[:, None, None]).to(bias.dtype)


def _rescale_bloom(given: Arguments, ratio: Tensor) -> Arguments:
    bias = given["alibi"].unflatten(0, (-1, len(ratio)))
    return {"alibi": _times(bias, ratio).flatten(0, 1)}


def _rescale_mpt(given: Arguments, ratio: Tensor) -> Arguments:
    """Build the bias for the actual number of keys: transformers builds it for `max_seq_len` keys
    and fails on one more."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    mask = given["attention_mask"]
    bias = build_mpt_alibi_tensor(len(ratio), mask.shape[-1], device=mask.device)
    return {"position_bias": _times(bias, ratio)}


def _rescale_falcon(given: Arguments, ratio: Tensor) -> Arguments:
    """Rescale the bias itself and inside the mask, where hidden keys keep the dtype's minimum."""
    bias, mask = given["alibi"], given["attention_mask"]
    hidden = mask == torch.finfo(mask.dtype).min
    bias = bias if bias.dim() == 4 else bias.unflatten(0, (-1, len(ratio)))
    return {
        "alibi": _times(bias, ratio),
        "attention_mask": torch.where(hidden, mask, _times(mask, ratio)),
    }


def _family(kind: str, attention: str, rescale: Rescale) -> Family:
    """Return the family of models with this attention class."""

    def claims(model: nn.Module) -> bool:
        has_alibi = getattr(getattr(model, "config", None), "alibi", True)  # an entry of Falcon's
        return bool(has_alibi) and bool(attentions(model, kind, attention))

    def scheme(model: nn.Module) -> Scheme:
        config: Any = model.config
        # Falcon's eager attention adds the bias twice, so its slopes are doubled
        doubled = kind == "falcon" and config._attn_implementation != "sdpa"
        return Scheme.of(AlibiInterpolated(0.5) if doubled else Alibi())

    @contextmanager
    def patch(model: nn.Module, wanted: Scheme | Layers, force: bool = False) -> Iterator[Scheme]:
        own, name, config = scheme(model), type(model).__name__, cast(Any, model.config)
        part = only_part(model, wanted, own, "bias", TAKES)
        if not isinstance(part, LINEAR):
            raise UserError(
                f"{name} has {own}, whose slopes are all that can change, but got {part}: give it "
                f"{TAKES}."
            )
        modules = attentions(model, kind, attention)
        if any(HOOKED in vars(module) for module in modules):
            raise UserError(f"{name} is patched already: leave that patch first.")
        new, old = (slopes(bias, config.num_attention_heads) for bias in (part, own.bias[0]))
        with ExitStack() as stack:
            for module in modules:
                ratio = (new / old).to(next(module.parameters()).device, torch.float32)

                def hook(
                    module: nn.Module, args: Any, given: Arguments, ratio: Tensor = ratio
                ) -> tuple[Any, Arguments]:
                    return args, given | rescale(given, ratio)

                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.enter_context(replaced(module, HOOKED, True))
            yield replace(own, bias=(part,))

    return Family(kind, claims, scheme, patch)


BLOOM = _family("bloom", "BloomAttention", _rescale_bloom)
# transformers ignores `alibi_bias_max` and always takes 8: a checkpoint that was trained with 16
# (StoryWriter) needs alibi(steepness=16)
MPT = _family("mpt", "MptAttention", _rescale_mpt)
# "alibi()" means the model's own slopes m_h/√d: the factor 1/√d belongs to the architecture, and
# alibi_interpolated(4) stretches the model fourfold as it does any other
FALCON_RW = _family("falcon", "FalconAttention", _rescale_falcon)
