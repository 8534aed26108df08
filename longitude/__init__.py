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
    from longitude.core.scheme import Split as Split
    from longitude.core.text import dump as dump
    from longitude.core.text import parse as parse
    from longitude.core.validate import UserError as UserError
    from longitude.explorer.api import explore as explore
    from longitude.extension.api import extend as extend
    from longitude.extension.api import report as report
    from longitude.inspection.api import check as check
    from longitude.inspection.api import inspect as inspect
    from longitude.inspection.api import schemes as schemes
    from longitude.inspection.api import show as show
    from longitude.ops.attention import attention as attention
    from longitude.ops.explain import explain as explain
    from longitude.ops.shards import gather_shards as gather_shards
    from longitude.ops.shards import shard as shard
    from longitude.ops.shards import shard_positions as shard_positions
    from longitude.probing.api import probe as probe
    from longitude.reading.api import read as read
    from longitude.runtimes.api import export as export
    from longitude.runtimes.api import lint as lint
    from longitude.runtimes.api import verify as verify
    from longitude.training.api import lab as lab
    from longitude.training.api import train as train
    from longitude.training.api import tune as tune

_NAMES = {
    "cache": ["Cache"],
    "core.part": ["Dims"],
    "core.scheme": ["Layers", "Scheme", "Split"],
    "core.text": ["dump", "parse"],
    "core.validate": ["UserError"],
    "explorer.api": ["ExploreOptions", "explore"],
    "extension.api": ["ExtendOptions", "extend", "report"],
    "inspection.api": [
        *("CheckOptions", "InspectOptions", "ShowOptions"),
        *("check", "inspect", "schemes", "show"),
    ],
    "ops.attention": ["attention"],
    "ops.explain": ["explain"],
    "ops.shards": ["gather_shards", "shard", "shard_positions"],
    "probing.api": ["ProbeOptions", "probe"],
    "reading.api": ["ReadOptions", "read"],
    "runtimes.api": ["ExportOptions", "LintOptions", "VerifyOptions", "export", "lint", "verify"],
    "training.api": ["LabOptions", "TrainOptions", "TuneOptions", "lab", "train", "tune"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "Mistake":  # the name of UserError in 0.1
        name = "UserError"
    if name not in _HOME:
        raise AttributeError(f"longitude has no name {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f"longitude.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
