"""Saves models and adapters with the scheme that was applied to them; `load` brings both back.

The weights are saved unchanged. The scheme is written into config.json, as text under the key
`longitude`. If it differs from the checkpoint's in frequencies only, and transformers has a name
for them, they are written into `rope_parameters` too, and stock transformers uses them. It ignores
any other scheme and reads the model as it was before.

An adapter's files are written by peft, with longitude.json beside them (peft.py). All files appear
atomically, config.json or adapter_config.json last: a folder that has it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from longitude import __version__
from longitude.core.store import atomic_checkpoint, read_json, write_json
from longitude.core.text import dump
from longitude.core.validate import UserError, short
from longitude.hf.device import quiet_transformers
from longitude.hf.families import family_of
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.patch import (
    configured_scheme,
    patch_of,
    probed_layers,
    saved_patch,
    scheme_of,
    unpatched,
)
from longitude.hf.peft import LONGITUDE_JSON, about_base
from longitude.hf.rope_config import rope_parameters, ropes, sections_of
from longitude.hf.source import SCHEME, find


def save(
    model: Any,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    target: int | None = None,
) -> None:
    """Write a model, its scheme and its tokenizer into a folder that `load` reads.

    A model that is patched inside `with patched(…)` is refused. `target` is the length it was
    trained for: if the window was raised to it, a factor no longer tells how far a scheme goes.
    """
    entry = written_scheme(model)
    parameters = None if entry is None else _as_rope_parameters(model)
    with _writing(model, folder, "a model", "transformers can't save this model") as part:
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        if entry is not None:
            entry |= {"target": target} if target else {}
            raw = read_json(part / "config.json")
            if parameters is not None:  # `load` restores the checkpoint's own first
                entry = entry | {"rope_parameters": raw["rope_parameters"]}
                raw["rope_parameters"] = parameters
            write_json(part / "config.json", {**raw, SCHEME: entry})


@contextmanager
def _writing(model: Any, folder: str | os.PathLike[str], what: str, failure: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` on success; unpatch the model meanwhile."""
    path = Path(folder).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but {what} is saved into a folder: give another name.")
    with atomic_checkpoint(path) as part, unpatched(model), quiet_transformers(bars=False):
        try:
            yield part
        except (ValueError, RuntimeError, TypeError) as error:
            reason = short(str(error), 160).rstrip(".")
            raise UserError(f"{failure} ({reason}): correct it first.") from error


def written_scheme(model: Any) -> dict[str, Any] | None:
    """Return the config.json entry for the scheme applied to a model, or None."""
    patch = patch_of(model)
    if patch is None or not patch.permanent:
        return None
    options = {"length": patch.length} if patch.length is not None else {}
    options |= {"force": True} if patch.force else {}
    text, saved = patch.text, saved_patch(model)
    if saved not in (None, patch) and family_of(model) is None:
        text, configured = dump(patch.scheme), [layer.scheme for layer in probed_layers(model)]
        completed = [patch.scheme.layer(n, len(configured)) for n in range(len(configured))]
        if merge_scheme(text, configured, None, force=True) != completed:  # as `load` completes it
            raise UserError(
                f"{text} can't be saved on top of {saved.text}, which the checkpoint was saved "
                f"under: undo one of the two first."
            )
    return {"scheme": text, "version": __version__, **options}


def _as_rope_parameters(model: Any) -> dict[str, Any] | None:
    """Return the scheme as `rope_parameters`, if they express all changes to the checkpoint's."""
    config, own, new = model.config, configured_scheme(model), scheme_of(model)
    if any(len(set(scheme.schemes)) > 1 for scheme in (own, new)):
        return None
    before, after = own.layer(0), new.layer(0)
    old, rope = before.rotary, after.rotary
    if getattr(config, "rope_parameters", None) is None or old is None or rope is None:
        return None
    layout = (rope.pairs, rope.fraction) == (old.pairs, old.fraction)
    if not layout or replace(after, rotary=old) != before:
        return None
    try:
        sections = sections_of({"rope_parameters": config.rope_parameters})
        parameters = sections | rope_parameters(rope)
        # read back as `load` will: lengths may be elsewhere, and a class may accept one type only
        with quiet_transformers(bars=False):
            trial = type(config).from_dict({**config.to_dict(), "rope_parameters": parameters})
        read = ropes(trial).get(None)
    except Exception:  # of many types: each class validates its own entries
        return None
    return parameters if read and replace(read, pairs=rope.pairs) == rope else None


def save_adapter(
    model: Any,
    folder: str | os.PathLike[str],
    base: str,
    *,
    revision: str | None = None,
    target: int | None = None,
    grown: tuple[str, int] | None = None,
) -> None:
    """Write a peft model's adapter into a folder that `load` reads.

    Args:
        model: what `peft.get_peft_model` returned; its base may be patched by `apply`.
        base: the base as passed to `load`: a name on the Hub, a folder or a file.
        revision: the base's revision on the Hub.
        target: the length that it was trained for.
        grown: the scheme and length by which the base's position table was resized
            (`families.learned.resize_positions`) before the adapter was added.
    """
    inner, path = model.get_base_model(), Path(base).expanduser()
    local = find(base, None).folder is not None and path.exists()
    name = str(path.resolve()) if local else base  # an absolute path is valid from any folder
    entry = written_scheme(inner) or {"version": __version__}
    entry |= {"base": about_base(model, name, revision)}
    entry |= {"target": target} if target else {}
    entry |= {"grown": {"scheme": grown[0], "length": grown[1]}} if grown else {}
    with _writing(inner, folder, "an adapter", "peft can't save this adapter") as part:
        model.save_pretrained(part, save_embedding_layers=False)
        text = json.dumps(entry, indent=2, allow_nan=False) + "\n"
        (part / LONGITUDE_JSON).write_text(text, encoding="utf-8")
