"""`attention`: one function over every scheme. It validates its inputs, plans, and runs the plan.

Under `torch.compile` one kind of call is seen by the compiler: a call over contiguous positions
that is one pass, full or causal, is a rotation and SDPA. Its tables are constants of the graph,
made while the compiler traces, and the rotation fuses with what stands before it. Every other call
leaves the graph and runs as it would without a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Pos, Weights
from longitude.core.scheme import Scheme
from longitude.ops.eager import Scores, scores
from longitude.ops.inputs import AttentionInputs, prepare
from longitude.ops.passes import Latest, make_passes
from longitude.ops.plan import Backend, Kernel, Plan, make_plan
from longitude.parts.rope import Pairs, apply_rotary
from longitude.parts.rotary_tables import Tables, cos_sin

Split = Literal["tokens", "heads", "keys"]  # what the ranks of a group have of their own
PLAIN = frozenset((int, float, type(None)))  # options that are known without reading a tensor
MAX_SHARED = 2**17  # tokens of q and k: more keep the device busy, and their tables take memory
LONG = 2**14  # tokens of q and k from which on the tables of few schemes are kept


def attention(
    scheme: Scheme | str,
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    q_pos: range | Real[Tensor, " nq"] | Real[Tensor, "#b nq"] | Real[Tensor, "_ _ nq"],
    k_pos: range | Real[Tensor, " nk"] | Real[Tensor, "#b nk"] | Real[Tensor, "_ _ nk"],
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
    forget_sums: Float[Tensor, "b h nk"]
    | tuple[Float[Tensor, "b h nq"], Float[Tensor, "b h nk"]]
    | None = None,
    group: Any = None,
    split: Split = "tokens",
) -> Float[Tensor, "b h nq dv"]:
    """Attention under a scheme. Keys come pre-RoPE, with their positions; heads may be grouped.

    Args:
        q_pos, k_pos: a `range` where positions are contiguous (fastest), a tensor otherwise. Under
            `rope(axes=…)` one row for each axis; masks and biases go by one row more, the order of
            tokens, if it comes first.
        weights: the learned parts' weights, named part.weight, as `scheme.init` makes them.
        scale: on the logits; 1/√d by default.
        softcap: logits become softcap · tanh(logits / softcap).
        key_padding: True where a key is padding and must not be seen.
        segments: one id per token; tokens see their own. A pair where queries differ from keys.
        sink_logits: one more logit per head in the softmax, whose value is zero.
        length: what length-dependent frequencies take for the total length, one number or one per
            sequence; by default each sequence's last position + 1. Fix it for the life of a cache.
        forget_sums: of a scheme with forget gates the running sums of their logarithms, float32 or
            wider. A pair where queries differ from keys.
        group: ranks that each call this with tokens of their own, in any order; queries see the
            keys of all. The backward is a call of all ranks as well.
        split: over a group, "tokens" sends keys and values around a ring, "heads" exchanges tokens
            for heads, "keys" is for decoding: every rank has the same queries and its own keys.
    """
    options = {
        "scale": scale, "dropout": dropout, "softcap": softcap, "key_padding": key_padding,
        "segments": segments, "sink_logits": sink_logits, "length": length,
        "forget_sums": forget_sums,
    }  # fmt: skip
    call = (scheme, q, k, v, q_pos, k_pos, weights)
    over = None if group is None else (group, split)
    if not torch.compiler.is_compiling():
        return _attention(call, backend, options, over)
    traced = None
    if backend == "auto" and isinstance(scheme, Scheme) and over is None:
        traced = _traceable(scheme, q, k, q_pos, k_pos, options)
    if traced is None:
        from longitude.ops.flex import outside_graph  # brings the compiler, which is here already

        return outside_graph(_attention, call, backend, options, over)  # type: ignore[call-issue]
    causal, scale, q_tables, k_tables, pairs = traced
    if q_tables is not None and k_tables is not None:
        q, k = apply_rotary(q, *q_tables, pairs), apply_rotary(k, *k_tables, pairs)
    grouped = q.shape[1] != k.shape[1]
    with torch.autocast(q.device.type, enabled=False):  # as outside a graph
        return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def _attention(
    call: tuple[Any, ...], backend: str, options: dict[str, Any], over: tuple[Any, Any] | None
) -> Tensor:
    if over is not None:
        from longitude.ops.ring import attention_over  # late: few calls have a group

        return attention_over(*over, call, backend, options)
    inputs = _inputs(call, options)
    out, width = run(inputs, make_plan(inputs, backend)), call[3].shape[-1]
    return out if out.shape[-1] == width else out[..., :width]


def _inputs(call: tuple[Any, ...], options: dict[str, Any]) -> AttentionInputs:
    """The checked inputs. The layers of a forward differ in the values of q, k and v alone: what
    follows from all else is checked and made once."""
    scheme, q, k, v, q_pos, k_pos, weights = call
    plain = type(scheme) is Scheme and not weights and type(q) is type(k) is type(v) is Tensor
    plain = plain and type(q_pos) is type(k_pos) is range and type(options["length"]) is not float
    plain = plain and PLAIN.issuperset(map(type, options.values()))
    if not plain or len(q_pos) + len(k_pos) > MAX_SHARED:
        return prepare(*call, **options)
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = [(x.shape, x.dtype, x.device) for x in (q, k, v)]
    latest = _shared if len(q_pos) + len(k_pos) <= LONG else _shared_by_long
    shared = latest(scheme, grads, tensors, q_pos, k_pos, options)
    if "inputs" not in shared:
        made = prepare(*call, **options)
        if made.q is not q or made.k is not k or made.v is not v:
            return made
        shared["inputs"] = {**vars(made), "q": None, "k": None, "v": None}  # which layers have
    made = object.__new__(AttentionInputs)  # frozen: its fields would be set one by one
    vars(made).update(shared["inputs"], q=q, k=k, v=v, shared=shared)
    return made


# what calls share that are alike in all this; the first of them fills it
_shared: Latest[dict[Any, Any]] = Latest(lambda *alike: {})
_shared_by_long: Latest[dict[Any, Any]] = Latest(lambda *alike: {}, schemes=2)


def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Run a plan."""
    if not plan.steps:
        return p.zeros()
    return _backend(RUNNERS.get(plan.steps[-1].kernel, "lse_merge")).run(p, plan)  # type: ignore[no-any-return]


