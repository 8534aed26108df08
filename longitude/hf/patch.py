"""Any scheme on any checkpoint: `patched` for a with block, `apply` until `undo`, undone exactly.

Three mechanisms. If a scheme only changes frequencies, the rotary embedding gets new ones, and
transformers' own attention, caches and speed stay; they are computed in float32 in its order of
operations, so equal frequencies are equal bits. Otherwise the rotary embedding becomes the identity
and attention is ours (layer.py), with keys pre-RoPE in every cache. Models without rotary
embeddings are patched by their family (families/).

A checkpoint that was saved under a scheme (saving.py) was often trained under it, and has it as its
own: what a patch leaves out comes from that scheme, not from the configuration's rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from longitude.core.part import by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import as_scheme
from longitude.core.validate import UserError, short, shown
from longitude.hf import probe
from longitude.hf.families import family_of
from longitude.hf.layer import LAYER_STATE, LayerState, Uncopied, register
from longitude.hf.merge_scheme import as_layers, local_masks, merge_scheme
from longitude.hf.model_state import ModelState
from longitude.hf.ranks import Ranks
from longitude.parts import Rope
from longitude.parts.rotary_tables import attention_scaling

SchemeLike = str | Scheme | Layers
PATCH, SAVED = "_longitude_patch", "_longitude_saved"  # attributes of a model
WINDOW = ("max_position_embeddings", "max_seq_len", "seq_length")  # the last two: MPT, BLOOM
_MODELS: WeakSet[nn.Module] = WeakSet()  # models that are or were patched
_PROBED: WeakKeyDictionary[nn.Module, list[probe.ProbedLayer]] = WeakKeyDictionary()


@dataclass(eq=False)
class Patch(Uncopied):
    """What a model is patched with."""

    scheme: Scheme | Layers  # completed from the checkpoint's own
    text: str  # as the caller passed it
    length: int | None
    force: bool
    group: Any  # a process group, or None
    permanent: bool  # set by `apply`, not by a with block
    stack: ExitStack = field(default_factory=ExitStack)


def patch_of(model: nn.Module) -> Patch | None:
    """Return the patch that a model is under, or None."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"a model is a torch module, but got {shown(model)}: load it first, as in model, "
            f"tokenizer = longitude.hf.load({model if isinstance(model, str) else 'tiny-rope'!r})."
        )
    return vars(model).get(PATCH)


def applied(model: nn.Module) -> str | None:
    """Return the text of the scheme that `apply` was called with, or None."""
    patch = patch_of(model)
    return patch.text if patch is not None and patch.permanent else None


def saved_patch(model: nn.Module) -> Patch | None:
    """Return the scheme that a checkpoint was saved under, or None; later patches don't matter."""
    return vars(model).get(SAVED)


def scheme_of(model: nn.Module) -> Scheme | Layers:
    """Return the scheme that a model runs with: its patch's, or else the checkpoint's own."""
    patch = patch_of(model)
    return own_scheme(model) if patch is None else patch.scheme


def own_scheme(model: nn.Module) -> Scheme | Layers:
    """Return the checkpoint's own scheme, whatever the model is patched with."""
    saved = saved_patch(model)
    return configured_scheme(model) if saved is None else saved.scheme


def configured_scheme(model: nn.Module) -> Scheme | Layers:
    """Return the scheme of a model's configuration, without saved schemes and patches."""
    _check_alone(model)
    with unpatched(model):
        family = family_of(model)
        if family is not None:
            return family.scheme(model)
        return as_layers([layer.scheme for layer in probed_layers(model)])


