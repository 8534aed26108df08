"""What a model does with positions, measured on the model itself: no architecture is known by name.

Two short forwards with an attention that returns zeros: once the model rotates queries and keys,
once its rotary embedding is the identity. Zeros make the hidden states of both equal, so the
difference between the queries that arrive is that layer's rotation: which of the configuration's
rotations, in which layout, in which dimensions of the head, or none. The mask function that
transformers would have used tells the layer's mask.
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
TARGET_TOKENS = 17  # for an encoder-decoder: so that cross-attention differs in shape
LAYOUTS = ("half", "adjacent")
ROTATE = "apply_rotary_pos_emb"  # the function of a modeling file that rotates queries and keys
IDENTITY = "_longitude_identity"  # the attribute of a cosine that rotates nothing
Exact = dict[int, bool]  # by modeling file: whether rotating by nothing returns what it was given


@dataclass(frozen=True, eq=False)
class RotaryOwner:
    """A module that owns rotary embeddings: it rotates by the same positions in all its layers. Of
    a model without any, the module that holds the layers."""

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
    eps: float  # of the dtype they came in
    extra: str | None  # an argument of sparse or biased attention


def rotary_owners(model: nn.Module) -> list[RotaryOwner]:
    """The modules of a model that own rotary embeddings of positions."""

    def is_rotary(module: nn.Module) -> bool:
        named = "Rotary" in type(module).__name__
        return named and "position_ids" in inspect.signature(type(module).forward).parameters

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():  # some keep one for each base in a list (Granite SWA)
            yield from child if isinstance(child, nn.ModuleList) else (child,)

    owners = [m for m in model.modules() if not isinstance(m, nn.ModuleList)]
    found = [(m, tuple(filter(is_rotary, below(m)))) for m in owners]
    return [RotaryOwner(module, rotaries) for module, rotaries in found if rotaries]


def unrotated_owners(model: nn.Module) -> list[RotaryOwner]:
    """The base model, if its attention has no encoding at all (Jamba, Nemotron-H)."""
    from longitude.hf.encodings import encodings

    base = getattr(model, "base_model", model)
    plain = hasattr(base, "config") and {e.kind for e in encodings(base.config)} == {"none"}
    return [RotaryOwner(base, ())] if plain else []


@torch.no_grad()
def probe_layers(model: nn.Module, owners: list[RotaryOwner]) -> list[ProbedLayer]:
    """Every self-attention module below these owners, in the order in which they run."""
    register()
    exact: Exact = {}
    rotated = _record(model, owners)
    plain = _record(model, owners, exact)
    try:
        cached = _record(model, owners, exact, use_cache=True)
    except Exception:  # a model without a cache, or with a cache of its own kind
        cached = plain
    owner_of = {module: owner for owner in owners for module in owner.module.modules()}
    found = []
    for position, (module, call) in enumerate(rotated.items()):
        if module not in owner_of or call.query.shape[2] != call.key.shape[2]:
            continue  # another part of the model, or cross-attention
        index = getattr(module, "layer_idx", None)
        index = position if index is None else int(index)
        one = _probed(module, owner_of[module], index, plain[module], call)
        if call.extra:
            reason = f"{type(module).__name__} chooses or weighs keys itself (by {call.extra})"
            one = replace(one, unsupported_reason=reason)
        plain_cache = module in cached and cached[module].from_cache
        skips = exact.get(id(_modeling_file(module)), False)
        found.append(replace(one, plain_cache=plain_cache, skips_rotation=skips))
    if not found:
        raise UserError(
            f"no attention of {type(model).__name__} goes through transformers' attention "
            f"interface: longitude can't patch it."
        )
    return found


def _record(
    model: nn.Module, owners: list[RotaryOwner], exact: Exact | None = None, use_cache: bool = False
) -> dict[nn.Module, _Call]:
    """The attention calls of one forward without dropout; without rotation, if `exact` is given,
    which notes whose rotation could be skipped."""
    from transformers import DynamicCache

    calls: dict[nn.Module, _Call] = {}
    cache: Any = DynamicCache(config=model.config) if use_cache else None  # type: ignore[arg-type]
    returned: list[Any] = []  # by the cache

    def update(*args: Any, **kwargs: Any) -> Any:
        returned.append(type(cache).update(cache, *args, **kwargs))
        return returned[-1]

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, extra: str | None
    ) -> Tensor:
        wanted = None if mask is None else getattr(mask, "mask_request", (None, None))
        held = any(key is k and value is v for k, v in returned)
        eps = torch.finfo(query.dtype).eps
        calls[module] = _Call(query.float(), key.float(), wanted, held, eps, extra)
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
    """One forward over a few tokens, for any kind of text model."""
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.arange(TOKENS, device=device) * 7 % max(1, vocabulary - 3) + 3
    ids = ids[None] % vocabulary
    given: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    given |= {} if cache is None else {"past_key_values": cache}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids[:, :TARGET_TOKENS]
    if positions is not None:
        given |= {"position_ids": positions.to(device), "attention_mask": torch.ones_like(ids)}
    names = inspect.signature(model.forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    return model(**{name: x for name, x in given.items() if name in names or open_ended})


def _probed(
    module: nn.Module, owner: RotaryOwner, index: int, plain: _Call, rotated: _Call
) -> ProbedLayer:
    """The rotation under which the plain queries and keys become the rotated ones."""
    masks, eps = _masks(rotated.mask, module), rotated.eps
    pairs = ((plain.query, rotated.query), (plain.key, rotated.key))
    if all(nearly_equal(a, b, eps) for a, b in pairs):
        return ProbedLayer(module, owner, index, Scheme(mask=masks))
    config: Any = owner.module.config
    types = getattr(config, "layer_types", None) or []
    own_type = types[index] if index < len(types) else None
    configs = [config, *(one.config for one in owner.rotaries if hasattr(one, "config"))]
    known = dict.fromkeys(item for one in configs for item in ropes(one).items() if item[1])  # type: ignore[arg-type]
    candidates: Any = sorted(known, key=lambda item: item[0] != own_type)
    size = plain.query.shape[-1]
    for kind, rope in candidates:
        dim = rope.dim(size)
        for layout in LAYOUTS:
            mine = replace(rope, pairs=layout)
            for start in dict.fromkeys((0, size - dim)):
                if all(nearly_equal(rotate_heads(x, mine, start), y, eps) for x, y in pairs):
                    scheme = Scheme(rotary=mine, mask=masks)
                    return ProbedLayer(module, owner, index, scheme, kind, start, dim)
    kind, rope = candidates[0]
    reason = (
        f"{type(module).__name__} does more with its queries than rotate them as its configuration "
        f"says ({rope})"
    )
    scheme = Scheme(rotary=rope, mask=masks)
    return ProbedLayer(module, owner, index, scheme, kind, unsupported_reason=reason)


def rotate_heads(x: Tensor, rope: Rope, start: int, length: int | None = None) -> Tensor:
    """Heads rotated as transformers does: queries and keys are each scaled by √gain."""
    n = x.shape[2]
    length = length or n
    gain = rope.frequencies.gain(length) ** 0.5
    options = {"dtype": x.dtype, "device": x.device}
    cos, sin = cos_sin(rope, Region(), "k", range(n), x.shape[-1], length, **options)
    end = start + 2 * cos.shape[-1]
    part = apply_rotary(x[..., start:end], cos * gain, sin * gain, rope.pairs)
    return torch.cat([x[..., :start], part, x[..., end:]], -1)


def nearly_equal(a: Tensor, b: Tensor, eps: float) -> bool:
    """Equal up to rounding: in bfloat16 the angles, each product and their sum are rounded."""
    return bool((a - b).abs().max() <= max(1e-2, 8 * eps) * a.abs().max()) and bool(
        (a - b).norm() <= max(3e-3, eps) * a.norm() + 1e-30
    )


def _masks(request: Any, module: nn.Module) -> tuple[Any, ...]:
    """The masks of a layer, from the function with which transformers would have made its mask."""
    if request is None:
        return (Causal(),) if getattr(module, "is_causal", False) else (Bidirectional(),)
    function, size = request
    if function is None:
        raise UserError(
            f"{type(module).__name__} makes a mask of its own: longitude can't patch it."
        )
    # which pairs it shows, at multiples of its size and beside them
    step = size or 8
    edges = {0, 1, *(m * step + d for m in (1, 2, 3) for d in (-1, 0, 1))}
    i, j = torch.tensor(sorted(e for e in edges if e >= 0))[:, None], torch.arange(3 * step + 3)
    zero = torch.tensor(0)
    theirs = torch.as_tensor(function(zero, zero, i, j[None])).expand(len(i), len(j)).cpu().bool()
    sizes = [] if size is None else [n for n in (size, size + 1, size // 2 + 1, size // 2) if n > 0]
    local = [(), *((one,) for n in sizes for one in (Window(n), Chunked(n)))]
    for masks in [(way, *more) for more in local for way in (Causal(), Bidirectional())]:
        if torch.equal(theirs, visible(meet(*(m.areas() for m in masks)), i, j[None])):
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
    """A forward for a rotary embedding that rotates nothing (cos 1, sin 0) and reports the
    positions and the batch size it was called with. `skip`: rotating by it is skipped, or noted to
    be exact, inside `rotations_skipped`."""
    forms: dict[Any, Any] = {}  # what makes the like of what calls gave: computing takes launches

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if on_positions is not None:
            on_positions(position_ids, x.shape[0])
        compiles, call = torch.compiler.is_compiling(), None
        if not compiles and not kwargs and all(type(each) is str for each in args):
            casts = torch.is_autocast_enabled(x.device.type)
            call = (x.shape, x.dtype, x.device, position_ids.shape, args, casts)
        if (both := forms.get(call)) is None:
            # at position 0: a large one may change dynamic frequencies for good
            out = type(rotary).forward(rotary, x, torch.zeros_like(position_ids), *args, **kwargs)
            if not isinstance(out, tuple):
                return torch.ones_like(out)
            both = [(y.shape, {"dtype": y.dtype, "device": y.device}) for y in out[:2]]
            if call is not None and len(forms) < 64:
                forms[call] = both
        cos, sin = (torch.full(size, n, **how) for n, (size, how) in zip((1, 0), both, strict=True))
        if not compiles:  # which fuses the products into what follows
            setattr(cos, IDENTITY, skip)
        return cos, sin

    return forward


def _modeling_file(module: nn.Module) -> dict[str, Any]:
    """The names that a module's forward reads."""
    return inspect.unwrap(type(module).forward).__globals__


