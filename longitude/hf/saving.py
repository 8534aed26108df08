"""A model written down with the scheme that was applied to it, so that `load` brings both back.

The weights are the checkpoint's own, untouched; the scheme stands in config.json, as its text under
the key `longitude`. Where it differs from the checkpoint's in frequencies alone, and transformers
has a name for them, they are written into `rope_parameters` too, and stock transformers turns by
them; by any other scheme it goes not at all, and reads the model as it was before.

An adapter written down with the scheme that was applied to its model; `load` brings both back.

The files are peft's own, and beside them longitude.json (loading/adapter.py), since peft has no
place for a rotation. They appear whole, adapter_config.json last: a folder that has it has all.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from longitude import __version__
from longitude.core.atomic_io import atomic_checkpoint, atomic_file
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, short
from longitude.hf.device import quiet_transformers
from longitude.hf.patch import unpatched
from longitude.hf.peft import LONGITUDE_JSON, about_base
from longitude.hf.rope_config import rope_parameters, ropes
from longitude.hf.source import find


def save(model: Any, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write a model, its scheme and its tokenizer into a folder that `load` reads.

    A model that is patched for a while only, inside `with patched(…)`, is refused. Files appear
    whole and config.json last: a folder that has it has everything.
    """
    path = Path(folder).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but a model is saved into a folder: give another name.")
    with atomic_checkpoint(path) as part:
        _write(model, part, tokenizer)


def _write(model: Any, part: Path, tokenizer: Any) -> None:
    from longitude.hf.patch import unpatched

    entry, parameters = written_scheme(model), None
    if entry is not None:
        parameters = _named(model)
    with unpatched(model), quiet_transformers(bars=False):
        try:
            model.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
        except (ValueError, RuntimeError, TypeError) as error:
            said = short(str(error), 160).rstrip(".")
            raise UserError(
                f"transformers can't save this model ({said}): mend it first."
            ) from error
    if entry is not None:
        _amend(part / "config.json", entry, parameters)


def written_scheme(model: Any) -> dict[str, Any] | None:
    """What was applied to a model for good, as it is written down."""
    from longitude.hf.patch import patch_of

    patch = patch_of(model)
    if patch is None or not patch.permanent:
        return None
    given = {"length": patch.length} if patch.length is not None else {}
    given |= {"force": True} if patch.force else {}
    return {"scheme": patch.text, "version": __version__, **given}


def _named(model: Any) -> dict[str, Any] | None:
    """The scheme as `rope_parameters`, if that says all that differs from the checkpoint's own."""
    from longitude.hf.patch import own_scheme, scheme_of

    config, own, new = model.config, own_scheme(model), scheme_of(model)
    if not (_alike(own) and _alike(new)) or getattr(config, "rope_parameters", None) is None:
        return None
    before, after = own.layer(0), new.layer(0)
    was, now = before.rotary, after.rotary
    if was is None or now is None or replace(after, rotary=was) != before:
        return None
    if (now.pairs, now.fraction) != (was.pairs, was.fraction):
        return None
    try:
        parameters = rope_parameters(now)
        trial = copy.deepcopy(config)
        trial.rope_parameters = parameters
        read = ropes(trial)  # a length may be taken from elsewhere in the configuration
    except UserError:
        return None
    rope = read.get(None)  # how pairs lie is the model's own, and not read
    return parameters if rope and replace(rope, pairs=now.pairs) == now else None


def _alike(scheme: Scheme | Layers) -> bool:
    return all(scheme.layer(i) == scheme.layer(0) for i in range(len(scheme)))


def _amend(file: Path, entry: dict[str, Any], parameters: dict[str, Any] | None) -> None:
    raw = json.loads(file.read_text(encoding="utf-8"))
    if parameters is not None:  # `load` goes back to the checkpoint's own before it applies
        entry = entry | {"rope_parameters": raw["rope_parameters"]}
        raw["rope_parameters"] = parameters
    raw["longitude"] = entry
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def name_target(folder: str | os.PathLike[str], target: int) -> None:
    """Write beside a saved scheme the length that it was trained for: where the window was raised
    to it, a factor no longer tells how far the scheme reaches."""
    file = Path(folder) / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    entry = raw.get("longitude")
    if entry is None or entry.get("target") == target:
        return
    raw["longitude"] = {**entry, "target": target}
    with atomic_file(file) as part:
        part.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
        model: what `peft.get_peft_model` gave, its base under `apply` or as it is.
        base: the base as `load` was given it, a name on the Hub, a folder or a file.
        revision: of the base on the Hub.
        target: the length that it was trained for.
        grown: the scheme and length by which the base's table of positions was written out longer
            (families/longer.py) before the adapter was put on.
    """
    path = Path(folder).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, but an adapter is saved into a folder: give another.")
    inner = model.get_base_model()
    entry = written_scheme(inner) or {"version": __version__}
    entry |= {"base": about_base(model, _lasting(base), revision)}
    entry |= {"target": target} if target else {}
    entry |= {"grown": {"scheme": grown[0], "length": grown[1]}} if grown else {}
    with atomic_checkpoint(path) as part:
        with unpatched(inner), quiet_transformers(bars=False):
            try:
                model.save_pretrained(part, save_embedding_layers=False)
            except (ValueError, RuntimeError, TypeError) as error:
                said = short(str(error), 160).rstrip(".")
                raise UserError(f"peft can't save this adapter ({said}): mend it first.") from error
        text = json.dumps(entry, indent=2, allow_nan=False) + "\n"
        (part / LONGITUDE_JSON).write_text(text, encoding="utf-8")


def _lasting(base: str) -> str:
    """A name that leads to the base from any folder."""
    source = find(base, None)
    here = Path(base).expanduser()
    return str(here.resolve()) if source.folder is not None and here.exists() else base
