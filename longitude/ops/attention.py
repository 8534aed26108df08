"""`attention`: one function for every scheme. It validates its inputs, makes a plan and runs it.

Under `torch.compile` the compiler traces one kind of call: a single pass over contiguous positions,
full or causal, which is a rotation followed by SDPA. Its rotary tables are computed during tracing
and become constants of the graph, and the rotation fuses with the operations before it. Every other
call breaks the graph and runs as it would without a compiler.
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

Split = Literal["tokens", "heads", "keys"]  # how a call is divided among the ranks of a group
PLAIN = frozenset((int, float, type(None)))  # types of options known without reading a tensor
MAX_SHARED = 2**17  # tokens of q and k: more keep the device busy, and their tables are large
LONG = 2**14  # tokens of q and k beyond which the tables of only a few schemes are cached


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
    """Attention under a scheme, over pre-RoPE keys with their positions; heads may be grouped.

    Args:
        q_pos, k_pos: a `range` where positions are contiguous (fastest), a tensor otherwise. Under
            `rope(axes=…)` a tensor has one row per axis; an additional first row gives the order of
            tokens, which masks and biases then use.
        weights: weights of the learned parts, named part.weight, as `scheme.init` returns them.
        scale: factor on the logits; 1/√d by default.
        softcap: logits become softcap · tanh(logits / softcap).
        key_padding: True where a key is padding and must not be attended to.
        segments: one id per token; tokens attend to their own. A pair if queries and keys differ.
        sink_logits: one extra logit per head in the softmax, whose value vector is zero.
        length: total length for length-dependent frequencies, one number or one per sequence; by
            default each sequence's last position + 1. Keep it fixed for the lifetime of a cache.
        forget_sums: running sums of the logarithms of forget gates, for schemes that have them, in
            float32 or wider. A pair if queries and keys differ.
        group: process group whose ranks each pass their own tokens, in any order; queries attend to
            the keys of all ranks. The backward is collective as well.
        split: over a group, "tokens" sends keys and values around a ring, "heads" exchanges tokens
            for heads, "keys" is for decoding: every rank has the same queries and its own keys.
    """
    options = {
        "scale": scale, "dropout": dropout, "softcap": softcap, "key_padding": key_padding,
        "segments": segments, "sink_logits": sink_logits, "length": length,
        "forget_sums": forget_sums,
    }  # fmt: skip
    call = (scheme, q, k, v, q_pos, k_pos, weights)
    parallel = None if group is None else (group, split)
    if not torch.compiler.is_compiling():
        return _attention(call, backend, options, parallel)
    constants = None
    if backend == "auto" and isinstance(scheme, Scheme) and parallel is None:
        constants = _traceable(scheme, q, k, q_pos, k_pos, options)
    if constants is None:
        from longitude.ops.flex import outside_graph  # imports the compiler

        return outside_graph(_attention, call, backend, options, parallel)  # type: ignore[call-issue]
    causal, scale, q_tables, k_tables, pairs = constants
    if q_tables is not None and k_tables is not None:
        q, k = apply_rotary(q, *q_tables, pairs), apply_rotary(k, *k_tables, pairs)
    grouped = q.shape[1] != k.shape[1]
    with torch.autocast(q.device.type, enabled=False):  # as without a compiler
        return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def _attention(
    call: tuple[Any, ...], backend: str, options: dict[str, Any], over: tuple[Any, Any] | None
) -> Tensor:
    if over is not None:
        from longitude.ops.ring import attention_over  # deferred: few calls have a group

        return attention_over(*over, call, backend, options)
    inputs = _inputs(call, options)
    out, width = run(inputs, make_plan(inputs, backend)), call[3].shape[-1]
    return out if out.shape[-1] == width else out[..., :width]


def _inputs(call: tuple[Any, ...], options: dict[str, Any]) -> AttentionInputs:
    """Return the validated inputs. The layers of a forward differ only in the values of q, k and v:
    everything else is validated once and reused."""
    scheme, q, k, v, q_pos, k_pos, weights = call
    plain = type(scheme) is Scheme and not weights and type(q) is type(k) is type(v) is Tensor
    plain = plain and type(q_pos) is type(k_pos) is range and type(options["length"]) is not float
    plain = plain and PLAIN.issuperset(map(type, options.values()))
    if not plain or len(q_pos) + len(k_pos) > MAX_SHARED:
        return prepare(*call, **options)
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    tensors = [(x.shape, x.dtype, x.device) for x in (q, k, v)]
    memo = _shared if len(q_pos) + len(k_pos) <= LONG else _shared_by_long
    shared = memo(scheme, grads, tensors, q_pos, k_pos, options)
    if "inputs" not in shared:
        inputs = prepare(*call, **options)
        if inputs.q is not q or inputs.k is not k or inputs.v is not v:
            return inputs
        shared["inputs"] = {**vars(inputs), "q": None, "k": None, "v": None}  # differ by layer
    inputs = object.__new__(AttentionInputs)  # a frozen class would set each field
    vars(inputs).update(shared["inputs"], q=q, k=k, v=v, shared=shared)
    return inputs


# what calls with equal arguments share: the first of them fills the dictionary
_shared: Latest[dict[Any, Any]] = Latest(lambda *alike: {})
_shared_by_long: Latest[dict[Any, Any]] = Latest(lambda *alike: {}, schemes=2)


def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Run a plan."""
    if not plan.steps:
        return p.zeros()
    return _backend(RUNNERS.get(plan.steps[-1].kernel, "lse_merge")).run(p, plan)  # type: ignore[no-any-return]


@cache
def _backend(name: str) -> Any:
    """Return a backend's module, imported on first use: flex loads the compiler."""
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
    """Return the terms of every score: content, each bias, their sum; and which pairs are visible.

    `options` are the arguments of `attention` that scores depend on: scale, softcap, key_padding,
    segments, length.
    """
    return scores(prepare(scheme, q, k, k, q_pos, k_pos, weights, **options))


# of a single-pass call: causal, scale, the rotary tables of q and k (or None), the pair layout
Constants = tuple[bool, float, Tables | None, Tables | None, Pairs]


def _traceable(
    scheme: Scheme, q: Tensor, k: Tensor, q_pos: Pos, k_pos: Pos, options: dict[str, Any]
) -> Constants | None:
    """Return the constants of a single-pass call over contiguous positions, else None."""
    named = [name for name, value in options.items() if value is not None and name != "dropout"]
    rope = scheme.rotary
    in_prepare = rope is not None and (rope.pairs == "polar" or rope.axes is not None)
    if scheme.bias or scheme.scale or in_prepare or named or options["dropout"]:
        return None
    if not (isinstance(q_pos, range) and isinstance(k_pos, range)):
        return None
    # a newly built range has ends that are constants to the compiler; tensor sizes may be dynamic
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
    kwargs = {"dtype": dtype, "device": device, "centre": centre}
    q_tables = cos_sin(scheme.rotary, region, "q", q_pos, d, p.q_length, **kwargs)
    k_tables = cos_sin(scheme.rotary, region, "k", k_pos, d, p.k_length, **kwargs)
    return causal, p.scale, q_tables, k_tables, scheme.rotary.pairs
