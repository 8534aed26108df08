"""Hugging Face: load, patch, save and stream any checkpoint. Only here is transformers imported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longitude.hf.decode_graph import cuda_graphs as cuda_graphs
    from longitude.hf.loading import load as load
    from longitude.hf.patch import apply as apply
    from longitude.hf.patch import patched as patched
    from longitude.hf.patch import scheme_of as scheme_of
    from longitude.hf.patch import undo as undo
    from longitude.hf.saving import save as save
    from longitude.hf.saving import save_adapter as save_adapter
    from longitude.hf.streaming import stream as stream

_HOME = {
    **dict.fromkeys(("apply", "patched", "scheme_of", "undo"), "longitude.hf.patch"),
    **dict.fromkeys(("save", "save_adapter"), "longitude.hf.saving"),
    "cuda_graphs": "longitude.hf.decode_graph",
    "load": "longitude.hf.loading",
    "stream": "longitude.hf.streaming",
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"longitude.hf has no name {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