# by dictionary and entry: its own value, then that of each patch in force
_entries: dict[tuple[int, str], list[Any]] = {}
_lock = Lock()


@contextmanager
def _entry(entries: dict[str, Any], name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An entry replaced for models that share it, whose patches come and go in any order."""
    with _lock:
        values = _entries.setdefault((id(entries), name), [entries.get(name)])
        entries[name] = mine = make(values[0])
        values.append(mine)
    try:
        yield
    finally:
        with _lock:
            values.remove(mine)
            entries[name] = values[-1]
            if len(values) == 1:
                del _entries[id(entries), name]


@contextmanager
def rotations_skipped(owner: nn.Module) -> Iterator[None]:
    """A module's modeling files return queries and keys as they are where an identity rotation says
    so: ten launches less in every layer."""
    files = {id(file): file for file in map(_modeling_file, owner.modules()) if ROTATE in file}
    with ExitStack() as stack:
        for number, file in files.items():
            stack.enter_context(_entry(file, ROTATE, partial(_skipping_rotation, file=number)))
        yield


def _skipping_rotation(rotate: Callable[..., Any], file: int) -> Callable[..., Any]:
    """A file's rotation, which returns what stands before a marked cosine: the queries and keys. A
    probe's mark has it compute them, and notes whether they are the same."""

    @wraps(rotate)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        marks: list[Any] = [getattr(x, IDENTITY, False) for x in args]
        at = next((n for n, mark in enumerate(marks) if mark is not False), None)
        if at is None:
            return rotate(*args, **kwargs)
        given, exact = args[:at], marks[at]
        if exact is True:
            return given if at > 1 else given[0]
        out = rotate(*args, **kwargs)
        both = [*zip((out,) if isinstance(out, Tensor) else out, given, strict=False)]
        same = len(both) == at and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in both)
        exact[file] = exact.get(file, True) and same
        return out

    return rotated


@contextmanager
def attention_implementation(name: str, module: nn.Module) -> Iterator[None]:
    """Have a module and those inside it call the attention function registered under a name."""
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    with ExitStack() as stack:
        for config in configs.values():  # which models made from one configuration share
            entry = _entry(vars(config), "_attn_implementation_internal", lambda _: name)
            stack.enter_context(entry)
        yield


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute replaced, and restored on exit."""
    attributes = vars(thing)
    before = [attributes[name]] if name in attributes else []
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        for each in before:
            attributes[name] = each
