"""An adapter written down with the scheme that was applied to its model; `load` brings both back.

The files are peft's own, and beside them longitude.json (loading/adapter.py), since peft has no
place for a rotation. They appear whole, adapter_config.json last: a folder that has it has all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from longitude import __version__
from longitude.atomic import whole_checkpoint
from longitude.fields import Mistake, short
from longitude.hf.loading.adapter import OURS, about_base
from longitude.hf.loading.hush import hushed
from longitude.hf.loading.source import find
from longitude.hf.patch import without
from longitude.hf.save import written_scheme


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
        raise Mistake(f"{path} is a file, but an adapter is saved into a folder: give another.")
    inner = model.get_base_model()
    entry = written_scheme(inner) or {"version": __version__}
    entry |= {"base": about_base(model, _lasting(base), revision)}
    entry |= {"target": target} if target else {}
    entry |= {"grown": {"scheme": grown[0], "length": grown[1]}} if grown else {}
    with whole_checkpoint(path) as part:
        with without(inner), hushed(bars=False):
            try:
                model.save_pretrained(part, save_embedding_layers=False)
            except (ValueError, RuntimeError, TypeError) as error:
                said = short(str(error), 160).rstrip(".")
                raise Mistake(f"peft can't save this adapter ({said}): mend it first.") from error
        text = json.dumps(entry, indent=2, allow_nan=False) + "\n"
        (part / OURS).write_text(text, encoding="utf-8")


def _lasting(base: str) -> str:
    """A name that leads to the base from any folder."""
    source = find(base, None)
    here = Path(base).expanduser()
    return str(here.resolve()) if source.folder is not None and here.exists() else base
