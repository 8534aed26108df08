"""What BLOOM, MPT and Falcon-RW share: a bias linear in the distance, with a slope for each head.

Press et al. 2021. transformers adds m_h · j instead of -m_h · (i - j), which softmax can't tell
apart. Whatever replaces ALiBi in such a model has other slopes, m'_h, and is the model's own bias
times m'_h / m_h: so it keeps what the model does with padding, caches and rounding. Each attention
module gets the bias as an argument; a hook on that module, and on no other, changes it on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.families.validate import name, only_part
from longitude.parts import Alibi, AlibiInterpolated, NtkAlibi

LINEAR = (Alibi, AlibiInterpolated, NtkAlibi)
TAKES = "alibi(…), alibi_interpolated(…) or ntk_alibi(…)"
Arguments = dict[str, Any]
Change = Callable[[Arguments, Tensor], Arguments]  # of an attention's arguments, given the ratios


def slopes(part: Any, heads: int) -> Float[Tensor, " {heads}"]:
    """How much a linear bias takes off the score for each step of distance."""
    q, one = torch.zeros(1, heads, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.int64)
    term, zero = part.term(q, q, one, one - 1, {}, 1.0), torch.tensor(0)
    return -term(zero, torch.arange(heads), zero, zero)


def settled(model: nn.Module, scheme: Scheme | Layers, own: Scheme) -> Scheme:
    """The model's own scheme with the bias that is asked for."""
    part = only_part(model, scheme, own, "bias", TAKES)
    if not isinstance(part, LINEAR):
        raise UserError(
            f"{name(model)} has {own}, whose slopes are all that can change, but got {part}: give "
            f"it {TAKES}."
        )
    return replace(own, bias=(part,))


def times(bias: Tensor, ratio: Tensor) -> Tensor:
    """A bias (…, h, q, k) times its head's ratio, rounded once."""
    return (bias * ratio.to(bias.device)[:, None, None]).to(bias.dtype)


@dataclass(frozen=True, eq=False)
class Hook:
    """Changes the arguments of one attention module's call."""

    change: Change
    ratio: Tensor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments
    ) -> tuple[tuple[Any, ...], Arguments]:
        return args, kwargs | self.change(kwargs, self.ratio)


@contextmanager
def sloped(
    model: nn.Module, modules: list[nn.Module], change: Change, full: Scheme, own: Scheme
) -> Iterator[Scheme]:
    """The model with the bias of these modules changed, until the end."""
    hooks = [hook for m in modules for hook in m._forward_pre_hooks.values()]
    if any(isinstance(hook, Hook) for hook in hooks):
        raise UserError(f"{name(model)} is patched already: leave that patch first.")
    config: Any = model.config
    mine, theirs = (slopes(s.bias[0], config.num_attention_heads) for s in (full, own))
    ratio = (mine / theirs).to(torch.float32)
    handles = []
    try:
        for module in modules:
            near = ratio.to(next(module.parameters()).device)
            hook = Hook(change, near)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield full
    finally:
        for handle in handles:
            handle.remove()


def attentions(model: nn.Module, kind: str, attention: str) -> list[nn.Module]:
    """The model's modules of transformers' class of this name, or of one made from it."""
    home = f"transformers.models.{kind}.modeling_{kind}"
    return [
        module
        for module in model.modules()
        if any(c.__module__ == home and c.__name__ == attention for c in type(module).__mro__)
    ]
