"""Every part by its class name: `from longitude.parts import Alibi`.

Parts are found by folder: each module here is imported, and each class under `@part` is exported.
A new encoding is one new file; nothing else needs a line (the imports below only serve type
checkers).
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from longitude.core.part import PARTS

if TYPE_CHECKING:
    from longitude.parts.adaptive import *
    from longitude.parts.axes import *
    from longitude.parts.biases import *
    from longitude.parts.dynamic import *
    from longitude.parts.embeddings import *
    from longitude.parts.fire import *
    from longitude.parts.forget import *
    from longitude.parts.frequencies import *
    from longitude.parts.masks import *
    from longitude.parts.positions import *
    from longitude.parts.relative_vectors import *
    from longitude.parts.remaps import *
    from longitude.parts.rope import *
    from longitude.parts.scales import *
    from longitude.parts.spectra import *


def discover() -> None:
    """Import every module of this package and export its parts."""
    for module in pkgutil.iter_modules(__path__):  # noqa: F405
        importlib.import_module(f"{__name__}.{module.name}")
    globals().update({cls.__name__: cls for cls in PARTS.values()})


discover()
