"""Longitude knows where every token is, at any length.

Names are resolved at first use (PEP 562), so the command line can answer without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from longitude.cache import Cache as Cache
    from longitude.core.part import Dims as Dims
    from longitude.core.scheme import Layers as Layers
    from longitude.core.scheme import Scheme as Scheme
    from longitude.core.text import dump as dump
    from longitude.core.text import parse as parse
    from longitude.core.validate import UserError as UserError
    from longitude.ops.attention import attention as attention
    from longitude.ops.explain import explain as explain

_HOME = {
    "Cache": "cache",
    "Dims": "core.part",
    "Layers": "core.scheme",
    "Scheme": "core.scheme",
    "UserError": "core.validate",
    "attention": "ops.attention",
    "dump": "core.text",
    "explain": "ops.explain",
    "parse": "core.text",
}
__all__ = [
    "Cache",
    "Dims",
    "Layers",
    "Scheme",
    "UserError",
    "attention",
    "dump",
    "explain",
    "parse",
]


def __getattr__(name: str) -> Any:
    if name == "Mistake":  # the name of UserError in 0.1
        name = "UserError"
    if name not in _HOME:
        raise AttributeError(f"longitude has no name {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"longitude.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
