"""The state of a patched model: its layers' schemes and what the layers of one forward share.

While patched, the rotary embedding rotates nothing and only reports the positions it is called
with, so keys enter attention and every cache pre-RoPE. The hooks here open a `ForwardState` for
each forward of the module that owns the rotary embedding; it lasts from the start of the forward to
its end.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longitude.core.part import Pos, as_tensor
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.layer import (
    LAYER_STATE,
    NAME,
    LayerState,
    TokenRun,
    Uncopied,
    all_but_last,
    as_range,
    padding_of,
    token_runs,
    tokens_of,
)
from longitude.hf.probe import (
    RotaryOwner,
    attention_implementation,
    identity_rotation,
    replaced,
    rotations_skipped,
)
from longitude.ops import axes
from longitude.parts.axes import by_axis

if TYPE_CHECKING:
    from longitude.hf.ranks import Ranks

# a layer's attribute under gradient checkpointing (Chen et al. 2016, arXiv:1604.06174)
CHECKPOINT = "_gradient_checkpointing_func"


@dataclass
class ForwardState:
    """What the layers of one forward share."""

    pos: Pos = range(0)  # of the new tokens
    past: int = 0  # tokens in the cache before this forward
    runs: list[TokenRun] | None = None  # None: every row is the range `pos`
    unseen: Tensor | None = None  # packed tokens (b n) that no later token attends to
    length: int | Tensor | None = None  # the total length for length-dependent frequencies
    padding: Tensor | None = None  # (b, past + tokens), True where a token is padding
    padded: Tensor | None = None  # over a group: `padding` of all ranks' tokens
    cache: Any = None
    position_ids: Tensor | None = None  # the argument of the rotary embedding's call
    group: Any = None  # the process group that runs this forward
    sharded: bool = False  # over a group: whether each rank has tokens of its own
    columns: int = 0  # over a group: the tokens of all ranks
    kept: Tensor | None = None  # which of the new tokens this rank caches; None: all
    left: Tensor | None = None  # (3, b, n): M-RoPE's three positions, each minus `pos`

    @property
    def new_padding(self) -> Tensor | None:
        """Which of the new tokens (b n) are padding."""
        n = len(self.pos) if isinstance(self.pos, range) else self.pos.shape[1]
        return None if self.padding is None else self.padding[:, -n:]

    def reached(self, rows: int) -> int | Tensor:
        """Return the last position + 1 of each row."""
        if isinstance(self.pos, range):
            return self.pos[-1] + 1
        pos, padding = self.pos.expand(rows, -1), self.new_padding
        return (pos if padding is None else pos.masked_fill(padding, -1)).amax(1) + 1


class ModelState(Uncopied):
    """The patch of one module that owns rotary embeddings, and its forwards in progress."""

    def __init__(self, owner: RotaryOwner, length: int | None) -> None:
        self.owner = owner
        self.layers: dict[int, LayerState] = {}
        self._forwards: dict[int, ForwardState] = defaultdict(ForwardState)  # by thread
        self.ranks: Ranks | None = None
        self._length = length  # the total length passed to the patch, if any
        # how far `generate` will go, and the padding of its prompt (b n), by thread
        self._generating: dict[int, tuple[int, Tensor | None] | None] = {}
        self._parameters = tuple(inspect.signature(owner.module.forward).parameters)
        self._axes: tuple[int, ...] | None = None  # of M-RoPE; set by the first input with an image
        self._recomputed = ExitStack()  # closed after each forward under gradient checkpointing
        self.pos: range | None = None  # of the next forward, if known without reading device memory

    @property
    def forward(self) -> ForwardState:
        """The forward in progress in this thread."""
        return self._forwards[get_ident()]

    @forward.setter
    def forward(self, forward: ForwardState) -> None:
        self._forwards[get_ident()] = forward

    @cached_property
    def _by_length(self) -> list[tuple[int, LayerState]]:
        """The layers whose frequencies depend on the total length; every token reads this."""
        items = [(index, layer, layer.scheme.rotary) for index, layer in self.layers.items()]
        return [(i, layer) for i, layer, rope in items if rope and rope.frequencies.by_length]

    @contextmanager
    def installed(self, model: nn.Module, skips: bool) -> Iterator[None]:
        """Install identity rotations, our attention and this state's hooks in the owner. With
        `skips` the identity rotations are not computed at all."""
        module = self.owner.module
        with ExitStack() as stack:
            for rotary in self.owner.rotaries:
                identity = identity_rotation(rotary, self._on_positions, skips)
                stack.enter_context(replaced(rotary, "forward", identity))
            if skips:
                stack.enter_context(rotations_skipped(module))
            hooks = [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            for each in model.modules():  # the model, also inside an adapter
                if hasattr(type(each), "_prepare_cache_for_generation"):
                    for name, method in self._noting_length(each).items():
                        stack.enter_context(replaced(each, name, method))
            stack.enter_context(attention_implementation(NAME, module))
            yield

    def _noting_length(self, model: Any) -> dict[str, Any]:
        """Return replacements for methods of `generate`, which record the total length that it
        computes before it opens a cache."""
        prepare, generate = model._prepare_cache_for_generation, model.generate

        def prepared(settings: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            cache, mask = given.get("past_key_values"), given.get("attention_mask")
            mask = None if model.config.is_encoder_decoder else mask  # it is the encoder's
            length = 1 + int(kwargs["max_cache_length"] if kwargs else args[-1])
            columns = getattr(settings, "_mask_length", None) if mask is None else mask.shape[1]
            if settings.max_new_tokens is not None and columns is not None:
                length = columns + settings.max_new_tokens  # the ids may be only the new ones
            # an assistant model (speculative decoding) keeps the length of its first call
            continues = cache is not None and settings.is_assistant
            self._generating[get_ident()] = None if continues else (length, padding_of(mask))
            return prepare(settings, given, *args, **kwargs)

        @wraps(generate)
        def generated(*args: Any, **kwargs: Any) -> Any:
            outer = self._generating.get(get_ident())  # set by an outer generate()
            try:
                return generate(*args, **kwargs)
            finally:
                self._generating[get_ident()] = outer

        return {"_prepare_cache_for_generation": prepared, "generate": generated}

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-forward hook: read the padding, and adapt an empty cache or open one."""
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        self.forward = ForwardState(padding=padding_of(given.get("attention_mask")))
        current = getattr(module.config, "_attn_implementation", NAME)
        if current != NAME:
            raise UserError(
                f"the model's attention became {current} while it was patched, and would see no "
                f"positions: set it before the patch."
            )
        if self._checkpoints:
            self._keep_for_recomputation()
        cache = given.get("past_key_values")
        if cache is None and "past_key_values" in self._parameters and self._opens_cache(given):
            from transformers import DynamicCache

            cache = DynamicCache(config=self.owner.module.config)  # type: ignore[arg-type]
            args, kwargs = (), {**given, "past_key_values": cache}
        if cache is not None:
            from longitude.hf.cache_adapter import adapt

            first = min(self.layers)
            self.forward.cache = kv = getattr(cache, "self_attention_cache", cache)  # a decoder's
            self.forward.past = past = int(kv.get_seq_length(first))
            if past == 0:
                adapt(kv, self.layers)
            elif self.store(first) is None and self._held() is None:
                raise UserError(
                    f"the cache holds {past} tokens whose keys this patch never saw: open a new "
                    f"cache inside it."
                )
        self._check_mask(given)
        self.forward.padded = self.forward.padding
        if self.ranks is not None:
            ours = cache is not None and self._ours(min(self.layers)) is not None
            given = self.ranks.share({**given, **kwargs}, self.forward, ours)
            self.forward.padding, args, kwargs = padding_of(given.get("attention_mask")), (), given
        if not self.owner.rotaries:
            tokens = tokens_of(given)
            ids, past = given.get("position_ids"), self.forward.past
            if ids is None:
                ids = torch.arange(past, past + tokens.shape[1], device=tokens.device)
            self._on_positions(ids, tokens.shape[0])
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Forward hook, even after an error: note positions for a cache that the model created."""
        self._recomputed.close()
        prompt = self.ranks is not None and self.ranks.generating and self.forward.sharded
        created = getattr(out, "past_key_values", None)
        if created is not None and self.forward.cache is None:
            self._hold(created)
        self._forwards.pop(get_ident(), None)
        return self.ranks.last_token(out) if self.ranks and prompt and out is not None else out

    def _check_mask(self, given: dict[str, Any]) -> None:
        """Raise if the mask covers other tokens, or if attention weights are requested."""
        padding, new = self.forward.padding, tokens_of(given).shape[1]
        total = self.forward.past + new
        columns = total if padding is None or self.ranks is not None else padding.shape[1]
        # our own cache knows the padding of its tokens
        if columns != total and (columns != new or self._ours(min(self.layers)) is None):
            raise UserError(
                f"the attention mask has {columns} columns for {total} tokens: give it one for "
                f"each token, those of the cache too."
            )
        if given.get("output_attentions"):
            raise UserError(
                "a patched model has no attention weights to return, since its kernels keep none: "
                "leave output_attentions out."
            )

    @property
    def _checkpoints(self) -> bool:
        """Whether gradient checkpointing reruns layers in the backward pass."""
        module = self.owner.module
        return module.training and bool(getattr(module, "gradient_checkpointing", False))

    def _keep_for_recomputation(self) -> None:
        for layer in self.owner.module.modules():
            if (checkpoint := vars(layer).get(CHECKPOINT)) is not None:
                ours = partial(self._checkpointed, checkpoint)
                self._recomputed.enter_context(replaced(layer, CHECKPOINT, ours))

    def _checkpointed(self, checkpoint: Any, run: Any, *args: Any) -> Any:
        """Checkpoint a layer so that its rerun uses the state of its original forward."""
        return checkpoint(partial(self._within, self.forward, run), *args)

    def _within(self, forward: ForwardState, run: Any, *args: Any) -> Any:
        with forward_state(self, forward):
            return run(*args)

    def _opens_cache(self, given: dict[str, Any]) -> bool:
        module: Any = self.owner.module
        use = given.get("use_cache")
        use = getattr(module.config, "use_cache", False) if use is None else use
        ours = all(each.scheme.causal and each.probed.plain_cache for each in self.layers.values())
        spread = self.ranks is None or self.ranks.generating
        return bool(use) and not self._checkpoints and ours and spread

    def _on_positions(self, ids: Tensor, rows: int) -> None:
        """Take the forward's positions from the call of the rotary embedding."""
        forward = self.forward
        if forward.position_ids is ids:
            return
        forward.position_ids = ids
        if ids.dim() == 3 and not bool((ids == ids[:1]).all()):
            ids, one_range = self._of_images(ids), None
        else:
            ids = torch.atleast_2d(ids[0] if ids.dim() == 3 else ids)
            one_range = as_range(ids) if self.pos is None else self.pos
        forward.pos = ids if one_range is None else one_range
        new = forward.new_padding
        if forward.past == 0 and not forward.sharded and (one_range is None or new is not None):
            forward.runs = token_runs(ids.expand(rows, -1), new)
            forward.unseen = all_but_last(forward.runs, ids.expand(rows, -1))
        forward.length = self._total_length(rows)
        if forward.past and forward.length is not None:
            self._check_length(forward.length)
        if forward.cache is None or self._ours(min(self.layers)) is not None:
            return
        # this cache can't hold positions itself: they are stored beside it
        held = self._held() if forward.past else None
        if held is None:
            self._hold(forward.cache)
            return
        before, new, forward.length = held.pos, forward.pos, held.length
        before = before[: forward.past] if isinstance(before, range) else before[:, : forward.past]
        if isinstance(before, range) and isinstance(new, range) and before.stop == new.start:
            held.pos = range(before.start, new.stop)
        else:
            both = [self._as_rows(pos).expand(rows, -1) for pos in (before, new)]
            held.pos = torch.cat(both, 1)

    def _total_length(self, rows: int) -> int | Tensor | None:
        """The length of the patch, or that `generate` may reach (per row if rows are padded)."""
        generating = self._generating.get(get_ident())
        if self._length is not None or generating is None:
            return self._length
        (length, prompt), padding = generating, self.forward.padded
        # the mask of a prompt's chunk has the padding of that chunk only
        if prompt is not None and (padding is None or padding.shape[1] < prompt.shape[1]):
            padding = prompt
        return length if padding is None else length - padding.sum(1).expand(rows)

    def _check_length(self, length: int | Tensor) -> None:
        """Raise if the cache was opened for a shorter total length with other frequencies."""
        for index, layer in self._by_length:
            store = self.store(index)
            held = getattr(self._held() if store is None else store, "length", None)
            if held is None:
                continue
            both = torch.broadcast_tensors(*map(torch.as_tensor, (held, length)))
            for before, now in set(zip(*(x.flatten().tolist() for x in both), strict=True)):
                if before < now and not layer.alike(before, now):
                    raise UserError(
                        f"{shown(layer.scheme)} depends on the total length, and this cache was "
                        f"opened for {before} tokens, but may now reach {now}: open a new one, or "
                        f"give the length of all turns, patched(model, scheme, length=…)."
                    )
            return

    def _of_images(self, ids: Tensor) -> Tensor:
        """Return one position per token of an input with images; `forward.left` gets the rest."""
        forward, first = self.forward, min(self.layers)
        if self.ranks is not None:
            raise UserError("over a group a model reads text only: leave images out.")
        for layer in self.layers.values():
            axes.check(layer.scheme)
        if forward.cache is not None and not self._ours(first):
            raise UserError("images need a cache that keeps positions: use a dynamic cache.")
        store = self.store(first)
        last = self._as_rows(store.positions)[:, -1:] if store is not None and len(store) else None
        padding = None if forward.padding is None else forward.padding[:, -ids.shape[2] :]
        pos = axes.temporal_order(ids, padding, last)
        forward.left = ids.double() - pos
        return pos

    def rotated_left(self, x: Tensor, layer: LayerState) -> Tensor:
        """Rotate new tokens' queries or keys by what their one position leaves out (M-RoPE)."""
        rope, left = layer.scheme.rotary, self.forward.left
        if left is None or rope is None:
            return x
        dim = layer.probed.rotary_dim
        if self._axes is None:
            self._axes = axes_of(self.owner.rotaries[0], dim // 2)
        # by (p - u) θ_i: p is the pair's own position, u the token's one position
        theta = rope.frequencies.inv_freq(dim, rope.base, 1)
        return axes.rotate(x, left, by_axis(self._axes, 3, theta), rope.pairs)

    def _as_rows(self, pos: Pos) -> Tensor:
        return torch.atleast_2d(as_tensor(pos, next(self.owner.module.parameters()).device))

    def _ours(self, layer: int) -> Any:
        """Return our layer of the forward's cache, or None if it has another kind of layer."""
        layers = () if self.forward.cache is None else self.forward.cache.layers
        entry = layers[layer] if layer < len(layers) else None
        return entry if isinstance(getattr(entry, "layer", None), LayerState) else None

    def _hold(self, cache: Any) -> None:
        from longitude.hf.cache_adapter import hold

        hold(cache, self, self.forward.pos, self.forward.length)

    def _held(self) -> Any:
        """Return the `Held` of this patch on the forward's cache (of another kind), or None."""
        held = getattr(self.forward.cache, LAYER_STATE, None)
        return held if held is not None and held.model is self else None

    def store(self, layer: int) -> Any:
        """Return our store of a layer, or None if the forward's cache has another kind of layer."""
        entry = self._ours(layer)
        return None if entry is None else entry.store

    def cached_keys(self, slots: int, scheme: Scheme) -> tuple[slice, Pos, Tensor | None]:
        """For the slots that a transformers cache returns: the slice in use, the positions of its
        keys, and which of them are padding."""
        pos, padding = self._held().pos, self.forward.padding
        total = len(pos) if isinstance(pos, range) else pos.shape[1]
        used = min(slots, total)  # a static cache has empty slots, a sliding one the last tokens
        first = total - used
        is_range = isinstance(pos, range)
        evicted, pos = (pos[:first], pos[first:]) if is_range else pos.tensor_split([first], 1)
        if first:
            q_pos, k_pos = self._as_rows(self.forward.pos), self._as_rows(evicted)
            if visible(scheme.areas(), q_pos[:, :, None], k_pos[:, None]).any():
                raise UserError(
                    f"this cache keeps the last {used} of {total} tokens, but {shown(scheme)} sees "
                    f"further back: use a dynamic cache."
                )
        return slice(used), pos, None if padding is None else padding[:, first:total]


@contextmanager
def forward_state(state: ModelState, forward: ForwardState) -> Iterator[None]:
    """Replace a model's forward state inside a with block."""
    before, state.forward = state.forward, forward
    try:
        yield
    finally:
        state.forward = before


def axes_of(rotary: nn.Module, pairs: int) -> tuple[int, ...]:
    """Return which of M-RoPE's three positions each pair rotates by, measured on the model: the
    checkpoint's scheme names no axes, since in a text the three are equal."""
    x, per_axis = torch.zeros(1, 1, 1, device=next(rotary.buffers()).device), []
    for axis in range(3):
        ids = torch.zeros(3, 1, 1, dtype=torch.long, device=x.device)
        ids[axis] = 1
        sin: Tensor = type(rotary).forward(rotary, x, ids)[1].flatten()  # type: ignore[operator]
        halves = sin.view(2, -1) if len(sin) == 2 * pairs else sin[None]
        twice = halves if torch.equal(halves[0], halves[-1]) else sin.view(-1, 2).mT
        per_axis.append(twice.ne(0))
    rotates = torch.stack(per_axis)  # (3, 2|1, pairs)
    one_axis = rotates.shape[-1] == pairs and bool((rotates.sum(0) == 1).all())
    if not one_axis or not bool((rotates == rotates[:, :1]).all()):
        raise UserError(
            f"{type(rotary).__name__} does not rotate each pair by one position of its three: it "
            f"reads text only while patched."
        )
    return tuple(rotates[:, 0].int().argmax(0).tolist())
