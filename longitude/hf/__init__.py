"""Hugging Face: the only room that imports transformers, and only when it is called.

Names are resolved at first use, as in `longitude` itself. load.py and save.py hold the function of
their name, and it is the function that `longitude.hf.load` means, whichever was imported first.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longitude.hf.adapter import save_adapter as save_adapter
    from longitude.hf.load import load as load
    from longitude.hf.patch import apply as apply
    from longitude.hf.patch import patched as patched
    from longitude.hf.patch import scheme_of as scheme_of
    from longitude.hf.patch import undo as undo
    from longitude.hf.save import save as save
    from longitude.hf.stream import stream as stream

_HOME = {
    "apply": "longitude.hf.patch",
    "load": "longitude.hf.load",
    "patched": "longitude.hf.patch",
    "save": "longitude.hf.save",
    "save_adapter": "longitude.hf.adapter",
    "scheme_of": "longitude.hf.patch",
    "stream": "longitude.hf.stream",
    "undo": "longitude.hf.patch",
}
__all__ = ["apply", "load", "patched", "save", "save_adapter", "scheme_of", "stream", "undo"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"longitude.hf has no name {name!r}; it has {', '.join(_HOME)}.")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)


class _Room(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """What an import leaves here: a file, or the function that it is named after."""
        of_the_name = name in _HOME and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if of_the_name else value)


sys.modules[__name__].__class__ = _Room
