"""Measures what a model does with positions on the model itself: no architecture is known by name.

Two short forwards run with an attention function that returns zeros, one with the model's rotary
embedding and one with an identity rotation. Zeros make the hidden states of both equal, so queries
differ only by the layer's rotation: this shows which of the configuration's rotations it is, in
which layout, in which dimensions of the head, or that there is none. The mask function that
transformers would have used determines the layer's mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.part import Region
from longitude.core.region import meet, visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.layer import NAME, RECORDER, register
from longitude.hf.rope_config import ropes
from longitude.parts import Bidirectional, Causal, Chunked, Rope, Window
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

TOKENS = 24
TARGET_TOKENS = 17  # of an encoder-decoder's decoder: cross-attention differs in shape
LAYOUTS = ("half", "adjacent")
ROTATE = "apply_rotary_pos_emb"  # the function of a modeling file that rotates queries and keys
IDENTITY = "_longitude_identity"  # the attribute that marks the cosine of an identity rotation
Exact = dict[int, bool]  # by modeling file: whether an identity rotation returns its exact inputs


@dataclass(frozen=True, eq=False)
class RotaryOwner:
    """A module that owns rotary embeddings, with the same positions for all its layers. For a model
    without rotary embeddings, the module that holds the layers."""

    module: nn.Module
    rotaries: tuple[nn.Module, ...]


@dataclass(frozen=True, eq=False)
class ProbedLayer:
    """One attention module: its own scheme, and where in a head the rotary dimensions are."""

    module: nn.Module
    owner: RotaryOwner
    index: int
    scheme: Scheme
    rope_type: str | None = None  # the configuration's name for its rotation, if it has several
    rotary_start: int = 0
    rotary_dim: int = 0
    plain_cache: bool = False  # a cache holds exactly the keys and values that attention gets
    skips_rotation: bool = False  # an identity rotation need not be computed
    unsupported_reason: str | None = None  # why the rotation can't be replaced, if it can't


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of one attention call."""

    query: Tensor
    key: Tensor
    mask: Any
    from_cache: bool
    eps: float  # of the model's dtype
    extra: str | None  # the name of an argument of sparse or biased attention, if passed


def rotary_owners(model: nn.Module) -> list[RotaryOwner]:
    """Return the modules of a model that own rotary embeddings, which take position ids."""

    def is_rotary(module: nn.Module) -> bool:
        named = "Rotary" in type(module).__name__
        return named and "position_ids" in inspect.signature(type(module).forward).parameters

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():  # some keep one for each base in a list (Granite SWA)
            yield from child if isinstance(child, nn.ModuleList) else (child,)

    owners = [m for m in model.modules() if not isinstance(m, nn.ModuleList)]
    candidates = [(m, tuple(filter(is_rotary, below(m)))) for m in owners]
    return [RotaryOwner(module, rotaries) for module, rotaries in candidates if rotaries]


def unrotated_owners(model: nn.Module) -> list[RotaryOwner]:
    """Return the base model if it has no position encoding at all (Jamba, Nemotron-H), else []."""
    from longitude.hf.encodings import encodings

    base = getattr(model, "base_model", model)
    plain = hasattr(base, "config") and {e.kind for e in encodings(base.config)} == {"none"}
    return [RotaryOwner(base, ())] if plain else []