@contextmanager
def patched(
    model: nn.Module,
    scheme: SchemeLike,
    *,
    length: int | None = None,
    force: bool = False,
    check: bool = True,
    group: Any = None,
) -> Iterator[nn.Module]:
    """Run a model under another scheme inside a with block.

    Args:
        scheme: a text or a value; what it leaves out is the checkpoint's own (merge_scheme.py).
        length: the total length for length-dependent frequencies. Without it a forward uses its own
            last position + 1, and `generate` the length that it may reach.
        force: accept a scheme that contradicts the checkpoint.
        check: raise if a scheme other than the checkpoint's own changes no logits.
        group: a process group that shares the tokens: each rank runs its own tokens at their
            position_ids, and `generate` spreads a prompt and its cache over the ranks itself.
    """
    with unpatched(model), _entered(model, scheme, length, force, check, group) as full:
        vars(model)[PATCH] = Patch(full, str(scheme), length, force, group, permanent=False)
        try:
            yield model
        finally:
            del vars(model)[PATCH]


def apply(
    model: nn.Module,
    scheme: SchemeLike,
    *,
    length: int | None = None,
    force: bool = False,
    group: Any = None,
    saved: bool = False,
) -> None:
    """Patch a model until `undo` or another `apply`. With `saved` the scheme counts as the
    checkpoint's own until it is undone itself."""
    _remove(model)
    stack = ExitStack()
    full = stack.enter_context(_entered(model, scheme, length, force, True, group))
    patch = Patch(full, str(scheme), length, force, group, permanent=True, stack=stack)
    vars(model).update({PATCH: patch, SAVED: patch} if saved else {PATCH: patch})


def undo(model: nn.Module) -> None:
    """Remove the patch of `apply`. The scheme that the checkpoint was saved under, if any, is then
    in force again; a second `undo` removes that."""
    patch, saved = _remove(model), saved_patch(model)
    if saved is not None and patch is saved:
        del vars(model)[SAVED]
    elif saved is not None:
        _restore(model, saved)


def _remove(model: nn.Module) -> Patch | None:
    """Restore the model that its configuration describes; return the patch, if there was one."""
    patch = patch_of(model)
    if patch is not None and not patch.permanent:
        raise UserError(
            f"the model is patched with {patch.text} inside a with block: leave the block first."
        )
    if patch is not None:
        patch.stack.close()
        del vars(model)[PATCH]
    return patch


def _restore(model: nn.Module, patch: Patch) -> None:
    patch.stack = ExitStack()
    args = (patch.text, patch.length, patch.force, False, patch.group)
    patch.stack.enter_context(_entered(model, *args))
    vars(model)[PATCH] = patch


@contextmanager
def unpatched(model: nn.Module) -> Iterator[nn.Module]:
    """Run the model as its configuration describes it, without patches, inside a with block."""
    patch = _remove(model)
    try:
        yield model
    finally:
        if patch is not None:
            _restore(model, patch)


def _check_alone(model: nn.Module) -> None:
    """Raise if another model that shares layers with this one is patched: a probe would measure
    that patch and report it as the checkpoint's own scheme."""
    for other, patch in [(m, patch_of(m)) for m in _MODELS if m is not model]:
        if patch is not None and not set(model.modules()).isdisjoint(other.modules()):
            raise UserError(
                f"{type(other).__name__}, whose layers this {type(model).__name__} shares, is "
                f"patched with {patch.text}: undo that first, or use that one."
            )


def trained_length(model: nn.Module) -> int | None:
    """Return the window that a checkpoint was trained for, if its configuration states it."""
    return window(model.config)


def window(config: Any) -> int | None:
    """Return the trained window that a configuration states.

    A scaling in the configuration was used in training, so it counts: Llama 3.1 has 131,072.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    name = "original_max_position_embeddings"
    stated = [getattr(config, key, None) for key in (*WINDOW, name)]
    return max((n for n in (*stated, parameters.get(name)) if isinstance(n, int)), default=None)


def probed_layers(model: nn.Module) -> list[probe.ProbedLayer]:
    """Return the model's attention modules with their own schemes; memoised per model."""
    if model not in _PROBED:
        owners = probe.rotary_owners(model) or probe.unrotated_owners(model)
        if not owners:
            raise UserError(
                f"{type(model).__name__} has neither rotary embeddings that longitude knows nor a "
                f"family of its own in longitude.hf.families: it can't be patched."
            )
        _PROBED[model] = probe.probe_layers(model, owners)
    return _PROBED[model]


