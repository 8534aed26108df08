"""Any scheme on any checkpoint: `patched` for a while, `apply` for good, undone exactly.

Two ways. Where a scheme only changes frequencies, the rotary embedding gets others and everything
else stays transformers' own. Otherwise the rotary embedding turns nothing and attention is ours
(seat.py), with keys unturned in every cache. Models without rotary embeddings have a small file
each in families/.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.frequency_patch import frequencies_replaced, only_frequencies
from longitude.hf.layer import LAYER_STATE, NAME, LayerState, register
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.model_state import ModelState, identity_rotation, model_states
from longitude.hf.probe import (
    ProbedLayer,
    attention_implementation,
    forward,
    probe_layers,
    replaced,
)

SchemeLike = str | Scheme | Layers
PATCH = "_longitude_patch"
WINDOW = ("max_position_embeddings", "max_seq_len", "seq_length")  # the last two MPT's and BLOOM's
_LOOKS: WeakKeyDictionary[nn.Module, list[ProbedLayer]] = WeakKeyDictionary()


def scheme_of(model: nn.Module) -> Scheme | Layers:
    """The scheme a model runs with: a patch's, or else the checkpoint's own."""
    if PATCH in vars(model):
        return vars(model)[PATCH].scheme
    return own_scheme(model)


def own_scheme(model: nn.Module) -> Scheme | Layers:
    """The scheme of the checkpoint, whatever it is patched with."""
    with unpatched(model):
        family = _family(model)
        return family.scheme(model) if family else together([s.scheme for s in _seen(model)])


@contextmanager
def patched(
    model: nn.Module,
    scheme: SchemeLike,
    *,
    length: int | None = None,
    force: bool = False,
    check: bool = True,
) -> Iterator[nn.Module]:
    """A model under another scheme, for as long as the context lasts.

    Args:
        scheme: a text or a value; what it leaves out is the checkpoint's own (see inherit.py).
        length: what length-dependent frequencies take for the total length. Without it a forward
            takes its own last position + 1, and `generate` what it may reach.
        force: also where the scheme contradicts the checkpoint.
        check: look whether the logits changed, where they should have.
    """
    with unpatched(model), _entered(model, scheme, length, force, check) as full:
        vars(model)[PATCH] = _Patch(full, str(scheme), length, force, for_good=False)
        try:
            yield model
        finally:
            del vars(model)[PATCH]


def apply(
    model: nn.Module, scheme: SchemeLike, *, length: int | None = None, force: bool = False
) -> None:
    """Patch a model for good: until `undo`, or another `apply`."""
    undo(model)
    stack = ExitStack()
    full = stack.enter_context(_entered(model, scheme, length, force, True))
    patch = _Patch(full, str(scheme), length, force, for_good=True)
    patch.stack = stack.pop_all()
    vars(model)[PATCH] = patch


def undo(model: nn.Module) -> None:
    """Take off what `apply` put on."""
    patch = vars(model).get(PATCH)
    if patch is None:
        return
    if not patch.for_good:
        raise UserError(
            f"the model is patched with {patch.text} inside a with block: leave the block first."
        )
    patch.stack.close()
    del vars(model)[PATCH]


def applied(model: nn.Module) -> str | None:
    """The text that `apply` was given, or None."""
    patch = vars(model).get(PATCH)
    return patch.text if patch is not None and patch.for_good else None


@contextmanager
def unpatched(model: nn.Module) -> Iterator[nn.Module]:
    """The model as its checkpoint has it, for as long as the context lasts."""
    patch = vars(model).pop(PATCH, None)
    if patch is None:
        yield model
        return
    if not patch.for_good:
        vars(model)[PATCH] = patch
        raise UserError(
            f"the model is patched with {patch.text} inside a with block: leave the block first."
        )
    patch.stack.close()
    try:
        yield model
    finally:
        stack = ExitStack()
        stack.enter_context(_entered(model, patch.text, patch.length, patch.force, False))
        patch.stack = stack
        vars(model)[PATCH] = patch


class _Patch:
    """What a model is patched with."""

    def __init__(
        self, scheme: Scheme | Layers, text: str, length: int | None, force: bool, for_good: bool
    ) -> None:
        self.scheme, self.text, self.length, self.force = scheme, text, length, force
        self.for_good = for_good
        self.stack = ExitStack()

    def __deepcopy__(self, memo: Any) -> Any:
        raise UserError(
            f"a copy of a patched model would share the patch {self.text}: copy it first and patch "
            f"the copy."
        )


def together(schemes: list[Scheme]) -> Scheme | Layers:
    """One scheme where all layers have the same."""
    return schemes[0] if len(set(schemes)) == 1 else Layers(tuple(schemes))


def trained_length(model: nn.Module) -> int | None:
    """The window a checkpoint was trained to, as far as its configuration says."""
    return window(model.config)


def window(config: Any) -> int | None:
    """The window that a configuration says.

    A scaling that came with the checkpoint was trained with, and counts: Llama 3.1 reads 131,072.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    name = "original_max_position_embeddings"
    told = [getattr(config, key, None) for key in (*WINDOW, name)]
    return max((n for n in (*told, parameters.get(name)) if isinstance(n, int)), default=None)