@torch.no_grad()
def probe_layers(model: nn.Module, owners: list[RotaryOwner]) -> list[ProbedLayer]:
    """Probe every self-attention module below these owners, in the order in which they run."""
    register()
    exact: Exact = {}
    rotated = _record(model, owners)
    plain = _record(model, owners, exact)
    try:
        cached = _record(model, owners, exact, use_cache=True)
    except Exception:  # a model without a cache, or with another type of cache
        cached = plain
    owner_of = {module: owner for owner in owners for module in owner.module.modules()}
    probed = []
    for position, (module, call) in enumerate(rotated.items()):
        if module not in owner_of or call.query.shape[2] != call.key.shape[2]:
            continue  # another part of the model, or cross-attention
        index = getattr(module, "layer_idx", None)
        index = position if index is None else int(index)
        layer = _probed(module, owner_of[module], index, plain[module], call)
        if call.extra:
            reason = f"{type(module).__name__} chooses or weighs keys itself (by {call.extra})"
            layer = replace(layer, unsupported_reason=reason)
        plain_cache = module in cached and cached[module].from_cache
        skips = exact.get(id(_modeling_file(module)), False)
        probed.append(replace(layer, plain_cache=plain_cache, skips_rotation=skips))
    if not probed:
        raise UserError(
            f"no attention of {type(model).__name__} goes through transformers' attention "
            f"interface: longitude can't patch it."
        )
    return probed


def _record(
    model: nn.Module, owners: list[RotaryOwner], exact: Exact | None = None, use_cache: bool = False
) -> dict[nn.Module, _Call]:
    """Record the attention calls of one forward without dropout. If `exact` is given, rotations are
    the identity, and `exact` records which modeling files could skip them."""
    from transformers import DynamicCache

    calls: dict[nn.Module, _Call] = {}
    cache: Any = DynamicCache(config=model.config) if use_cache else None  # type: ignore[arg-type]
    returned: list[Any] = []  # keys and values that the cache returned

    def update(*args: Any, **kwargs: Any) -> Any:
        returned.append(type(cache).update(cache, *args, **kwargs))
        return returned[-1]

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, extra: str | None
    ) -> Tensor:
        request = None if mask is None else getattr(mask, "mask_request", (None, None))
        from_cache = any(key is k and value is v for k, v in returned)
        eps = torch.finfo(query.dtype).eps
        calls[module] = _Call(query.float(), key.float(), request, from_cache, eps, extra)
        return query.new_zeros(*query.shape[:3], value.shape[-1])

    with ExitStack() as stack:
        for module in [module for module in model.modules() if module.training]:
            stack.callback(setattr, module, "training", True)
        model.eval()
        for owner in owners:
            stack.enter_context(attention_implementation(NAME, owner.module))
            if exact is None:
                continue
            stack.enter_context(rotations_skipped(owner.module))
            for rotary in owner.rotaries:
                identity = identity_rotation(rotary, skip=exact)
                stack.enter_context(replaced(rotary, "forward", identity))
        if use_cache:
            stack.enter_context(replaced(cache, "update", update))
        stack.callback(RECORDER.reset, RECORDER.set(record))
        probe_forward(model, cache=cache)
    return calls


