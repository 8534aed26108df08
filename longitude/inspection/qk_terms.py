"""The four terms of a score under absolute positions, measured on a text.

With x the embedding of a token and p that of its position, q_i = W_q(x_i + p_i) and
k_j = W_k(x_j + p_j) make the score q_i·k_j of four terms:

    x_i W x_j  content–content      x_i W p_j  content–position
    p_i W x_j  position–content     p_i W p_j  position–position       W = W_qᵀ W_k

The two in the middle carry one absolute position each, and none of the four is a function of i - j
unless W commutes with what moves positions on. A norm stands between: (x + p - mean) / σ is linear
in x and p once σ, which the whole makes, is kept as it is. So the model is run twice up to its
first attention, the second time without positions and with every norm's σ of the first; queries and
keys differ by what position gives them. Constants (biases, segments) count as content. The terms
add up to the score exactly. From the second layer on content and position have met, and can't be
parted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.region import visible
from longitude.core.validate import UserError
from longitude.hf.families import family_of
from longitude.hf.families.learned import LEARNED, tables
from longitude.inspection.qk_hooks import Enough, Heard, listen
from longitude.inspection.score_rows import FourTerms, HeadTerms, Term

NAMES = ("content–content", "content–position", "position–content", "position–position")
Both = tuple[Float[Tensor, "h n d"], Float[Tensor, "h n d"]]


def four_terms(model: Any, ids: Int[Tensor, " n"], rows: Int[Tensor, " m"]) -> FourTerms | None:
    """The terms of the first layer's scores for some queries; None where the model has no learned
    table of positions."""
    if family_of(model) is not LEARNED:
        return None
    first, whole, content = parts(model, ids)
    places = torch.arange(len(ids))
    seen = visible(first.own.areas(), rows[:, None], places)
    q, k = ((c, w - c) for c, w in zip(content, whole, strict=True))
    names = iter(NAMES)
    made = {next(names): _scores(a[:, rows], b, first.scale) for a in q for b in k}
    total = _scores(whole[0][:, rows], whole[1], first.scale)
    return FourTerms(
        layer=first.layer,
        pairs=int(seen.sum()),
        heads=tuple(
            HeadTerms(
                head=h,
                terms=tuple(_term(name, made[name][h], seen) for name in NAMES),
                whole=_term("score", total[h], seen),
            )
            for h in range(len(total))
        ),
    )


def parts(model: Any, ids: Int[Tensor, " n"]) -> tuple[Heard, Both, Both]:
    """The first attention; its queries and keys; and what content makes of them."""
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    odd = [type(m).__name__ for m in model.modules() if "RMSNorm" in type(m).__name__]
    if odd:
        raise UserError(f"{odd[0]} can't be taken apart: the four terms need LayerNorm.")
    sizes: dict[nn.Module, Tensor] = {}
    with _hooked([(norm, _remember(sizes)) for norm in norms]):
        first = _first(model, ids)
    blank = [(each.table, _nothing) for each in tables(model)]
    with _hooked([*blank, *((norm, _kept(sizes)) for norm in norms)]):
        second = _first(model, ids)
    return first, _both(first), _both(second)


def _nothing(table: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    """A hook that leaves positions out."""
    return torch.zeros_like(out)


def _first(model: Any, ids: Tensor) -> Heard:
    heard: list[Heard] = []

    def enough(one: Heard) -> None:
        heard.append(one)
        raise Enough

    listen(model, ids, enough)
    return heard[0]


def _both(heard: Heard) -> Both:
    q, k = heard.q[0].double().cpu(), heard.k[0].double().cpu()
    return q, k.repeat_interleave(len(q) // len(k), 0)


def _remember(sizes: dict[nn.Module, Tensor]) -> Any:
    """A hook that keeps the σ of each norm."""

    def hook(norm: Any, args: tuple[Any, ...], out: Tensor) -> None:
        x = args[0].float()
        sizes[norm] = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()

    return hook


def _kept(sizes: dict[nn.Module, Tensor]) -> Any:
    """A hook that norms by the σ of another run."""

    def hook(norm: Any, args: tuple[Any, ...], out: Tensor) -> Tensor:
        x = args[0].float()
        made = (x - x.mean(-1, keepdim=True)) / sizes[norm]
        made = made if norm.weight is None else made * norm.weight.float()
        return (made if norm.bias is None else made + norm.bias.float()).to(out.dtype)

    return hook


@contextmanager
def _hooked(hooks: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scores(q: Float[Tensor, "h m d"], k: Float[Tensor, "h n d"], scale: float) -> Tensor:
    return q @ k.mT * scale


def _term(name: str, scores: Float[Tensor, "m n"], seen: Tensor) -> Term:
    mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    sizes = [float(x[seen].square().mean() ** 0.5) for x in (scores, scores - mean)]
    return Term(name, *sizes)
