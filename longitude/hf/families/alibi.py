"""ALiBi models: BLOOM, MPT and Falcon-RW. Their slopes can be changed.

Press et al. 2021, arXiv:2108.12409. transformers adds m_h · j instead of -m_h · (i - j), which
softmax can't distinguish. Whatever replaces ALiBi here has other slopes m'_h, so its bias is the
model's own times m'_h / m_h; padding, caches and rounding stay the model's. Each attention module
receives the bias as an argument, which a forward pre-hook on that module rescales.

The three differ in how the bias is passed: BLOOM (BigScience 2022, arXiv:2211.05100) as `alibi`,
(batch · heads, 1, keys); MPT (MosaicML 2023) as `position_bias`, (heads, 1, max_seq_len);
Falcon-RW (Penedo et al. 2023, arXiv:2306.01116) as `alibi` and inside the attention mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families import Family, only_part
from longitude.parts import Alibi, AlibiInterpolated, NtkAlibi

LINEAR = (Alibi, AlibiInterpolated, NtkAlibi)
TAKES = "alibi(…), alibi_interpolated(…) or ntk_alibi(…)"
Arguments = dict[str, Any]
Rescale = Callable[[nn.Module, Arguments, Tensor], Arguments]  # module, its arguments, the ratios


def slopes(part: Any, heads: int) -> Float[Tensor, " {heads}"]:
    """The slope of each head: what a linear bias subtracts per unit of distance."""
    q, one = torch.zeros(1, heads, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.int64)
    term, zero = part.term(q, q, one, one - 1, {}, 1.0), torch.tensor(0)
    return -term(zero, torch.arange(heads), zero, zero)


def attentions(model: nn.Module, kind: str, attention: str) -> list[nn.Module]:
    """The model's modules of this transformers class, or of a class derived from it."""
    home = f"transformers.models.{kind}.modeling_{kind}"
    return [
        module
        for module in model.modules()
        if any(c.__module__ == home and c.__name__ == attention for c in type(module).__mro__)
    ]


@dataclass(frozen=True, eq=False)
class RescaleHook:
    """Forward pre-hook that rescales the bias among an attention module's arguments."""

    rescale: Rescale
    ratio: Tensor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments
    ) -> tuple[tuple[Any, ...], Arguments]:
        return args, kwargs | self.rescale(module, kwargs, self.ratio)


def _times(bias: Tensor, ratio: Tensor) -> Tensor:
    """A bias (…, h, q, k) times its head's ratio, rounded once."""
    return (bias * ratio.to(bias.device)[:, None, None]).to(bias.dtype)


def _rescale_bloom(module: nn.Module, given: Arguments, ratio: Tensor) -> Arguments:
    bias = given["alibi"].unflatten(0, (-1, len(ratio)))
    return {"alibi": _times(bias, ratio).flatten(0, 1)}


def _rescale_mpt(module: nn.Module, given: Arguments, ratio: Tensor) -> Arguments:
    """The bias is built for the keys there are: transformers builds it for `max_seq_len` keys and
    fails on one more."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    mask = given["attention_mask"]
    bias = build_mpt_alibi_tensor(len(ratio), mask.shape[-1], device=mask.device)
    return {"position_bias": _times(bias, ratio)}


def _rescale_falcon(module: nn.Module, given: Arguments, ratio: Tensor) -> Arguments:
    """The bias by itself and inside the mask, where hidden keys keep the dtype's minimum."""
    bias, mask = given["alibi"], given["attention_mask"]
    hidden = mask == torch.finfo(mask.dtype).min
    bias = bias if bias.dim() == 4 else bias.unflatten(0, (-1, len(ratio)))
    return {
        "alibi": _times(bias, ratio),
        "attention_mask": torch.where(hidden, mask, _times(mask, ratio)),
    }


def _falcon_scheme(model: nn.Module) -> Scheme:
    """Falcon's eager attention adds the bias twice, so its slopes are doubled."""
    config: Any = model.config
    doubled = config._attn_implementation != "sdpa"
    return Scheme.of(AlibiInterpolated(0.5) if doubled else Alibi())


def _family(
    kind: str,
    attention: str,
    rescale: Rescale,
    scheme: Callable[[nn.Module], Scheme] = lambda model: Scheme.of(Alibi()),
    claims: Callable[[nn.Module], bool] = lambda model: True,
) -> Family:
    """The family of the models with this attention class."""

    def patch(
        model: nn.Module, wanted: Scheme | Layers, force: bool = False
    ) -> AbstractContextManager[Scheme]:
        own = scheme(model)
        part = only_part(model, wanted, own, "bias", TAKES)
        if not isinstance(part, LINEAR):
            raise UserError(
                f"{type(model).__name__} has {own}, whose slopes are all that can change, but got "
                f"{part}: give it {TAKES}."
            )
        modules = attentions(model, kind, attention)
        return _rescaled(model, modules, rescale, own, replace(own, bias=(part,)))

    def recognises(model: nn.Module) -> bool:
        return claims(model) and bool(attentions(model, kind, attention))

    return Family(kind, recognises, scheme, patch)


@contextmanager
def _rescaled(
    model: nn.Module, modules: list[nn.Module], rescale: Rescale, own: Scheme, full: Scheme
) -> Iterator[Scheme]:
    """The model with the slopes of `full` in place of its own."""
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    if any(isinstance(hook, RescaleHook) for hook in hooks):
        raise UserError(f"{type(model).__name__} is patched already: leave that patch first.")
    config: Any = model.config
    new, old = (slopes(s.bias[0], config.num_attention_heads) for s in (full, own))
    ratio = (new / old).to(torch.float32)
    handles = []
    try:
        for module in modules:
            hook = RescaleHook(rescale, ratio.to(next(module.parameters()).device))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield full
    finally:
        for handle in handles:
            handle.remove()


BLOOM = _family("bloom", "BloomAttention", _rescale_bloom)
# transformers ignores `alibi_bias_max` and always takes 8: a checkpoint that was trained with 16
# (StoryWriter) needs alibi(steepness=16)
MPT = _family("mpt", "MptAttention", _rescale_mpt)
# "alibi()" means the model's own slopes m_h/√d: the factor 1/√d belongs to the architecture, and
# alibi_interpolated(4) stretches the model fourfold as it does any other
FALCON_RW = _family(
    "falcon",
    "FalconAttention",
    _rescale_falcon,
    _falcon_scheme,
    claims=lambda model: bool(getattr(getattr(model, "config", None), "alibi", False)),
)