def _family(model: nn.Module) -> Any:
    from longitude.hf.families import family_of

    return family_of(model)


def _seen(model: nn.Module) -> list[ProbedLayer]:
    if model not in _LOOKS:
        found = model_states(model)
        if not found:
            raise UserError(
                f"{type(model).__name__} has neither rotary embeddings that longitude knows nor a "
                f"family of its own in longitude.hf.families: it can't be patched."
            )
        _LOOKS[model] = probe_layers(model, found)
    return _LOOKS[model]


@contextmanager
def _entered(
    model: nn.Module, scheme: SchemeLike, length: int | None, force: bool, check: bool
) -> Iterator[Scheme | Layers]:
    family = _family(model)
    if family is not None:
        asked = parse(scheme) if isinstance(scheme, str) else scheme
        with family.patch(model, asked, force) as full:
            yield full
        return
    seen = _seen(model)
    own = [s.scheme for s in seen]
    wanted = merge_scheme(scheme, own, trained_length(model), force)
    way = _frequencies if only_frequencies(seen, wanted) else _attention
    before = _sample(model, seen, own) if check and wanted != own else None
    with way(model, seen, wanted, length):
        if before is not None:
            _check_changed(model, before, scheme)
        yield together(wanted)


@contextmanager
def _frequencies(
    model: nn.Module, seen: list[ProbedLayer], wanted: list[Scheme], length: int | None
) -> Iterator[None]:
    with frequencies_replaced(seen, wanted):
        yield


@contextmanager
def _attention(
    model: nn.Module, seen: list[ProbedLayer], wanted: list[Scheme], length: int | None
) -> Iterator[None]:
    """Our attention in every seat, the rotary embeddings standing still."""
    for one in seen:
        if one.odd:
            raise UserError(f"{one.odd}: only schemes of other frequencies run on it.")
    register()
    with ExitStack() as stack:
        for trunk in dict.fromkeys(one.trunk for one in seen):
            trunk.seats, trunk.asked, trunk.reach = {}, length, None
            stack.enter_context(_hooked(model, trunk))
        for one, scheme in zip(seen, wanted, strict=True):
            seat = LayerState(one.trunk, one.layer, scheme, one.before, one.width, one.kept)
            one.trunk.seats[one.layer] = seat
            stack.callback(setattr, seat, "active", False)
            stack.enter_context(replaced(one.module, LAYER_STATE, seat))
        yield


@contextmanager
def _hooked(model: nn.Module, trunk: ModelState) -> Iterator[None]:
    with ExitStack() as stack:
        for rotary in trunk.rotaries:
            stack.enter_context(replaced(rotary, "forward", identity_rotation(rotary, trunk)))
        hooks = [
            trunk.module.register_forward_pre_hook(trunk.enter, with_kwargs=True),
            trunk.module.register_forward_hook(trunk.leave, with_kwargs=True, always_call=True),
        ]
        for hook in hooks:
            stack.callback(hook.remove)
        if hasattr(model, "_prepare_generated_length"):
            stack.enter_context(replaced(model, "_prepare_generated_length", _told(model, trunk)))
        stack.enter_context(attention_implementation(NAME, trunk))
        yield


def _told(model: Any, trunk: ModelState) -> Any:
    """`generate` works its length out here: the only place that knows it before a cache opens."""
    stock = model._prepare_generated_length

    def prepared(*args: Any, **kwargs: Any) -> Any:
        settings = stock(*args, **kwargs)
        trunk.reach = int(settings.max_length)
        return settings

    return prepared


@torch.no_grad()
def _sample(model: nn.Module, seen: list[ProbedLayer], own: list[Scheme]) -> list[torch.Tensor]:
    """Logits of two short texts, one at near and one at far positions, under the own scheme."""
    if any(s.odd for s in seen):
        return _said(model)
    with _attention(model, seen, own, None):  # stock, but nothing that a forward could change
        return _said(model)


def _said(model: nn.Module) -> list[torch.Tensor]:
    far = 2 * (trained_length(model) or 4096)
    near = torch.arange(24)
    ends = [torch.arange(8) + place for place in (0, far // 2 - 4, far - 8)]
    return [_logits(model, pos[None]) for pos in (near, torch.cat(ends))]


def _logits(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = forward(model, positions)
    return (out.logits if hasattr(out, "logits") else out[0]).float().cpu()


def _check_changed(model: nn.Module, before: list[torch.Tensor], scheme: SchemeLike) -> None:
    """Raise where a scheme that differs from the checkpoint's changed nothing."""
    if all(
        torch.allclose(a, b, atol=1e-6, rtol=1e-5)
        for a, b in zip(before, _said(model), strict=True)
    ):
        raise UserError(
            f"{shown(str(scheme))} changed no logit of {type(model).__name__}, near or far: it "
            f"would run as it was (check=False to take it so)."
        )