def probe_forward(model: nn.Module, positions: Tensor | None = None, cache: Any = None) -> Any:
    """Run one forward over a few tokens, for any kind of text model."""
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.arange(TOKENS, device=device) * 7 % max(1, vocabulary - 3) + 3
    ids = ids[None] % vocabulary
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    kwargs |= {} if cache is None else {"past_key_values": cache}
    if getattr(model.config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = ids[:, :TARGET_TOKENS]
    if positions is not None:
        kwargs |= {"position_ids": positions.to(device), "attention_mask": torch.ones_like(ids)}
    names = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return model(**{name: x for name, x in kwargs.items() if name in names or open_ended})


def _probed(
    module: nn.Module, owner: RotaryOwner, index: int, plain: _Call, rotated: _Call
) -> ProbedLayer:
    """Find the rotation that turns the plain queries and keys into the rotated ones."""
    masks, eps = _masks(rotated.mask, module), rotated.eps
    pairs = ((plain.query, rotated.query), (plain.key, rotated.key))
    if all(nearly_equal(a, b, eps) for a, b in pairs):
        return ProbedLayer(module, owner, index, Scheme(mask=masks))
    config: Any = owner.module.config
    types = getattr(config, "layer_types", None) or []
    own_type = types[index] if index < len(types) else None
    configs = [config, *(each.config for each in owner.rotaries if hasattr(each, "config"))]
    known = dict.fromkeys(item for each in configs for item in ropes(each).items() if item[1])  # type: ignore[arg-type]
    candidates: Any = sorted(known, key=lambda item: item[0] != own_type)
    size = plain.query.shape[-1]
    for kind, rope in candidates:
        dim = rope.dim(size)
        for layout in LAYOUTS:
            candidate = replace(rope, pairs=layout)
            for start in dict.fromkeys((0, size - dim)):
                if all(nearly_equal(rotate_heads(x, candidate, start), y, eps) for x, y in pairs):
                    scheme = Scheme(rotary=candidate, mask=masks)
                    return ProbedLayer(module, owner, index, scheme, kind, start, dim)
    cls = type(module).__name__
    if not candidates:
        raise UserError(f"{cls} rotates, but its configuration states no rotation: add rope_theta.")
    kind, rope = candidates[0]
    reason = f"{cls} does more with its queries than rotate them as its configuration says ({rope})"
    scheme = Scheme(rotary=rope, mask=masks)
    return ProbedLayer(module, owner, index, scheme, kind, unsupported_reason=reason)


def rotate_heads(x: Tensor, rope: Rope, start: int, length: int | None = None) -> Tensor:
    """Rotate heads as transformers does: queries and keys are each scaled by √gain."""
    n = x.shape[2]
    length = length or n
    gain = rope.frequencies.gain(length) ** 0.5
    options = {"dtype": x.dtype, "device": x.device}
    cos, sin = cos_sin(rope, Region(), "k", range(n), x.shape[-1], length, **options)
    end = start + 2 * cos.shape[-1]
    part = apply_rotary(x[..., start:end], cos * gain, sin * gain, rope.pairs)
    return torch.cat([x[..., :start], part, x[..., end:]], -1)


def nearly_equal(a: Tensor, b: Tensor, eps: float) -> bool:
    """Whether a equals b up to rounding: bfloat16 rounds angles, each product and their sum."""
    return bool((a - b).abs().max() <= max(1e-2, 8 * eps) * a.abs().max()) and bool(
        (a - b).norm() <= max(3e-3, eps) * a.norm() + 1e-30
    )


def _masks(request: Any, module: nn.Module) -> tuple[Any, ...]:
    """Infer a layer's masks from the mask function that transformers would have used."""
    if request is None:
        return (Causal(),) if getattr(module, "is_causal", False) else (Bidirectional(),)
    function, size = request
    if function is None:
        raise UserError(
            f"{type(module).__name__} makes a mask of its own: longitude can't patch it."
        )
    # compare which pairs are visible at and next to multiples of the window or chunk size
    step = size or 8
    edges = {0, 1, *(m * step + d for m in (1, 2, 3) for d in (-1, 0, 1))}
    i, j = torch.tensor(sorted(e for e in edges if e >= 0))[:, None], torch.arange(3 * step + 3)
    zero = torch.tensor(0)
    expected = torch.as_tensor(function(zero, zero, i, j[None])).expand(len(i), len(j)).cpu().bool()
    sizes = [] if size is None else [n for n in (size, size + 1, size // 2 + 1, size // 2) if n > 0]
    choices = [(), *((mask,) for n in sizes for mask in (Window(n), Chunked(n)))]
    for masks in [(base, *local) for local in choices for base in (Causal(), Bidirectional())]:
        if torch.equal(expected, visible(meet(*(m.areas() for m in masks)), i, j[None])):
            return masks
    raise UserError(
        f"{type(module).__name__} has a mask that is neither causal, bidirectional, a window nor "
        f"chunks: longitude can't patch it."
    )


def identity_rotation(
    rotary: nn.Module,
    on_positions: Callable[[Tensor, int], None] | None = None,
    skip: bool | Exact = False,
) -> Callable[..., Any]:
    """Return a forward for a rotary embedding that rotates nothing (cos 1, sin 0) and reports the
    positions and batch size of each call. Inside `rotations_skipped`, skip=True skips the rotation;
    with a dictionary it is computed, and recorded there if skipping would be exact."""
    forms: dict[Any, Any] = {}  # shapes and dtypes of the tables: computing them takes launches

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if on_positions is not None:
            on_positions(position_ids, x.shape[0])
        compiling, call = torch.compiler.is_compiling(), None
        if not compiling and not kwargs and all(type(arg) is str for arg in args):
            autocast = torch.is_autocast_enabled(x.device.type)
            call = (x.shape, x.dtype, x.device, position_ids.shape, args, autocast)
        if (specs := forms.get(call)) is None:
            # at position 0: a large one may change dynamic frequencies permanently
            out = type(rotary).forward(rotary, x, torch.zeros_like(position_ids), *args, **kwargs)
            if not isinstance(out, tuple):
                return torch.ones_like(out)
            specs = [(y.shape, {"dtype": y.dtype, "device": y.device}) for y in out[:2]]
            if call is not None and len(forms) < 64:
                forms[call] = specs
        cos, sin = (torch.full(size, n, **kw) for n, (size, kw) in zip((1, 0), specs, strict=True))
        if not compiling:  # compiled code fuses the products with what follows
            setattr(cos, IDENTITY, skip)
        return cos, sin

    return forward


def _modeling_file(module: nn.Module) -> dict[str, Any]:
    """Return the globals of the file that defines a module's forward."""
    return inspect.unwrap(type(module).forward).__globals__


# by dictionary and key: the original value, then the value of each active patch
_entries: dict[tuple[int, str], list[Any]] = {}
_lock = Lock()


@contextmanager
def _entry(entries: dict[str, Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an entry that models share; their patches may begin and end in any order."""
    with _lock:
        values = _entries.setdefault((id(entries), name), [entries.get(name)])
        entries[name] = value = make(values[0])
        values.append(value)
    try:
        yield
    finally:
        with _lock:
            values.remove(value)
            entries[name] = values[-1]
            if len(values) == 1:
                del _entries[id(entries), name]


@contextmanager
def rotations_skipped(owner: nn.Module) -> Iterator[None]:
    """Let the modeling files of a module return queries and keys unchanged if the cosine is marked
    by an identity rotation: ten launches fewer per layer."""
    files = {id(file): file for file in map(_modeling_file, owner.modules()) if ROTATE in file}
    with ExitStack() as stack:
        for number, file in files.items():
            stack.enter_context(_entry(file, ROTATE, partial(_skipping_rotation, file=number)))
        yield


def _skipping_rotation(rotate: Callable[..., Any], file: int) -> Callable[..., Any]:
    """Wrap a file's rotation: with a marked cosine it returns the arguments before it, queries and
    keys. With a probe's mark it rotates them, and records whether they are unchanged."""

    @wraps(rotate)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        marks: list[Any] = [getattr(x, IDENTITY, False) for x in args]
        at = next((n for n, mark in enumerate(marks) if mark is not False), None)
        if at is None:
            return rotate(*args, **kwargs)
        inputs, exact = args[:at], marks[at]
        if exact is True:
            return inputs if at > 1 else inputs[0]
        out = rotate(*args, **kwargs)
        pairs = [*zip((out,) if isinstance(out, Tensor) else out, inputs, strict=False)]
        same = len(pairs) == at and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
        exact[file] = exact.get(file, True) and same
        return out

    return rotated


@contextmanager
def attention_implementation(name: str, module: nn.Module) -> Iterator[None]:
    """Make a module and its submodules call the attention function registered under a name."""
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    with ExitStack() as stack:
        for config in configs.values():  # models built from one configuration share it
            entry = _entry(vars(config), "_attn_implementation_internal", lambda _: name)
            stack.enter_context(entry)
        yield


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an instance attribute inside a with block."""
    attributes = vars(thing)
    before = [attributes[name]] if name in attributes else []
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        for each in before:
            attributes[name] = each
