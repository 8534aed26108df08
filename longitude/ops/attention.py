"""`attention`: one function over every scheme, and the choice of the backend that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from longitude.core.part import Pos, Weights
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops import eager
from longitude.ops import sdpa as native
from longitude.ops.eager import Scores
from longitude.ops.inputs import AttentionInputs, prepare

Backend = Literal["auto", "eager", "native", "flex", "banded", "alibi"]
BACKENDS = ("eager", "native", "flex", "banded", "alibi")
AUTO = ("banded", "alibi", "flex", "native", "eager")  # asked in turn; the last runs everything
FEW = 16  # queries that leave a card idle where each block of them is a program
Call = tuple[Scheme, Tensor, Tensor, Tensor, Pos, Pos, Weights | None]  # what prepare takes


def attention(
    scheme: Scheme,
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    q_pos: range | Real[Tensor, " nq"] | Real[Tensor, "#b nq"],
    k_pos: range | Real[Tensor, " nk"] | Real[Tensor, "#b nk"],
    weights: Weights | None = None,
    *,
    backend: Backend = "auto",
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    key_padding: Bool[Tensor, "b nk"] | None = None,
    segments: Int[Tensor, "b nk"] | tuple[Int[Tensor, "b nq"], Int[Tensor, "b nk"]] | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    length: int | Sequence[int] | Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Attention under a scheme. Keys come unturned, with their positions; heads may be grouped.

    Args:
        q_pos, k_pos: a `range` where positions are contiguous (the fast way), a tensor otherwise.
        weights: the learned parts' weights, named part.weight, as `scheme.init` makes them.
        scale: on the logits; 1/√d by default.
        softcap: logits become softcap · tanh(logits / softcap).
        key_padding: True where a key is padding and must not be seen.
        segments: one id a token; tokens see only their own. A pair where queries are not the keys.
        sink_logits: one more logit a head in the softmax, whose value is nothing.
        length: what length-dependent frequencies take for the total length, one number or one a
            sequence; by default each sequence's last position + 1. Fix it for the life of a cache.
    """
    options = {
        "scale": scale, "dropout": dropout, "softcap": softcap, "key_padding": key_padding,
        "segments": segments, "sink_logits": sink_logits, "length": length,
    }  # fmt: skip
    call = (scheme, q, k, v, q_pos, k_pos, weights)
    if torch.compiler.is_compiling():
        from longitude.ops.compiled import traced  # late: it imports the compiler

        return traced(call, backend, options)
    return run(call, backend, options)


def run(call: Call, backend: str, options: dict[str, Any]) -> Tensor:
    """A call outside any graph that is being traced."""
    p = prepare(*call, **options)
    return module(backend, p).run(p)


def terms(
    scheme: Scheme,
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    q_pos: range | Real[Tensor, " nq"] | Real[Tensor, "#b nq"],
    k_pos: range | Real[Tensor, " nk"] | Real[Tensor, "#b nk"],
    weights: Weights | None = None,
    **options: Any,
) -> Scores:
    """What every score is made of: content, each bias, their sum, and which pairs are visible.

    `options` are those of `attention` that scores depend on: scale, softcap, key_padding, segments,
    length.
    """
    options = {"scale": None, "segments": None, "length": None, **options}
    return eager.scores(prepare(scheme, q, k, k, q_pos, k_pos, weights, **options))


def module(backend: str, p: AttentionInputs) -> Any:
    """The backend that runs a call: the one asked for, or the fastest that does not refuse."""
    if backend == "auto":
        return _loaded(next(name for name, why in considered(p) if why is None))
    if backend not in BACKENDS:
        raise UserError(f"no backend is called {backend!r}: use auto, {', '.join(BACKENDS)}.")
    chosen = _loaded(backend)
    if why := chosen.refuses(p):
        raise UserError(f"{backend} can't run {p.scheme}: {why}; use backend='eager' or 'auto'.")
    return chosen


def considered(p: AttentionInputs) -> Iterator[tuple[str, str | None]]:
    """The backends that `auto` asks, each with why it does not run the call, until one does."""
    for name in AUTO:
        why = _slower(name, p) or _loaded(name).refuses(p)
        yield name, why
        if why is None:
            return


@cache
def _loaded(backend: str) -> Any:
    """A backend's module, imported when it is asked: flex brings the compiler."""
    module = {"native": "sdpa", "alibi": "sdpa_alibi"}.get(backend, backend)
    return import_module(f"longitude.ops.{module}")


def _slower(backend: str, p: AttentionInputs) -> str | None:
    """Why a backend that could run the call is passed over: another is faster, or closer."""
    if backend not in ("banded", "alibi", "flex"):
        return None
    if not p.q.is_cuda:
        return "it pays on CUDA only"
    if backend == "alibi" and p.q.dtype not in (torch.float16, torch.bfloat16):
        return "in the wider types its extra dimensions round more than plain attention does"
    if backend == "banded" and p.q.shape[2] < FEW:
        return f"fewer than {FEW} queries leave its programs too few"
    if p.q.shape[2] == 1:
        return "a single query is one pass of a plain kernel"
    if not native.by_mask(p):
        return _by_positions(backend, p)
    return None


def _by_positions(backend: str, p: AttentionInputs) -> str | None:
    """The same where positions alone decide: bands are for half types, and for several areas."""
    if backend != "banded" or p.q.dtype not in (torch.float16, torch.bfloat16):
        return "positions alone decide here, which plain kernels read as tiles"
    return "one call of a plain kernel does it" if native.single(p) else None
