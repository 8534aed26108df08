"""Longitude knows where every token is, at any length.

Names are resolved at first use, so that the command line can answer without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longitude.attention import attention as attention
    from longitude.cache import Cache as Cache
    from longitude.part import Dims as Dims
    from longitude.part import Mistake as Mistake
    from longitude.scheme import Layers as Layers
    from longitude.scheme import Scheme as Scheme
    from longitude.text import dump as dump
    from longitude.text import parse as parse

_HOME = {
    "Cache": "cache",
    "Dims": "part",
    "Layers": "scheme",
    "Mistake": "part",
    "Scheme": "scheme",
    "attention": "attention",
    "dump": "text",
    "parse": "text",
}
__all__ = ["Cache", "Dims", "Layers", "Mistake", "Scheme", "attention", "dump", "parse"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"longitude has no name {name!r}; it has {', '.join(__all__)}.")
    module = import_module(f"longitude.{_HOME[name]}")
    # `attention` is a room and a function in one: its package can be called
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