@cache
def _backend(name: str) -> Any:
    """A backend's module, imported when first used: flex brings the compiler."""
    return import_module(f"longitude.ops.{name}")


RUNNERS = {
    Kernel.EAGER: "eager", Kernel.FLEX: "flex", Kernel.BANDED: "banded", Kernel.DECODE: "decode",
    Kernel.BANDS_TOGETHER: "banded",
    Kernel.SDPA: "sdpa", Kernel.SDPA_MASKED: "sdpa", Kernel.SDPA_ALIBI: "sdpa",
    Kernel.SDPA_DIAGONALS: "diagonals",
}  # fmt: skip


def terms(
    scheme: Scheme | str,
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
    return scores(prepare(scheme, q, k, k, q_pos, k_pos, weights, **options))


# of a call that is one pass: causal, scale, the tables of q and k if it is rotated, its pairs
Constants = tuple[bool, float, Tables | None, Tables | None, Pairs]


def _traceable(
    scheme: Scheme, q: Tensor, k: Tensor, q_pos: Pos, k_pos: Pos, options: dict[str, Any]
) -> Constants | None:
    """The constants of a call that is one pass over contiguous positions, or None."""
    given = [name for name, value in options.items() if value is not None and name != "dropout"]
    rope = scheme.rotary
    in_prepare = rope is not None and (rope.pairs == "polar" or rope.axes is not None)
    if scheme.bias or scheme.scale or in_prepare or given or options["dropout"]:
        return None
    if not (isinstance(q_pos, range) and isinstance(k_pos, range)):
        return None
    # made anew, a range's ends are constants to a compiler; the sizes of tensors need not be
    q_pos, k_pos = (range(pos.start, pos.stop, pos.step) for pos in (q_pos, k_pos))
    if len(q_pos) != q.shape[2] or len(k_pos) != k.shape[2]:
        return None  # outside the graph, where validation raises
    if q_pos.step != 1 or k_pos.step != 1 or len(q_pos) < 2 or not k_pos:
        return None
    ends = (q_pos.start, q_pos.stop, k_pos.start, k_pos.stop)
    rest = (q.shape[3], torch.promote_types(q.dtype, torch.float32), q.device)
    return scheme.settled(_constants, scheme.written, ends, *rest)


def _constants(
    scheme: Scheme, ends: tuple[int, int, int, int], d: int, dtype: torch.dtype,
    device: torch.device,
) -> Constants | None:  # fmt: skip
    q_pos, k_pos = range(*ends[:2]), range(*ends[2:])
    q, k = (torch.empty(1, 1, len(pos), d, dtype=dtype, device="meta") for pos in (q_pos, k_pos))
    p = prepare(scheme, q, k, k, q_pos, k_pos)
    step = make_plan(p).steps[0]
    if step.kernel is not Kernel.SDPA:
        return None
    causal, region = step.tiles[0].kind == "lower", make_passes(p)[0].region
    if scheme.rotary is None or region is None:
        return causal, p.scale, None, None, "half"
    centre = float(q_pos[-1]) if scheme.rotary.decay else 0.0
    how = {"dtype": dtype, "device": device, "centre": centre}
    q_tables = cos_sin(scheme.rotary, region, "q", q_pos, d, p.q_length, **how)
    k_tables = cos_sin(scheme.rotary, region, "k", k_pos, d, p.k_length, **how)
    return causal, p.scale, q_tables, k_tables, scheme.rotary.pairs