@contextmanager
def _entered(
    model: nn.Module, scheme: SchemeLike, length: int | None, force: bool, check: bool, group: Any
) -> Iterator[Scheme | Layers]:
    """Patch the model inside a with block; yield the completed scheme."""
    wanted = as_scheme(scheme)
    _check_alone(model)
    _MODELS.add(model)
    family = family_of(model)
    if group is not None:
        check_over_ranks(model)
    if family is not None:
        with family.patch(model, wanted, force) as full:
            yield full
        return
    layers = probed_layers(model)
    saved = saved_patch(model)
    own = [saved.scheme.layer(n, len(layers)) for n in range(len(layers))] if saved else None
    own = own or [layer.scheme for layer in layers]
    rotates = any(wanted.layer(n, len(layers)).rotary for n in range(len(layers)))
    if rotates and not any(one.rotary for one in own) and not force:
        raise UserError(
            f"this checkpoint was trained without rotation, with {shown(own[0])}, but got "
            f"{shown(str(scheme))}: leave rope(…) out, or in Python say force=True."
        )
    schemes = merge_scheme(scheme, own, trained_length(model), force)
    local = () if isinstance(wanted, Layers) else local_masks(wanted)
    if not any(set(local) <= set(one.mask) for one in schemes):
        raise UserError(
            f"every layer of {type(model).__name__} keeps the mask it was trained with, "
            f"{' + '.join(map(str, schemes[0].mask))}, but got {shown(str(wanted))}: to replace "
            f"it, name the layers, layers({short(str(wanted), 60)})."
        )
    baseline = None
    if check and schemes != own:
        # with our attention: a stock forward may change dynamic frequencies permanently
        supported = not any(layer.unsupported_reason for layer in layers)
        with attention_patched(model, layers, own) if supported else nullcontext():
            baseline = _sample_logits(model)
    if group is None and only_frequencies(layers, schemes):
        patch = frequencies_replaced(layers, schemes)
    else:
        patch = attention_patched(model, layers, schemes, length)
    with patch as states, ExitStack() as stack:
        if baseline is not None and all(
            torch.allclose(a, b, atol=1e-6, rtol=1e-5)
            for a, b in zip(baseline, _sample_logits(model), strict=True)
        ):
            raise UserError(
                f"{shown(str(scheme))} changed no logit of {type(model).__name__}, near or far: it "
                f"would run as it was (pass check=False to allow this)."
            )
        if group is not None:
            stack.enter_context(over_ranks(model, group, states or []))
        yield as_layers(schemes, wanted)


@contextmanager
def attention_patched(
    model: nn.Module,
    layers: list[probe.ProbedLayer],
    schemes: list[Scheme],
    length: int | None = None,
) -> Iterator[list[ModelState]]:
    """Run our attention in every layer, with identity rotations."""
    for layer in layers:
        if layer.unsupported_reason:
            raise UserError(f"{layer.unsupported_reason}: only schemes of other frequencies run.")
    register()
    states = {layer.owner: ModelState(layer.owner, length) for layer in layers}
    with ExitStack() as stack:
        for owner, state in states.items():
            skips = all(layer.skips_rotation for layer in layers if layer.owner is owner)
            stack.enter_context(state.installed(model, skips))
        for module in model.modules():  # such as cross-attention, whose keys have no positions
            stack.enter_context(probe.replaced(module, LAYER_STATE, None))
        for probed, scheme in zip(layers, schemes, strict=True):
            state = states[probed.owner]
            layer = state.layers[probed.index] = LayerState(probed, scheme, state)
            stack.callback(setattr, layer, "active", False)
            stack.enter_context(probe.replaced(probed.module, LAYER_STATE, layer))
        yield list(states.values())


def check_over_ranks(model: Any) -> None:
    """Raise for models in which more than attention depends on the order of tokens."""
    if family_of(model) is not None:
        raise UserError(
            f"{type(model).__name__} adds positions at its input, which longitude runs in one "
            f"process only: leave group out."
        )
    layers = probed_layers(model)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", len(layers))
    if len(layers) != count or len({layer.owner for layer in layers}) > 1:
        raise UserError(
            f"{type(model).__name__} has layers that read tokens in order without attending to "
            f"them: over a group only models that attend in every layer run."
        )


@contextmanager
def over_ranks(model: nn.Module, group: Any, states: list[ModelState]) -> Iterator[None]:
    """Attend over all ranks of a group; the rest of a layer runs on each rank's own tokens."""
    schemes = as_layers([layer.scheme for state in states for layer in state.layers.values()])
    ranks = Ranks(group, model, str(schemes))
    for state in states:
        state.ranks = ranks
    generate: Any = getattr(model, "generate", None)  # wrapped to mark its forwards

    def noted(*args: Any, **kwargs: Any) -> Any:
        with ranks.full_prompts():
            return generate(*args, **kwargs)

    with probe.replaced(model, "generate", noted) if generate else nullcontext():
        yield


def only_frequencies(layers: list[probe.ProbedLayer], wanted: list[Scheme]) -> bool:
    """Whether schemes differ from the model's own only in frequencies that no length changes."""
    by_type: dict[tuple[Any, str | None], Rope] = {}
    changed = wanted != [layer.scheme for layer in layers]
    for layer, scheme in zip(layers, wanted, strict=True):
        own, rope, before = layer.scheme, scheme.rotary, layer.scheme.rotary
        if replace(scheme, rotary=before) != own or (rope is None) != (before is None):
            return False
        if rope is None or before is None:
            continue
        same = replace(rope, base=before.base, frequencies=before.frequencies)
        by_length = rope.frequencies.by_length or before.frequencies.by_length
        if same != before or by_length or by_rows(rope.frequencies):
            return False
        if changed and by_type.setdefault((layer.owner, layer.rope_type), rope) != rope:
            return False  # layers that share a rotary embedding would need two
    return not changed or all(len(layer.owner.rotaries) <= 1 for layer in layers)


@contextmanager
def frequencies_replaced(layers: list[probe.ProbedLayer], wanted: list[Scheme]) -> Iterator[None]:
    """Set the `inv_freq` and `attention_scaling` of these schemes in the rotary embeddings."""
    by_type = {
        (layer.owner.rotaries[0], layer.rope_type): scheme.rotary
        for layer, scheme in zip(layers, wanted, strict=True)
        if scheme.rotary is not None and scheme != layer.scheme
    }
    with ExitStack() as stack:
        for (rotary, rope_type), rope in by_type.items():
            prefix = f"{rope_type}_" if hasattr(rotary, f"{rope_type}_inv_freq") else ""
            name, scaling = f"{prefix}inv_freq", f"{prefix}attention_scaling"
            before = getattr(rotary, name)
            new = rope.frequencies.inv_freq(2 * before.numel(), rope.base, 1, dtype=torch.float32)
            stack.callback(rotary._buffers.update, {name: before})
            rotary._buffers[name] = new.to(before.device)
            if getattr(rotary, scaling, None) is not None:
                factor = attention_scaling(rope.frequencies, 1)
                stack.enter_context(probe.replaced(rotary, scaling, factor))
        yield


@torch.no_grad()
def _sample_logits(model: nn.Module) -> list[torch.Tensor]:
    """Return logits at positions 0 to 23, and at some spread up to twice the trained length."""
    far = 2 * (trained_length(model) or 4096)
    spread = torch.cat([torch.arange(8) + start for start in (0, far // 2 - 4, far - 8)])
    outputs = [probe.probe_forward(model, pos[None]) for pos in (torch.arange(24), spread)]
    return [(out.logits if hasattr(out, "logits") else out[0]).float().cpu() for out in outputs]
